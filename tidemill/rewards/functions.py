"""Rewards that need nothing but the standard library: pure functions `(completion, answer, **options) -> float`.

Each gives 1.0 or 0.0, and None where there is no usable gold answer (which becomes Unscorable, never a zero).
The answer may be any value of a column: a number is taken as it is written.
A user's own reward has the same form; these are also what `reward = "exact"` and the like in a recipe name.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
# A minus is a sign only where it cannot be a subtraction ("5-3" ends in 3, "= -3" in -3).
_SIGNED = rf"(?:(?<![\w)\]}}.])[-+−])?(?:{_DIGITS})(?:[eE][-+]?\d+)?"
_NUMBER = re.compile(rf"(?P<latex>(?:(?<![\w)\]}}])[-+−])?\\[dt]?frac\{{\s*-?\d+\s*\}}\{{\s*-?\d+\s*\}})"
                     rf"|(?P<top>{_SIGNED})(?:\s*/\s*(?P<bottom>{_DIGITS}))?")  # fmt: skip
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"[{}]")
_LONGEST = 400  # digits, and size of an exponent: beyond that it is no answer, and arithmetic on it would not end


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
    """Compare the last number of the completion with the last number of the answer, as exact fractions.

    Reads `1,234.5`, `-3/4`, `6.02e23` and `\\frac{3}{4}`. Equal within `tolerance * max(1, |answer|)`.
    None when the answer holds no number.
    """
    wanted, given = last_number(str(answer)), last_number(completion)
    if wanted is None:
        return None
    return float(given is not None and abs(given - wanted) <= Fraction(tolerance) * max(Fraction(1), abs(wanted)))


def last_boxed(completion: str, answer: object) -> float | None:
    """Compare the content of the last `\\boxed{...}` of the completion with the answer (or the answer's own box),
    ignoring spaces. None when the row has no answer."""
    if missing(answer):
        return None
    given, gold = boxed(completion), str(answer)
    inner = boxed(gold)
    wanted = gold if inner is None else inner
    return float(given is not None and "".join(given.split()) == "".join(wanted.split()))


def missing(answer: object) -> bool:
    """Whether the row has no answer: the column is not there, null, or the NaN of a table."""
    return answer is None or answer != answer


def last_number(text: str) -> Fraction | None:
    """The last number in `text`, exactly; None when there is none, or none of a sane size."""
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    match = matches[-1]
    if match["latex"]:
        top, bottom = (
            (int(n) for n in re.findall(r"-?\d+", match["latex"])[:2]) if len(match["latex"]) < _LONGEST else (0, 0)
        )
        sign = -1 if match["latex"][0] in "-−" else 1
        return sign * Fraction(top, bottom) if bottom else None
    top, bottom = _fraction(match["top"]), _fraction(match["bottom"] or "1")
    return top / bottom if top is not None and bottom else None


def boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}`, with its braces balanced; None when there is no complete one."""
    opens = {match.end() for match in _BOX.finditer(text)}
    stack: list[int] = []
    start = end = -1
    for match in _BRACE.finditer(text):  # one pass: a completion may well be a hundred kilobytes of braces
        if match[0] == "{":
            stack.append(match.end())
        elif stack and (opened := stack.pop()) in opens and opened > start:
            start, end = opened, match.start()
    return text[start:end] if start >= 0 else None


def _fraction(text: str) -> Fraction | None:
    text = text.replace(",", "").replace("−", "-")
    mantissa, _, exponent = text.lower().partition("e")
    if len(mantissa) > _LONGEST or len(exponent) > 4 or abs(int(exponent or 0)) > _LONGEST:
        return None
    return Fraction(text)


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(" .,;:!?")
