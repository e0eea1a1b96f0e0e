"""Exact evaluator of arithmetic in plain text: fractions stay exact, roots and π have 60 digits.

    expression := term (("+" | "-") term)*          term := factor (("*" | "/" | nothing) factor)*
    factor := "-"* base ("^" exponent)? "%"? "°"?   base := number | "\\frac" | "\\sqrt" | "π" | letter | "(" expression ")"

The text is that of `plain_math`. A whole number before a proper fraction is a mixed number. Any other text is `Unreadable`,
and never read in part. Sizes are checked before anything is computed: `10^{10^{10}}` is Unreadable at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Context, Decimal, DecimalException, InvalidOperation, Overflow
from fractions import Fraction
from math import isqrt

DIGITS = 400  # limit of a number's digits and of its exponent: a larger number is no answer
_BITS = 20_000  # limit of a power's size
_DEEPEST = 40
_CONTEXT = Context(prec=60, traps=[InvalidOperation, Overflow])
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798")
_CLOSE = Fraction(1, 10**40)
_NUMBER = (
    r"[0-9]{1,3}(?:\.[0-9]{3})+,[0-9]+(?![0-9.,])|[0-9]{1,3}(?:\.[0-9]{3}){2,}(?![0-9.,])"  # 1.234,5 and 1.234.567
    r"|(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}(?![0-9])"
    r"|[0-9]{1,3}(?:[\u00a0'_ ][0-9]{3})+(?![0-9/])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+(?![0-9A-Za-z]))?"
    r"|(?<![0-9])\.[0-9]+(?:[eE][-+]?[0-9]+)?"
)
_TOKEN = re.compile(rf"(?P<number>{_NUMBER})|(?P<command>\\[A-Za-z]+)|(?P<word>[^\W\d_π]+)|(?P<text>«[^«»]*»)|(?P<sign>\S)")
Value = Fraction | Decimal


class Unreadable(ValueError):
    """The text is not arithmetic, or its numbers are too large."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a text, with its place."""

    kind: str  # number, command, word, text, sign
    text: str
    start: int
    spaced: bool  # has space before it

    @property
    def end(self) -> int:
        return self.start + len(self.text)


END = Token("", "", 0, False)  # stands behind the last token
_BRACKETS = {"(": ")", "{": "}", "[": "]"}


def tokens_of(text: str) -> list[Token]:
    """Split a text into numbers, commands, words, quoted texts and signs."""
    found, end = [], 0
    for match in _TOKEN.finditer(text):
        found.append(Token(match.lastgroup or "", match[0], match.start(), match.start() > end))
        end = match.end()
    return found


def evaluate(tokens: Sequence[Token], letters: Mapping[str, Fraction] | None = None) -> Value:
    """The value of all tokens together. letters: values of variables. Raises Unreadable."""
    parser = _Parser(tokens, letters or {})
    try:
        value = parser.expression()
    except (DecimalException, ZeroDivisionError, OverflowError) as error:
        raise Unreadable(f"{type(error).__name__}") from None
    if parser.at < len(parser.tokens):
        raise Unreadable(f"{parser.tokens[parser.at].text!r} is not expected")
    return value


