"""Reads the number that a text gives as its answer, as a whole or not at all.

    text -> its last sentence with a number -> the part after its last "=", "is" or ":" -> a run of arithmetic

A run that is not arithmetic (a list, a range, an algebraic term), or that is ambiguous ("5-3", "($5)", "1.200"), has no
value, or a value and `others`: numbers that it may stand for too. There is no verdict when it would depend on those.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import factorial

from tidemill.envs.rewards.arithmetic import (
    DIGITS,
    END,
    Token,
    Unreadable,
    Value,
    apply,
    equal,
    evaluate,
    negated,
    number_of,
    tokens_of,
)
from tidemill.envs.rewards.boxes import last_boxes
from tidemill.envs.rewards.plain_math import plain
from tidemill.envs.rewards.units import MINOR, PARTS, SCALES, unit_of

_WINDOW = 2_000  # characters before the last digit that are read
_SIGNS = set("+-*/^(){}[]|,:%°±!_<>≤≥≠∈∪∞⦃⦄&π")
_LEADING, _TRAILING = set(",:*/%!&^°)]}⦄"), set(",:*/+-!&([⦃")
_PI = re.compile(r"(?<![A-Za-z])pi(?![A-Za-z])")
_HOLDS_NUMBER = re.compile(r"\d|[π½¼¾⅓⅔]|(?<![A-Za-z])pi(?![A-Za-z])")
_PAIRS = {"(": ")", "[": "]", "{": "}", "⦃": "⦄"}
_OPENED = {by: a for a, by in _PAIRS.items()}
_MARKERS = frozenset(
    ["is", "are", "was", "were", "equals", "equal", "be", "makes", "make", "gives", "give", "gets", "get", "answer", "total"]
)
_BINDING = frozenset(["and", "or", "to", "of", "out", "over", "by", "x", "times", "through", "minus", "plus", "vs"])
_FUNCTIONS = frozenset(
    ["log", "ln", "sin", "cos", "tan", "exp", "root", "lg", "arcsin", "arccos", "arctan", "squared", "cubed", "factorial"]
)
_FRACTIONS = {"half", "quarter", "third", "thirds", "quarters"}
_WORDS = (
    "zero two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million half quarter dozen"
)
_SPELLED = re.compile(rf"\b(?:{'|'.join(_WORDS.split())}|one(?=\W*$))\W*(?:\w+\W*){{0,2}}$", re.IGNORECASE)
MOST = 30  # limit of other numbers that are kept


@dataclass(frozen=True, slots=True)
class Reading:
    """The number that a text means, or the numbers that it may mean."""

    value: Value | None = None
    others: tuple[Value, ...] = ()  # other numbers that it may stand for
    percent: Value | None = None  # the number before a percent sign
    unit: str = ""
    empty: bool = False  # the text has no number at all

    @property
    def possible(self) -> tuple[Value, ...]:
        return self.others if self.value is None else (self.value, *self.others)


@dataclass(frozen=True, slots=True)
class _Run:
    tokens: list[Token]
    before: list[Token]  # tokens of its sentence before it
    after: list[Token]
    marker: int  # number of markers (=, :, "is", ...) before it
    glued: bool = field(default=False)  # a word runs into it, as in CO2
    alone: bool = field(default=False)  # the text is nothing but an answer


def reading_of(text: str, *, alone: bool = False) -> Reading:
    """Read the final number of a text. alone: the text is an answer, so a second number belongs to it."""
    boxes = last_boxes(text)
    if boxes is not None and any(_HOLDS_NUMBER.search(content) for content in boxes[0]):
        found = _read(", ".join(boxes[0]) if len(set(boxes[0])) > 1 else boxes[0][0], alone=True)
        after = _read(text[boxes[1] :][:_WINDOW])
        if after.empty or (after.value is not None and found.value is not None and equal(after.value, found.value)):
            return found
        return replace(found, value=None, others=(*found.possible, *after.possible)[:MOST])
    if alone and (at := text.rfind("####")) >= 0 and any(each.isdigit() for each in text[at:]):
        text = next(line for line in text[at + 4 :].split("\n") if any(each.isdigit() for each in line))
    return _read(text, alone=alone)


def compare(wanted: Reading, given: Reading, room: Fraction = Fraction(0)) -> float | None:
    """1.0 when `given` equals `wanted` within `room`, 0.0 when not, None if a text is ambiguous."""
    assert wanted.value is not None

    def near(a: Value, b: Value) -> bool:
        return equal(a, b) or abs(Fraction(a) - Fraction(b)) <= room

    bare = wanted.percent is None and given.percent is not None and near(wanted.value, given.percent)
    if bare or (given.value is not None and near(wanted.value, given.value)):
        return None if wanted.unit and given.unit and wanted.unit != given.unit else 1.0
    return None if any(near(a, b) for a in wanted.possible for b in given.possible) else 0.0


def spelled(text: str) -> bool:
    """True when a text ends in a number that is written in words."""
    return _SPELLED.search(text[-200:]) is not None


def _read(text: str, *, alone: bool = False) -> Reading:
    last = next((i for i in range(len(text) - 1, -1, -1) if text[i].isdigit() or text[i] in "π½¼¾⅓⅔"), -1)
    tail = max(0, len(text) - _WINDOW)
    last = max([last, *(tail + found.start() for found in _PI.finditer(text[tail:]))])
    if last < 0:
        return Reading(empty=True)
    begin = max(0, last - _WINDOW)
    tokens = tokens_of(shown := plain(text[begin : last + 200]))
    cut = tokens[:1] if begin else []
    for sentence in reversed(_sentences(tokens, shown)):
        if runs := [run for run in _runs(sentence) if not run.glued]:
            if cut and runs[-1].tokens[0] is cut[0]:
                return Reading(others=_numbers(runs[-1].tokens))
            return _chosen(runs, alone)
    glued = [run for sentence in _sentences(tokens, shown) for run in _runs(sentence)]
    return Reading(others=tuple(value for run in glued for value in _numbers(run.tokens))[-MOST:], empty=not glued)


def _chosen(runs: Sequence[_Run], alone: bool) -> Reading:
    either = len(runs) > 1 and "or" in {each.text.lower() for each in _between(runs)}
    marked = [run for run in runs if either or run.marker == runs[-1].marker]
    if len(marked) == 1:
        return _reading(replace(marked[0], alone=alone))
    found = [_reading(run) for run in marked]
    others = tuple(value for each in found for value in each.possible)[-MOST:]
    values = [each.value for each in found]
    if values[0] is not None and all(value is not None and equal(value, values[0]) for value in values):
        return found[-1]
    bound = all(unit_of(each.text) or each.text.lower() in _BINDING or not each.text.isalnum() for each in _between(runs))
    if alone or either or runs[-1].marker or bound:
        return Reading(others=others)
    return replace(found[-1], others=(*found[-1].others, *others))


def _between(runs: Sequence[_Run]) -> list[Token]:
    """The tokens between the last two runs."""
    return runs[-1].before[len(runs[-2].before) + len(runs[-2].tokens) :]


def _reading(run: _Run) -> Reading:
    tokens, after = list(run.tokens), run.after
    percent = tokens[-1].text == "%"
    tokens = tokens[:-1] if percent else tokens
    try:
        value: Value | None = evaluate(tokens)
    except Unreadable:
        return Reading(others=_numbers(tokens))
    others: list[Value] = []
    if after and after[0].text == "!" and isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= 20:
        others.append(Fraction(factorial(int(value))))
    if not _certain(run, tokens):
        others, value = [*others, value, negated(value), *_numbers(tokens)], None
    others += _other_meanings(tokens)
    if value is None:
        return Reading(others=tuple(others)[:MOST])
    if run.before and run.before[-1].text.lower() == "negative":
        value = negated(value)
    word = after[0].text.lower().strip("« »") if after else ""
    if percent or word in PARTS or (word == "per" and after[1:2] and after[1].text.lower() == "cent"):
        return Reading(apply(value, PARTS.get(word, Fraction(1, 100)), "*"), (*others, value), percent=value)
    scale = SCALES.get(after[0].text, SCALES.get(word)) if after else None
    if scale is not None and isinstance(value, Fraction):
        return Reading(value * scale, (*others, value))
    if isinstance(value, Fraction) and word in MINOR:
        others.append(value * MINOR[word])
    return Reading(value, tuple(others), unit=unit_of(word))


def _certain(run: _Run, tokens: Sequence[Token]) -> bool:
    """True when the value of the run is its only possible meaning."""
    texts, before, after = [token.text for token in tokens], run.before, [each.text.lower() for each in run.after[:4]]
    plainly = not any(token.kind == "command" or token.text in "π^" for token in tokens)
    pairs = zip(tokens, tokens[1:], tokens[2:], strict=False)
    if plainly and any(a.kind == c.kind == "number" and b.text == "-" for a, b, c in pairs):
        return False  # a subtraction, a range, a result of a match
    if texts.count("/") > 1 and plainly and "(" not in texts:
        return False
    if texts[0] in "+-" and before and before[-1].kind in ("word", "text") and (not tokens[0].spaced or tokens[1].spaced):
        return False  # "COVID-19", "total - 5"
    if texts[0] == "-" and not before and not run.alone and tokens[1].spaced and tokens[1].kind == "number":
        return False  # a list's dash
    if before and (before[-1].text == "—" or before[-1].text.lower().lstrip("\\") in _FUNCTIONS):
        return False
    if texts[0] == "(" and texts[-1] == ")" and len(texts) == 3:
        return False  # a loss, in accounts
    if texts[0] == "|":
        return False  # an absolute value, or a cell of a table
    if after[:1] in (["squared"], ["cubed"], ["factorial"], ["…"]) or _FRACTIONS & set(after):
        return False
    if after[:3] == [".", ".", "."] and "." in texts[-1]:
        return False
    return not (after[:1] == ["!"] and not any(each.kind == "word" for each in before))


def _other_meanings(tokens: Sequence[Token]) -> list[Value]:
    """Other meanings of a single number with a point or space that may separate thousands."""
    numbers = [token for token in tokens if token.kind == "number"]
    if len(numbers) != 1 or len(tokens) > 2:
        return []
    text, sign = numbers[0].text, -1 if tokens[0].text == "-" else 1
    if re.fullmatch(r"[1-9][0-9]{0,2}\.[0-9]{3}", text):
        return [Fraction(sign * int(text.replace(".", "")))]
    return [Fraction(int(part)) for part in text.split(" ")] if " " in text and "." not in text else []


def _numbers(tokens: Sequence[Token]) -> tuple[Value, ...]:
    """Every number of a run without a value, with and without its sign."""
    found: list[Value] = []
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.kind == "number" and len(token.text) < DIGITS and len(found) < MOST:
            try:
                value = number_of(token.text)
            except Unreadable:
                continue
            found += [value, -value] if before is not None and before.text in "-±(" else [value]
    texts = [token.text for token in tokens]
    if len(texts) == 3 and texts[1] == "," and (texts[0] + texts[2]).isdigit() and len(texts[0] + texts[2]) < DIGITS:
        found.append(Fraction(f"{texts[0]}.{texts[2]}"))  # a decimal comma
    return tuple(found)


def _sentences(tokens: Sequence[Token], text: str) -> list[list[Token]]:
    found: list[list[Token]] = [[]]
    for i, token in enumerate(tokens):
        if found[-1] and "\n" in text[found[-1][-1].end : token.start]:
            found.append([])
        found[-1].append(token)
        ends = i + 1 == len(tokens) or tokens[i + 1].spaced
        if token.text in (".", "?", "!", ";", "…") and ends:
            found.append([])
    return [sentence for sentence in found if sentence]


def _runs(sentence: Sequence[Token]) -> list[_Run]:
    """The runs of arithmetic that hold a number, each with the tokens around it."""
    found: list[_Run] = []
    marker = i = 0
    while i < len(sentence):
        end = i
        while end < len(sentence) and _belongs(sentence, end):
            end += 1
        if end == i:
            token = sentence[i]
            marker += token.text in ("=", ":", "#") or token.text.lower() in _MARKERS
            i = _after_word(sentence, i)
            continue
        first, last = _trimmed(sentence, i, end)
        if any(token.kind == "number" or token.text == "π" for token in sentence[first:last]):
            word = first > 0 and sentence[first - 1].kind == "word"
            glued = word and sentence[first].kind == "number" and not sentence[first].spaced
            found.append(_Run(list(sentence[first:last]), list(sentence[:first]), list(sentence[last:]), marker, glued))
        i = end
    return found


def _belongs(sentence: Sequence[Token], i: int) -> bool:
    """True when a token is part of arithmetic: a letter is, as a variable, beside a number or an operator."""
    earlier, before, token, after, later = (sentence[j] if 0 <= j < len(sentence) else END for j in range(i - 2, i + 3))
    if token.text == ":":
        return before.kind == after.kind == "number"
    if token.kind in ("number", "command"):
        return True
    if token.kind == "sign":  # "(C)" names a choice
        opens = token.text == "(" and after.kind == "word" and len(after.text) == 1 and later.text == ")"
        closes = token.text == ")" and before.kind == "word" and len(before.text) == 1 and earlier.text == "("
        return token.text in _SIGNS and not opens and not closes
    if token.kind != "word" or len(token.text) > 1 or (before.text == "(" and after.text == ")"):
        return False
    unit, counts = unit_of(token.text), before.kind == "number"
    if counts and not token.spaced:
        return not unit and token.text not in SCALES
    if after.text and after.text in "+-*/^_(" and not (counts and unit):
        return after.text in "^_" or after.spaced is (later.spaced if later is not END else True)
    if counts and token.text in "xyznabcijkpqrtuvw" and not unit:
        return token.text != "a"  # "5 a day"
    if before.text in ("{", "^") or after.text == "}":
        return True
    return before.text in ("+", "*", "/") and i > 1 and not unit


def _after_word(sentence: Sequence[Token], i: int) -> int:
    """The index after a word with its subscript or exponent, as in x_1 or cm^2."""
    token, i = sentence[i], i + 1
    if token.kind not in ("word", "text") or i >= len(sentence) or sentence[i].text not in "^_" or sentence[i].spaced:
        return i
    i += 1
    if i < len(sentence) and sentence[i].text == "{":
        while i < len(sentence) and sentence[i].text != "}":
            i += 1
        return i + 1
    while i < len(sentence) and sentence[i].text in "+-":
        i += 1
    return i + 1


def _trimmed(sentence: Sequence[Token], first: int, last: int) -> tuple[int, int]:
    """The range of a run without punctuation of the sentence, emphasis and unmatched brackets."""
    counts = Counter(token.text for token in sentence[first:last])
    while first < last:
        begin, end = sentence[first].text, sentence[last - 1].text
        if begin in _LEADING or (begin in _PAIRS and counts[begin] > counts[_PAIRS[begin]]):
            first, gone = first + 1, begin
        elif end in _TRAILING or (end in _OPENED and counts[end] > counts[_OPENED[end]]):
            last, gone = last - 1, end
        else:
            break
        counts[gone] -= 1
    return first, last
