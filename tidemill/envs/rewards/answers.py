"""Compares mathematical answers as text or by value: numbers, expressions, tuples, sets, intervals.

    1.0  equal text apart from spaces and styles, or equal values
    0.0  both can be read, and they differ
    None it cannot be decided

Expressions with letters count as equal when they are exactly equal at several points: a difference that is zero at several
arbitrary fractions is zero. No text makes this slow: large ones are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from tidemill.envs.rewards.arithmetic import Token, Unreadable, Value, equal, evaluate, tokens_of
from tidemill.envs.rewards.boxes import boxed
from tidemill.envs.rewards.plain_math import plain
from tidemill.envs.rewards.read_number import Reading, compare, reading_of, spelled
from tidemill.envs.rewards.units import SCALES, unit_of

LONGEST = 2_000  # characters per answer
_ITEMS = 100
_OPEN, _CLOSE = "([{⦃", ")]}⦄"
_POINTS = 4
_PREFIX = re.compile(r"^\s*(?:[A-Za-z](?:_\{?\w+\}?)?(?:\(\s*[a-z]\s*\))?|«[^«»]*»)\s*(?:=(?!=)|∈|:)\s*(?=\S)")
_BETWEEN_DIGITS = re.compile(r"(?<=[0-9])\s+(?=[0-9])")
_UNIT_REST = re.compile(r"(?:\^\{?[23]\}?|/|«[^«»]*»|[A-Za-z]+)*")
_WORD = re.compile(r"[^\W\d_]+(?:[ -][^\W\d_]+)*", re.UNICODE)
_CHOICE = re.compile(r"^\s*\(([A-Za-z])\)(?=\s|$)")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer in the forms in which it is compared."""

    written: str  # without spaces and styles
    shown: str  # as `plain` returns it
    text: str
    tokens: tuple[Token, ...]
    bare: bool = False  # from several boxes: a list without an order


def gold_of(answer: object) -> Answer:
    """The gold answer: its last box, the text after "####", or the whole text."""
    text = str(answer)
    inner = boxed(text)
    if inner is None and (at := text.rfind("####")) >= 0:
        inner = text[at + 4 :].strip().split("\n")[0]
    return _answer(text if inner is None else inner)


def given_of(contents: Sequence[str]) -> Answer:
    """The answer that boxes hold together: one, or a list of answers to one question."""
    if len({"".join(each.split()) for each in contents}) > 1:
        return _answer(", ".join(contents), bare=True)
    return _answer(contents[-1])


def judged(contents: Sequence[str], gold: Answer) -> float | None:
    """The verdict on boxes side by side; None when only the last one, taken alone, may be right."""
    whole = verdict(given_of(contents), gold)
    return None if whole == 0.0 and len(contents) > 1 and verdict(given_of(contents[-1:]), gold) != 0.0 else whole


def verdict(given: Answer, gold: Answer) -> float | None:
    """1.0 for equal answers, 0.0 for different ones, None if that cannot be decided."""
    if given.written == gold.written:
        return 1.0
    if max(len(given.shown), len(gold.shown)) > LONGEST:
        return None
    if (words := _words(given, gold)) is not None:
        return words[0]
    wanted = reading_of(gold.text, alone=True)
    found = Reading() if given.bare else reading_of(given.text, alone=True)
    if wanted.value is not None and found.value is not None:
        return compare(wanted, found)
    same = _same(list(given.tokens), list(gold.tokens))
    if (wanted.value is None) != (found.value is None):  # one is a number, the other none or an ambiguous text
        return None if same is not False or in_question(given, gold) else 0.0
    if same is None:
        return None
    return float(same)


def in_question(given: Answer, gold: Answer) -> bool:
    """True when one answer is a number that the other may stand for or contain."""
    a, b = (reading_of(each.text, alone=True) for each in (given, gold))
    those = (a.value, b.possible) if a.value is not None else (b.value, a.possible)
    return those[0] is not None and any(equal(those[0], each) for each in those[1])


def plain_numbers(*answers: Answer) -> bool:
    """True when each answer is nothing but one number, so that only one reading is possible."""
    doubtful = any(each.bare or any(c in "%(,°«" or c.isalpha() for c in each.shown) for each in answers)
    return not doubtful and all(_value(list(each.tokens), {}) is not None for each in answers)


def _answer(text: str, bare: bool = False) -> Answer:
    shown = plain(text[: LONGEST + 1]).strip()
    shown = shown.rstrip(".").strip() if not shown.endswith("..") else shown
    while (shorter := _PREFIX.sub("", shown, count=1)) != shown and len(shorter) > 0:
        shown = shorter.strip()
    written = re.sub(r"\\frac(\d)(\d)(?!\d)", r"\\frac{\1}{\2}", _unspaced(shown))
    return Answer(written if len(text) <= LONGEST else _unspaced(text), shown, text, tuple(tokens_of(shown)), bare)


def _unspaced(text: str) -> str:
    return "".join(_BETWEEN_DIGITS.sub("_", text).replace("«", "").replace("»", "").split())