def equal(a: Value, b: Value) -> bool:
    """True for equal values: exact for fractions, within 1e-40 (relative) for decimals."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    a, b = Fraction(a), Fraction(b)
    return abs(a - b) <= _CLOSE * max(1, abs(a), abs(b))


def number_of(text: str) -> Fraction:
    """The value of one number token. Raises Unreadable when it is too large."""
    if "," in text and "." in text and text.rindex(",") > text.index("."):
        text = text.replace(".", "").replace(",", ".")  # 1.234,5
    elif text.count(".") > 1:
        text = text.replace(".", "")
    mantissa, _, exponent = re.sub(r"[,\u00a0'_ ]", "", text).lower().partition("e")
    if len(mantissa) > DIGITS or len(exponent) > 4 or abs(int(exponent or 0)) > DIGITS:
        raise Unreadable("a number beyond all sizes")
    return Fraction(f"{mantissa}e{exponent}" if exponent else mantissa)


class _Parser:
    def __init__(self, tokens: Sequence[Token], letters: Mapping[str, Fraction]) -> None:
        self.tokens, self.letters = list(tokens), letters
        self.at = self._depth = 0

    def expression(self) -> Value:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise Unreadable("nested too deep")
        value = self._term()
        while sign := self._taken("+", "-"):
            other = self._term()
            value = apply(value, other if sign == "+" else negated(other), "+")
        self._depth -= 1
        return value

    def _term(self) -> Value:
        value = self._factor(first=True)
        while True:
            sign = self._next.text
            if sign in ("*", "/") or (sign in ("x", "X") and self._between_numbers()):  # an x as in "1.5 x 10^3"
                self.at += 1
                value = apply(value, self._factor(first=False), "/" if sign == "/" else "*")
            elif self._next.text in ("\\frac", "\\sqrt", "π", "(", "{") or (self._next.kind == "word" and self.letters):
                value = apply(value, self._factor(first=False), "*")
            else:
                return value

    def _factor(self, first: bool) -> Value:
        negative = False
        while sign := self._taken("+", "-"):
            negative ^= sign == "-"
        whole = first and self._next.kind == "number" and self._next.text.isdigit()
        value = self._base()
        if whole and (part := self._proper_fraction()) is not None:
            value = apply(value, part, "+")
        if self._taken("^"):
            value = _power(value, self._exponent())
            if self._next.text == "^":
                raise Unreadable("a power of a power without braces")
        while sign := self._taken("%", "°"):
            value = apply(value, Fraction(100), "/") if sign == "%" else value
        return negated(value) if negative else value

    def _base(self) -> Value:
        token = self._next
        self.at += 1
        if token.kind == "number":
            return number_of(token.text)
        if token.text == "\\frac":
            top = self._argument()
            return apply(top, self._argument(), "/")
        if token.text == "\\sqrt":
            return self._root()
        if token.text == "π":
            return _PI
        if token.kind == "word":
            return self._letter(token)
        if token.text == "|":
            value = self._closed("|")
            return negated(value) if value < 0 else value
        if token.text in _BRACKETS:
            return self._closed(_BRACKETS[token.text])
        raise Unreadable(f"{token.text!r} is not expected" if token.text else "it ends too early")

    def _letter(self, token: Token) -> Value:
        if token.text[0] not in self.letters:
            raise Unreadable(f"{token.text!r} is no number")
        if len(token.text) > 1:  # a product of letters
            self.at -= 1
            self._split()
            self.at += 1
        return self.letters[token.text[0]]

    def _split(self) -> None:
        """Split the next token after its first character."""
        token = self._next
        rest = replace(token, text=token.text[1:], start=token.start + 1, spaced=False)
        self.tokens[self.at : self.at + 1] = [replace(token, text=token.text[0]), rest]

    def _closed(self, by: str) -> Value:
        value = self.expression()
        if not self._taken(by):
            raise Unreadable(f"{by!r} is missing")
        return value

    def _argument(self) -> Value:
        """The value in braces, or of the single digit or letter that LaTeX takes without braces."""
        if self._taken("{"):
            return self._closed("}")
        token = self._next
        if token.kind in ("number", "word") and token.text.isalnum():
            if len(token.text) > 1:
                self._split()
            return self._base()
        if token.text in ("π", "\\sqrt"):
            return self._base()
        raise Unreadable("an argument is missing")

    def _root(self) -> Value:
        index = self._closed("]") if self._taken("[") else Fraction(2)
        return _power(self._operand(), apply(Fraction(1), index, "/"))

    def _operand(self) -> Value:
        """The value under a root or in an exponent: a whole number, as people mean √16 and 2^10, or an argument."""
        if self._next.kind == "number":
            return self._base()
        return self._closed(")") if self._taken("(") else self._argument()

    def _exponent(self) -> Value:
        if sign := self._taken("-", "+"):
            value = self._exponent()
            return negated(value) if sign == "-" else value
        return self._operand()

    def _proper_fraction(self) -> Fraction | None:
        """The proper fraction that follows a whole number (a mixed number); None if there is none."""
        at, texts = self.at, [each.text for each in self.tokens[self.at : self.at + 3]]
        if self._next.text == "\\frac":
            if not self._only_numbers(at):
                return None
            value = self._base()
        elif self._next.spaced and texts[1:2] == ["/"] and "".join(texts[::2]).isdigit() and len(texts) == 3:
            self.at += 3
            if len(texts[0] + texts[2]) >= DIGITS:
                raise Unreadable("a number beyond all sizes")
            value = apply(Fraction(int(texts[0])), Fraction(int(texts[2])), "/")
        else:
            return None
        if isinstance(value, Fraction) and 0 < value < 1:
            return value
        raise Unreadable("a number before an improper fraction")

    def _only_numbers(self, at: int) -> bool:
        """True when the `\\frac` at `at` holds two whole numbers and nothing else."""
        depth = groups = 0
        for token in self.tokens[at + 1 :]:
            if token.text == "{":
                depth += 1
            elif token.text == "}":
                depth, groups = depth - 1, groups + 1
            elif token.text.isdigit():
                groups += 0 if depth else min(2, len(token.text))
            else:
                return False
            if depth == 0 and groups >= 2:
                return True
        return False

    def _between_numbers(self) -> bool:
        around = self.tokens[max(0, self.at - 1) : self.at + 2]
        return len(around) == 3 and around[0].kind == around[2].kind == "number"

    @property
    def _next(self) -> Token:
        return self.tokens[self.at] if self.at < len(self.tokens) else END

    def _taken(self, *texts: str) -> str:
        """The next token's text if it is one of `texts`, and go on behind it; else empty."""
        text = self._next.text
        if text not in texts:
            return ""
        self.at += 1
        return text


