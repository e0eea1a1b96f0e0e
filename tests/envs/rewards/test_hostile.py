"""Texts that are made to take long: every reward says something within a bounded time, and never by luck."""

from __future__ import annotations

import logging
import resource
import time

import pytest

from tidemill.envs.rewards.functions import last_boxed, numeric
from tidemill.envs.rewards.math import score

logging.getLogger("math_verify").setLevel(logging.ERROR)
N = 30_000
HOSTILE = {
    "tower": "10^{10^{10^{10}}}",
    "flat tower": "10^10^10^10",
    "power": "9^{9999999}",
    "negative power": "2^{-10^{9}}",
    "exponent": "1e999999999",
    "digits": "9" * N,
    "factorials": "100000!!",
    "factorial": "99999999!",
    "braces": "{" * N + "1" + "}" * N,
    "open braces": "{" * N + "1",
    "parentheses": "(" * N + "1" + ")" * N,
    "fractions": "\\frac{" * N + "1",
    "nested fractions": "\\frac{1}{" * 500 + "2" + "}" * 500,
    "bare fractions": "\\frac" * N + "12",
    "roots": "\\sqrt{" * 500 + "2" + "}" * 500,
    "boxes": "\\boxed{" * 5000 + "1" + "}" * 5000,
    "minus": "-" * N + "1",
    "commas": "1," * N,
    "groups": "1,000" * N,
    "spaced": "1 000 " * N,
    "points": "1.000" * N,
    "slashes": "1/" * N + "1",
    "stars": "*" * N + "1",
    "dollars": "$-" * N + "1",
    "text": "\\text{" * N + "1",
    "tags": "<a " * N + "1",
    "superscripts": "1" + "⁹" * N,
    "halves": "½" * N,
    "spaces": "1" + " " * N + "2",
    "escapes": "\\" * N + "1",
    "letters": "abcdefgh" * (N // 8),
    "polynomial": "(a+b+c+d+e+f+g+h)^{500}",
    "sum": "\\sum_{k=1}^{1000000000} \\frac{1}{k}",
    "integral": "\\int_0^1 e^{-x^2} \\sin(x^x) dx",
    "choose": "\\binom{100000000}{50000000}",
    "sets": "\\{" + ",".join(map(str, range(3000))) + "\\}",
    "items": ",".join(["\\frac{1}{3}"] * 90),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_every_reward_ends_soon(case):
    text = HOSTILE[case]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.process_time()
    for reply, answer in ((text, "7"), (f"\\boxed{{{text}}}", "7"), ("\\boxed{7}", text), (f"so $x = {text}$", "7")):
        assert numeric(reply, answer) != 1.0 and last_boxed(reply, answer) != 1.0 and score(reply, answer) != 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # of KiB
    assert time.process_time() - begun < 20.0  # of seconds that are milliseconds where nothing else computes
