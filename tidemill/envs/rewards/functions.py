"""Rewards that need nothing but the standard library: pure functions `(completion, answer, **options) -> float`.

Each gives 1.0 or 0.0, and None where there is no usable gold answer (which becomes Unscorable, never a zero).
The answer may be any value of a column: a number is taken as it is written.
A user's own reward has the same form; these are also what `reward = "exact"` and the like in a recipe name.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from math import inf

from tidemill.envs.rewards.answers import gold_of, judged
from tidemill.envs.rewards.boxes import last_boxes
from tidemill.envs.rewards.read_number import Reading, compare, reading_of, spelled


def exact(completion: str, answer: object, *, normalise: bool = False) -> float | None:
    """Equality after stripping outer whitespace. `normalise` also ignores case, runs of whitespace, Unicode
    compatibility forms and punctuation at the end. None when the row has no answer."""
    if missing(answer):
        return None
    given, wanted = completion.strip(), str(answer).strip()
    if normalise:
        given, wanted = _normal(given), _normal(wanted)
    return float(given == wanted)


def regex(completion: str, answer: object, *, pattern: str, normalise: bool = False) -> float | None:
    """Compare what the last match of `pattern` captured (its first group, or the whole match) with the answer.
    None when the row has no answer."""
    if missing(answer):
        return None
    matches = list(re.finditer(pattern, completion, re.DOTALL))
    if not matches:
        return 0.0
    found = matches[-1].group(1 if matches[-1].re.groups else 0)
    return exact(found or "", answer, normalise=normalise)


def numeric(completion: str, answer: object, *, tolerance: float = 0.0) -> float | None:
    """Compare the number that the completion ends with to that of the answer, exactly.

    The number is that of the last box, or the last one of the text, read as a whole: `-$1,234.50`, `-3/4`, `3\\frac{1}{2}`,
    `6.02e23`, `1.5 \\times 10^3`, `2\\sqrt{3}`, `5%`, `$2 million`. Units are read over. Equal within
    `tolerance * max(1, |answer|)`. None when the answer holds no single number, or when it depends on how a text is meant
    ("5-3", "1.200", "2 hours 30 minutes") whether it is right.
    """
    if missing(answer):
        return None
    wanted = _as_number(answer) or reading_of(str(answer), alone=True)
    if wanted.value is None:
        return None
    given = reading_of(completion)
    if given.empty:
        return None if spelled(completion) else 0.0
    room = Fraction(tolerance) * max(Fraction(1), abs(Fraction(wanted.value)))
    return compare(wanted, given, room)


def _as_number(answer: object) -> Reading | None:
    """A column of numbers says what each is: 1.200 is no 1,200 there."""
    if isinstance(answer, bool) or not isinstance(answer, int | float) or not abs(answer) < inf:
        return None
    return Reading(Fraction(str(answer)) if isinstance(answer, float) else Fraction(answer))


def last_boxed(completion: str, answer: object) -> float | None:
    """Compare the last `\\boxed{...}` of the completion with the answer (or the answer's own box).

    1.0 for the same text without its spaces and styles, and for the same value: numbers, expressions with letters, tuples,
    lists, sets and intervals. None when the row has no answer, or when neither can be decided.
    """
    if missing(answer) or not str(answer).strip():
        return None
    boxes = last_boxes(completion)
    if boxes is None:
        return 0.0
    return judged(boxes[0], gold_of(answer))


def missing(answer: object) -> bool:
    """Whether the row has no answer: the column is not there, null, or the NaN of a table."""
    return answer is None or answer != answer


def last_number(text: str) -> Fraction | None:
    """The number that a text ends with, exactly; None when there is none, or none that means one thing only."""
    value = reading_of(text).value
    return None if value is None else Fraction(value)


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(" .,;:!?")