def apply(a: Value, b: Value, sign: str) -> Value:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        value = a + b if sign == "+" else a * b if sign == "*" else a / b
        if value.numerator.bit_length() + value.denominator.bit_length() > 2 * _BITS:
            raise Unreadable("a number beyond all sizes")
        return value
    x, y = _decimal(a), _decimal(b)
    if sign == "+":
        return _CONTEXT.add(x, y)
    return _CONTEXT.multiply(x, y) if sign == "*" else _CONTEXT.divide(x, y)


def negated(value: Value) -> Value:
    return value.copy_negate() if isinstance(value, Decimal) else -value  # `-` would round a Decimal


def _decimal(value: Value) -> Decimal:
    return _CONTEXT.divide(Decimal(value.numerator), Decimal(value.denominator)) if isinstance(value, Fraction) else value


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if abs(exponent) * bits > _BITS:
                raise Unreadable("a number beyond all sizes")
            return Fraction(base ** int(exponent))
        root = _exact_root(base, exponent.denominator)
        if root is not None and abs(exponent.numerator) < 100:
            return _power(root, Fraction(exponent.numerator))
    x, y = _decimal(base), _decimal(exponent)
    if x < 0 or (x == 0 and y <= 0):
        raise Unreadable("a power that is no real number")
    return _CONTEXT.power(x, y)


def _exact_root(value: Fraction, index: int) -> Fraction | None:
    if value < 0 and index % 2 and (positive := _exact_root(-value, index)) is not None:
        return -positive
    if value < 0:
        raise Unreadable("a root that is no real number")
    top, bottom = _whole_root(value.numerator, index), _whole_root(value.denominator, index)
    return None if top is None or bottom is None else Fraction(top, bottom)


def _whole_root(value: int, index: int) -> int | None:
    if index == 2:
        root = isqrt(value)
    elif index > 20 or value.bit_length() > 1000:
        return None
    else:
        root = round(float(value) ** (1 / index)) if value.bit_length() < 900 else 0
    return root if root**index == value else None
