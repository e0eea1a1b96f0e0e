"""Reward `math`: mathematical equivalence, by `answers` first and math-verify if undecided.

`answers` decides numbers and simple structures of them, and is always fast. Everything else goes to math-verify, a symbolic
comparison that may run for ever or take all memory. Its own time-outs are off: they answer "wrong" where the truth is "not
judged". Texts known to be heavy do not reach it, and a limit of processor time ends it with None, not zero. This module is
imported only in reward workers.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from math_verify import parse, verify

from tidemill.envs.rewards.answers import LONGEST, given_of, gold_of, in_question, judged, plain_numbers
from tidemill.envs.rewards.boxes import boxed, last_boxes
from tidemill.envs.rewards.functions import missing, numeric

SECONDS = 2.0  # limit of processor time; a comparison usually takes milliseconds
_HEAVY = re.compile(
    r"\^\s*\{?[^{}]{0,30}\^|\^\s*\{?\s*-?\d{5,}|\d{5,}\s*!|!\s*!"
    r"|[)}\]]\s*\^\s*\{?\s*-?\d{2,}|\d{400}|\\(?:int|sum|prod|lim|iint|oint)(?![a-z])|\d[eE][-+]?\d{4,}"
    r"|(?:\\binom|\\choose|\\pmod|\\bmod)[^a-z]*\d{5,}|(?:[{(\[]\s*){40,}|(?:\\frac\s*){20,}|(?:\\sqrt\s*\{?\s*){20,}"
)


def score(completion: str, answer: object) -> float | None:
    """1.0 when the completion's final answer equals the answer, 0.0 when not, None if undecided.

    The final answer is the last box, or the last boxes side by side; without a box the last expression.
    """
    if missing(answer) or not str(answer).strip():
        return None
    boxes, gold = last_boxes(completion), gold_of(answer)
    if boxes is None:
        return _unboxed(completion, answer)
    given = given_of(boxes[0])
    own = judged(boxes[0], gold)
    if own == 1.0 or (own == 0.0 and plain_numbers(given, gold)):
        return own
    if own is None and in_question(given, gold):
        return None
    theirs = _verified("\n".join(f"$\\boxed{{{each}}}$" for each in dict.fromkeys(boxes[0])), answer)
    return theirs if own is None or theirs == own else None


def _unboxed(completion: str, answer: object) -> float | None:
    own = numeric(completion[-LONGEST:], answer)
    if own == 1.0:
        return own
    theirs = _verified(completion[-LONGEST:], answer)
    if numeric("0", answer) is None:  # the answer is not a number
        return theirs
    return own if theirs == own else None


def _verified(completion: str, answer: object) -> float | None:
    """The verdict of math-verify; None when it cannot read the answer, or would take too long."""
    gold_text = str(answer)
    marked = any(mark in gold_text for mark in ("$", "\\(", "\\[")) or boxed(gold_text) is not None
    gold_text = gold_text if marked else f"\\boxed{{{gold_text}}}"
    if any(len(text) > 2 * LONGEST or _HEAVY.search(text) for text in (completion, gold_text)):
        return None

    def judged() -> float | None:
        gold = parse(gold_text, parsing_timeout=None)  # type: ignore[arg-type]
        if not gold:
            return None
        given = parse(completion, parsing_timeout=None)  # type: ignore[arg-type]
        return float(verify(gold, given, timeout_seconds=None))

    return _limited(judged)


class _TooLong(BaseException):  # math-verify catches every Exception
    pass


def _limited(judged: Callable[[], float | None]) -> float | None:
    try:
        with _limit():
            return judged()
    except (_TooLong, RecursionError, MemoryError, OverflowError):
        return None


@contextmanager
def _limit() -> Iterator[None]:
    """Limit processor time, which other programs do not change; raises _TooLong. Only in a main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