def _words(given: Answer, gold: Answer) -> tuple[float | None] | None:
    """The verdict, in a tuple, if an answer is words alone or a choice's letter; None if neither is."""
    texts = [_CHOICE.sub(r"\1", each.shown.replace("«", "").replace("»", "")).strip() for each in (given, gold)]
    letters = [_WORD.fullmatch(text) is not None for text in texts]
    if not any(letters):
        return None
    if all(letters):
        a, b = (" ".join(text.split()) for text in texts)
        if a.casefold() == b.casefold():
            return (1.0,) if a == b or len(a) > 1 else (None,)
        return (None,) if sorted(a) == sorted(b) and len(a) < 4 else (0.0,)  # ab and ba may both be products
    word, other = texts if letters[0] else reversed(texts)
    if len(word) == 1 and other[:1] in (word, "(") and not other[1:2].isalnum():
        return (None,)  # "C" and "C) 5"
    if len(word) < 4:
        return None
    return (None,) if spelled(word) or not any(each.isdigit() for each in other) else (0.0,)


def _same(a: list[Token], b: list[Token]) -> bool | None:
    a, a_unit = _without_unit(a)
    b, b_unit = _without_unit(b)
    x, y = _parts(a), _parts(b)
    if x is None or y is None:
        if x is None and y is None:
            found = _same_value(a, b)
            return None if found and a_unit and b_unit and a_unit != b_unit else found
        return None if _opaque(a if x is None else b) else False
    (left, these, right), (begin, those, end) = x, y
    unordered = {left, begin} <= {"", "⦃"}
    if len(these) != len(those):
        return False if left == begin or unordered else None
    if unordered:
        return _same_set(these, those)
    found = _all(_same(i, j) for i, j in zip(these, those, strict=True))
    return (
        None if found and (left, right) != (begin, end) and "" in (left, begin) else found and (left, right) == (begin, end)
    )


def _same_set(these: list[list[Token]], those: list[list[Token]]) -> bool | None:
    """Compare two lists of items in any order."""
    left, unsure = list(those), False
    for each in these:
        verdicts = [_same(each, other) for other in left]
        if True in verdicts:
            left.pop(verdicts.index(True))
        elif None in verdicts:
            unsure = True
        else:
            return False
    return None if unsure else True


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    found = list(verdicts)
    return False if False in found else None if None in found else True


def _parts(tokens: list[Token]) -> tuple[str, list[list[Token]], str] | None:
    """Brackets and items of a tuple, interval, set or list; None if it has no comma at the top level."""
    left = right = ""
    if len(tokens) > 2 and tokens[0].text in "([⦃" and _closing(tokens, 0) == len(tokens) - 1:
        left, right, inner = tokens[0].text, tokens[-1].text, tokens[1:-1]
    else:
        inner = tokens
    items: list[list[Token]] = [[]]
    depth = 0
    for token in inner:
        depth += (token.text in _OPEN) - (token.text in _CLOSE)
        if depth == 0 and (token.text in (",", ";") or (left == "" and token.text.strip("« »") in ("and", "or"))):
            items.append([])
        else:
            items[-1].append(token)
    items = [item for item in items if item] if left == "" else items
    if len(items) > _ITEMS or not all(items) or (len(items) == 1 and left != "⦃"):
        return None
    return left, items, right


def _closing(tokens: Sequence[Token], at: int) -> int:
    """Index of the bracket that closes the one at `at`, of any kind as intervals need; -1 if none."""
    depth = 0
    for i in range(at, len(tokens)):
        depth += (tokens[i].text in _OPEN) - (tokens[i].text in _CLOSE)
        if depth == 0:
            return i
    return -1


def _same_value(a: list[Token], b: list[Token]) -> bool | None:
    letters = sorted({each for token in (*a, *b) if token.kind == "word" for each in token.text})
    if len(letters) > 8:
        return None
    known = 0
    for point in range(_POINTS if letters else 1):
        values = {each: _fraction(i, point) for i, each in enumerate(letters)}
        x, y = _value(a, values), _value(b, values)
        if x is None or y is None:
            continue  # perhaps a root of a negative number; an unreadable expression is so at every point
        if not equal(x, y):
            imaginary = "i" in letters or "e" in letters  # these may be constants
            return None if imaginary else False
        known += 1
    return True if known >= min(2, _POINTS if letters else 1) else None


def _value(tokens: list[Token], letters: dict[str, Fraction]) -> Value | None:
    try:
        return evaluate(tokens, letters)
    except Unreadable:
        return None


def _fraction(letter: int, point: int) -> Fraction:
    """The value of a letter at a point, chosen so that each letter takes both signs."""
    sign = -1 if (point + (letter >> 1 if point > 1 else letter)) % 2 and point else 1
    return sign * Fraction(1009 + 97 * letter + 31 * point, 613 + 59 * point + 17 * letter)


def _opaque(tokens: list[Token]) -> bool:
    """True when a text without a comma may still be several values, as with ± and unions."""
    return any(
        token.text in "±∪∈<>≤≥≠=|" or (token.kind == "command" and token.text not in ("\\frac", "\\sqrt"))
        for token in tokens
    )


def _without_unit(tokens: list[Token]) -> tuple[list[Token], str]:
    """The tokens without the unit words after a number, and that unit ("" if there is none)."""
    for i, token in enumerate(tokens):
        word = token.text.strip("« »")
        says = token.kind == "text" or (token.kind == "word" and (unit_of(word) if len(word) < 3 else token.spaced))
        if i and says and (token.spaced or len(word) > 1) and word not in ("and", "or"):
            rest = "".join(each.text for each in tokens[i + 1 :])
            number = all(each.kind != "word" for each in tokens[:i])
            if number and _UNIT_REST.fullmatch(rest) and word not in SCALES and "percent" not in word:
                return tokens[:i], (unit_of(word) or word) + rest
    return tokens, ""
