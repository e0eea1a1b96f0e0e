"""Built-in rewards exact, regex, numeric and last_boxed, as pure functions of completion and answer.

Each returns 1.0 or 0.0, and None without a usable gold answer (which becomes Unscorable, never a zero). The answer may be
any value of a column. A recipe names them, as in `reward = "exact"`; a user's own reward has the same form,
`(completion, answer, **options) -> float`.
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
    """1.0 when completion and answer are equal after stripping outer whitespace, else 0.0.

    normalise: also ignore case, runs of whitespace, Unicode compatibility forms and punctuation at the end.
    None when the row has no answer.
    """
    if missing(answer):
        return None
    given, wanted = completion.strip(), str(answer).strip()
    if normalise:
        given, wanted = _normal(given), _normal(wanted)
    return float(given == wanted)


def regex(completion: str, answer: object, *, pattern: str, normalise: bool = False) -> float | None:
    """Compare the last match of `pattern` (its first group, if any) with the answer; None without an answer."""
    if missing(answer):
        return None
    matches = list(re.finditer(pattern, completion, re.DOTALL))
    if not matches:
        return 0.0
    found = matches[-1].group(1 if matches[-1].re.groups else 0)
    return exact(found or "", answer, normalise=normalise)


def numeric(completion: str, answer: object, *, tolerance: float = 0.0) -> float | None:
    """Compare the number at the end of the completion exactly with the number of the answer.

    The number is that of the last box, or the last one of the text, read as a whole: `-$1,234.50`, `-3/4`, `3\\frac{1}{2}`,
    `6.02e23`, `1.5 \\times 10^3`, `2\\sqrt{3}`, `5%`, `$2 million`. Units are skipped. Numbers are equal within
    `tolerance * max(1, |answer|)`. None when the answer holds no single number, or when the verdict depends on how an
    ambiguous text is meant ("5-3", "1.200", "2 hours 30 minutes").
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
    """The reading of an answer that is a number already: 1.200 in such a column is never 1,200."""
    if isinstance(answer, bool) or not isinstance(answer, int | float) or not abs(answer) < inf:
        return None
    return Reading(Fraction(str(answer)) if isinstance(answer, float) else Fraction(answer))


def last_boxed(completion: str, answer: object) -> float | None:
    """Compare the last `\\boxed{...}` of the completion with the answer (or the answer's own box).

    1.0 for equal text apart from spaces and styles, and for equal values: numbers, expressions with letters, tuples, lists,
    sets and intervals. 0.0 without a box. None when the row has no answer, or when equality cannot be decided.
    """
    if missing(answer) or not str(answer).strip():
        return None
    boxes = last_boxes(completion)
    if boxes is None:
        return 0.0
    return judged(boxes[0], gold_of(answer))


def missing(answer: object) -> bool:
    """True when the row has no answer: the column is missing, null, or NaN as in a table."""
    return answer is None or answer != answer


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(" .,;:!?")
