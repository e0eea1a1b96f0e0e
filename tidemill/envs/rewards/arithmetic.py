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


def times(value: Value, factor: Fraction) -> Value:
    return _apply(value, factor, "*")


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
        while (sign := self._sign()) in ("+", "-"):
            self.at += 1
            other = self._term()
            value = _apply(value, other if sign == "+" else negated(other), "+")
        self._depth -= 1
        return value

    def _term(self) -> Value:
        value = self._factor(first=True)
        while True:
            sign = self._sign()
            if sign in ("*", "/") or (sign and self._times_ten()):
                self.at += 1
                value = _apply(value, self._factor(first=False), sign if sign == "/" else "*")
            elif self._begins_factor():
                value = _apply(value, self._factor(first=False), "*")
            else:
                return value

    def _factor(self, first: bool) -> Value:
        signs = 1
        while (sign := self._sign()) in ("+", "-"):
            self.at, signs = self.at + 1, signs * (-1 if sign == "-" else 1)
        whole = self._next() if self._kind() == "number" else None
        value = self._base()
        if whole is not None and first and whole.text.isdigit() and (part := self._proper_fraction()) is not None:
            value = _apply(value, part, "+")
        if self._sign() == "^":
            self.at += 1
            value = _power(value, self._exponent())
            if self._sign() == "^":
                raise Unreadable("a power of a power without braces")
        while (sign := self._sign()) in ("%", "°"):
            self.at, value = self.at + 1, _apply(value, Fraction(100), "/") if sign == "%" else value
        return negated(value) if signs < 0 else value

    def _base(self) -> Value:
        token = self._next()
        if token is None:
            raise Unreadable("it ends too early")
        self.at += 1
        if token.kind == "number":
            return number_of(token.text)
        if token.text == "\\frac":
            top = self._argument()
            return _apply(top, self._argument(), "/")
        if token.text == "\\sqrt":
            return self._root()
        if token.text == "π":
            return _PI
        if token.kind == "word":
            return self._letter(token)
        if token.text == "|":
            return abs_of(self._closed("|"))
        if token.text in ("(", "{", "["):
            return self._closed({"(": ")", "{": "}", "[": "]"}[token.text])
        raise Unreadable(f"{token.text!r} is not expected")

    def _letter(self, token: Token) -> Value:
        if token.text[0] not in self.letters:
            raise Unreadable(f"{token.text!r} is no number")
        if len(token.text) > 1:  # a product of letters
            rest = replace(token, text=token.text[1:], start=token.start + 1, spaced=False)
            self.tokens[self.at - 1 : self.at] = [replace(token, text=token.text[0]), rest]
        return self.letters[token.text[0]]

    def _closed(self, by: str) -> Value:
        value = self.expression()
        if self._sign() != by:
            raise Unreadable(f"{by!r} is missing")
        self.at += 1
        return value

    def _argument(self) -> Value:
        """The value in braces, or of the single digit or letter that LaTeX takes without braces."""
        token = self._next()
        if token is not None and token.text == "{":
            self.at += 1
            return self._closed("}")
        if token is not None and token.kind in ("number", "word") and token.text.isalnum():
            if len(token.text) > 1:
                rest = replace(token, text=token.text[1:], start=token.start + 1, spaced=False)
                self.tokens[self.at : self.at + 1] = [replace(token, text=token.text[0]), rest]
            return self._base()
        if token is not None and token.text in ("π", "\\sqrt"):
            return self._base()
        raise Unreadable("an argument is missing")

    def _root(self) -> Value:
        index: Value = Fraction(2)
        if self._sign() == "[":
            self.at += 1
            index = self._closed("]")
        token = self._next()
        plainly = token is not None and token.kind == "number"  # √16
        radicand = self._base() if plainly else self._closed_or_argument()
        return _power(radicand, _apply(Fraction(1), index, "/"))

    def _closed_or_argument(self) -> Value:
        if self._sign() == "(":
            self.at += 1
            return self._closed(")")
        return self._argument()

    def _exponent(self) -> Value:
        sign = self._sign()
        if sign in ("-", "+"):
            self.at += 1
            value = self._exponent()
            return negated(value) if sign == "-" else value
        token = self._next()
        if token is not None and token.kind == "number":  # 2^10 is read as people mean it
            return self._base()
        return self._closed_or_argument()

    def _proper_fraction(self) -> Fraction | None:
        """The proper fraction that follows a whole number (a mixed number); None if there is none."""
        token, at = self._next(), self.at
        if token is None:
            return None
        if token.text == "\\frac":
            plain = self._only_numbers(at)
            value = self._base()
            if not plain:
                self.at = at
                return None
            if not isinstance(value, Fraction) or not 0 < value < 1:
                raise Unreadable("a whole number before an improper fraction")
            return value
        texts = [each.text for each in self.tokens[at : at + 3]]
        if (
            token.kind == "number"
            and token.spaced
            and len(texts) == 3
            and texts[1] == "/"
            and (texts[0] + texts[2]).isdigit()
        ):
            self.at += 3
            value = _apply(Fraction(int(texts[0])), Fraction(int(texts[2])), "/")
            if isinstance(value, Fraction) and 0 < value < 1 and len(texts[0] + texts[2]) < DIGITS:
                return value
            raise Unreadable("a number before an improper fraction")
        return None

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

    def _times_ten(self) -> bool:
        """True at an x between two numbers, as in "1.5 x 10^3"."""
        token, after = self._next(), self.tokens[self.at + 1 : self.at + 2]
        before = self.tokens[self.at - 1] if self.at else None
        numbers = before is not None and before.kind == "number" and bool(after) and after[0].kind == "number"
        return token is not None and token.text in ("x", "X") and numbers

    def _begins_factor(self) -> bool:
        token = self._next()
        return token is not None and (
            token.text in ("\\frac", "\\sqrt", "π", "(", "{") or (token.kind == "word" and bool(self.letters))
        )

    def _next(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def _kind(self) -> str:
        token = self._next()
        return token.kind if token is not None else ""

    def _sign(self) -> str:
        """The text of the next token; empty at the end."""
        token = self._next()
        return token.text if token is not None else ""


def _apply(a: Value, b: Value, sign: str) -> Value:
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


def abs_of(value: Value) -> Value:
    return value.copy_abs() if isinstance(value, Decimal) else abs(value)


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
