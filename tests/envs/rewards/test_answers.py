"""Answers as public question sets write them, by right and by wrong replies: no wrong one earns 1, no right one 0.

What is right is known from `sympy`, which none of the rewards but `math` uses, and it only for what is no plain number.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import sympy
from envs.rewards.answer_table import rows

from tidemill.envs.rewards.functions import last_boxed, numeric
from tidemill.envs.rewards.math import score

logging.getLogger("math_verify").setLevel(logging.ERROR)
FORMS: dict[Callable[..., float | None], tuple[str, ...]] = {
    numeric: ("{}", "So the answer is {}.", "First \\boxed{{999983}}, but no: \\boxed{{{}}}"),
    last_boxed: ("\\boxed{{{}}}", "First I get \\boxed{{999983}}. No, wait. It is $\\boxed{{{}}}$."),
    score: ("The answer is $\\boxed{{{}}}$.",),
}


@cache
def value_of(text: str) -> Any:
    """A number or a structure of them; a text; None where the answer has no value."""
    return None if text == "None" else text.strip("'") if text.startswith("'") else sympy.sympify(text, rational=True)


def is_number(value: Any) -> bool:
    return isinstance(value, sympy.Expr) and bool(value.is_number) and bool(value.is_real)


def made_right(value: Any) -> Iterator[str]:
    if not is_number(value):
        if isinstance(value, sympy.Basic):
            yield sympy.latex(value)
        return
    yield sympy.latex(value)
    yield str(value).replace("**", "^")
    if value.is_Integer:
        yield f"{int(value):,}"
        yield f"${int(value)}$"
    elif value.is_Rational and {*sympy.factorint(value.q)} <= {2, 5} and value.q < 10**6:
        yield sympy.Float(value, 30).__format__(".12f").rstrip("0")


def made_wrong(value: Any, answer: str) -> Iterator[str]:
    if is_number(value):
        for other in (-value, value + 1, value * 10, value / 10, value * 100, value * 1000, *([1 / value] if value else [])):
            if other != value:
                yield sympy.latex(other)
    for part in re.findall(r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?", answer):  # read in part
        number = sympy.sympify(part.replace(",", "").lstrip("0") or "0", rational=True)
        if not is_number(value) or sympy.simplify(number - value) != 0:
            yield part


def cases() -> Iterator[tuple[str, str, str, str, bool]]:
    """(shape, answer, value, reply, whether it is right)."""
    for shape, answer, written, right, wrong in rows():
        value = value_of(written)
        for reply in dict.fromkeys([*right, *made_right(value)]):
            yield shape, answer, written, reply, True
        for reply in dict.fromkeys([*wrong, *made_wrong(value, answer)]):
            yield shape, answer, written, reply, False


def judged(reward: Callable[..., float | None], every: int) -> tuple[list[str], Counter[tuple[str, bool, Any]]]:
    """Verdicts that are wrong, and how many there are of each. every: one case of so many."""
    bad, counts = [], Counter[tuple[str, bool, Any]]()
    for i, (shape, answer, written, reply, right) in enumerate(cases()):
        if i % every:
            continue
        for form in FORMS[reward]:
            found = reward(form.format(reply), answer)
            readable = written != "None" and (reward is not numeric or is_number(value_of(written)))
            counts[(shape if readable else "no value", right, found)] += 1
            if found == (0.0 if right else 1.0) or (found == 1.0 and written == "None" and not right):
                bad.append(f"answer {answer!r}: {'right' if right else 'wrong'} {form.format(reply)!r} earns {found}")
    return bad, counts


def share_of_none(counts: Counter[tuple[str, bool, Any]], right: bool) -> float:
    those = {key: n for key, n in counts.items() if key[0] != "no value" and key[1] is right}
    return sum(n for key, n in those.items() if key[2] is None) / sum(those.values())


def test_there_are_three_hundred_answers_with_replies_of_both_kinds():
    assert len(rows()) >= 300
    assert len({answer for _, answer, *_ in rows()}) >= 295
    for shape, answer, written, right, wrong in rows():
        found = [*wrong, *made_wrong(value_of(written), answer)]
        assert found, (shape, answer)
        assert written == "None" or right or list(made_right(value_of(written))), answer


@pytest.mark.parametrize("reward", [numeric, last_boxed, score], ids=["numeric", "last_boxed", "math"])
@pytest.mark.parametrize("part", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_no_wrong_reply_earns_1_and_no_right_one_0(reward, part):
    bad, counts = judged(reward, 1 if part == "all" else 31 if reward is score else 5)
    assert not bad, "\n".join(bad[:40])
    assert share_of_none(counts, right=True) < 0.03, counts
    assert share_of_none(counts, right=False) < (0.1 if part == "all" else 0.2), counts
