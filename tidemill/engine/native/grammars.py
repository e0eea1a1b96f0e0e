"""Grammars: constraints compiled by llguidance, and the ids that may follow in a reply that is held to one.

    Constraint -> Grammars.compiled, in a thread -> Grammar -> begin -> HeldReply -> allowed, at each step

A grammar is compiled once and cached. Its size, its depth and the work on it are limited, so that a schema from a client
costs seconds at most. Compiling is beside the steps, so other sequences go on. A reply's state follows from its tokens
alone, so it does not matter how they were computed.

Any tokens that spell a valid text are allowed, so a reply is not bound to one tokenization of it, and no tokenizer is asked.
The vocabulary has one id more here than in the model. It stands for the end of the reply: where the grammar allows it, the
reply's stop ids are allowed, and nowhere else.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeGuard

import numpy as np

from tidemill.core.constraints import Constraint
from tidemill.core.errors import CodecError, ConfigError
from tidemill.core.executors import background
from tidemill.core.serialization import parse_json

KEPT = 64  # compiled grammars
COMPILE_S = 60.0  # for one and those before it, and once to read the vocabulary; its work is limited besides
PARTS = 4000  # objects and lists of a schema: its compiler takes 4 s for so many, and four times as long for twice as many
DEPTH = 4000  # levels that the compiler may recurse: it takes about 10 KB for each, and overflows end the process
STACK = 256 << 20  # bytes of its thread's stack, which are taken as they are used
LONGEST = 255  # bytes of a token; llguidance refuses vocabularies with far longer ones, so these are never allowed
BETWEEN = r"( {1,4}|\r?\n( {0,32}|\t{0,16}))"  # white space between two parts of JSON: a weak policy would go on for ever
_OPTIONS = {
    "whitespace_flexible": True,
    "whitespace_pattern": BETWEEN,
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}
_HEAD = '%llguidance {"no_forcing": true}\n'  # else only the canonical tokens of a forced text would be allowed
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")  # keywords that hold schemas by name
_BOUNDS = {"exclusiveMinimum": ("minimum", 1, max), "exclusiveMaximum": ("maximum", -1, min)}
_ASCII = "dw"  # classes of characters that are ASCII's in patterns, as JSON Schema has them
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")  # in a text that no user wrote


class Grammars:
    """The compiled constraints of an engine."""

    def __init__(self, engine: str, spelling: Callable[[], Sequence[bytes]] | None) -> None:
        """engine: its name. spelling: the bytes of each id, none for ids without text; None: no reply can be held here."""
        self._engine, self._spelling = engine, spelling
        self._tokenizer: Any = None  # llguidance's, of `_vocab` ids and the end
        self._vocab = 0
        self._done: OrderedDict[str, Grammar] = OrderedDict()  # by digest, those used last at the end
        self._under_way: dict[str, asyncio.Future[Grammar]] = {}
        self._pool: ThreadPoolExecutor | None = None

    @property
    def available(self) -> bool:
        return self._spelling is not None and importlib.util.find_spec("llguidance") is not None

    async def compiled(self, constraint: Constraint | None) -> None:
        """Compile a constraint, unless it is known. Raises ValueError for one that replies cannot be held to."""
        if constraint is None or self._known(constraint) is not None:
            return
        if self._spelling is None:
            raise ValueError(f"engine {self._engine} has no vocabulary to hold a reply to a grammar: leave out `constraint`")
        if not self.available:
            raise ConfigError("replies are held to a grammar by llguidance: pip install 'tidemill[structured]'")
        key = constraint.digest
        if (future := self._under_way.get(key)) is None:
            self._pool = self._pool or background("grammars", STACK)
            future = asyncio.get_running_loop().run_in_executor(self._pool, self._built, constraint)
            self._under_way[key] = future
            future.add_done_callback(lambda _: self._under_way.pop(key))
        try:
            self._done[key] = await asyncio.wait_for(asyncio.shield(future), COMPILE_S)
        except TimeoutError:
            said = f"the {constraint.name} was not compiled within {COMPILE_S:.0f} s: give a smaller one, or try again"
            raise ValueError(said) from None
        while len(self._done) > KEPT:
            self._done.popitem(last=False)

    def close(self) -> None:
        """Give up what waits to be compiled."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def begin(self, constraint: Constraint | None, stops: Sequence[int]) -> HeldReply | None:
        """A reply that is held to a compiled constraint; None for None. stops: the ids that end it."""
        if constraint is None:
            return None
        if (known := self._known(constraint)) is None:
            raise ValueError(f"the {constraint.name} is not compiled: await `grammars.compiled` before the reply is begun")
        return known.begin(stops)

    def _known(self, constraint: Constraint) -> Grammar | None:
        if (known := self._done.get(constraint.digest)) is not None:
            self._done.move_to_end(constraint.digest)
        return known

    def _built(self, constraint: Constraint) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        with _contained(constraint):
            if self._tokenizer is None:
                assert self._spelling is not None
                self._tokenizer, self._vocab = _tokenizer_of(self._spelling())
            matcher = LLMatcher(
                self._tokenizer, _source(constraint), log_level=0, limits=LLParserLimits(verbose_errors=False)
            )
            _expect_sound(matcher, constraint)
        grammar = Grammar(constraint, matcher, self._vocab)
        grammar.begin(()).allowed(
            np.zeros(0, np.int32), whole=True
        )  # so that one that nothing can follow is refused at once
        return grammar


class Grammar:
    """A compiled constraint, which any number of replies may be held to."""

    def __init__(self, constraint: Constraint, matcher: Any, vocab: int) -> None:
        self.constraint, self.vocab, self._matcher = constraint, vocab, matcher

    def begin(self, stops: Sequence[int]) -> HeldReply:
        """A reply without tokens yet. stops: the ids that end it."""
        return HeldReply(
            self, self._matcher.deep_copy(), np.array([each for each in stops if 0 <= each < self.vocab], np.int64)
        )


class HeldReply:
    """A reply that is held to a grammar."""

    def __init__(self, grammar: Grammar, matcher: Any, stops: np.ndarray) -> None:
        self._grammar, self._matcher, self._stops = grammar, matcher, stops
        self._followed = 0  # tokens of the reply that the matcher knows
        self.kept = np.zeros(grammar.vocab, bool)  # [V] what `allowed` returned last

    def allowed(self, reply: np.ndarray, whole: bool = False) -> np.ndarray:
        """The ids [V] bool that may follow the reply's tokens [n] so far, at least one. Stop ids may where it is complete.

        whole: its end counts as something that may follow. Raises ValueError if nothing may, or it takes too much work to
        tell.
        """
        constraint = self._grammar.constraint
        with _contained(constraint):
            new = reply[self._followed :].tolist()
            if new and self._matcher.try_consume_tokens(new) < len(new):
                _expect_sound(self._matcher, constraint)
                raise AssertionError(f"tokens {new} do not follow in a reply that is held to the {constraint.name}")
            self._followed = len(reply)
            raw = self._matcher.compute_bitmask()
            _expect_sound(self._matcher, constraint)
        bits = np.unpackbits(np.frombuffer(raw, np.uint8), count=self._grammar.vocab + 1, bitorder="little").view(bool)
        self.kept, ends = bits[:-1], bool(bits[-1])
        self.kept[self._stops] = ends
        if not self.kept.any() and not (whole and ends):
            raise ValueError(f"replies cannot be held to the {constraint.name}: none of its stop ids may be sampled here")
        return self.kept


@contextmanager
def _contained(constraint: Constraint) -> Iterator[None]:
    """Turn a panic of the library, which is no Exception, into a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the {constraint.name} cannot be followed: {_line(str(error))}") from None


def _expect_sound(matcher: Any, constraint: Constraint) -> None:
    """Raise ValueError when the matcher has given up, with its reason."""
    if matcher.is_error():
        why = _line(matcher.get_error())
        why = "no token of the model may come next" if why.startswith("NoExtension") else why
        raise ValueError(f"replies cannot be held to the {constraint.name}: {why}")


def _line(message: str) -> str:
    """The line of a message that says what is wrong, not too long."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason given"]
    said = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), _PLACE.sub("", lines[0]))
    return said if len(said) <= 200 else said[:197] + "..."


def _tokenizer_of(spelling: Sequence[bytes]) -> tuple[Any, int]:
    """llguidance's tokenizer of a vocabulary and the end of the reply, and the vocabulary's size."""
    from llguidance import LLTokenizer, TokenizerWrapper

    end = len(spelling)
    tokens = [each if len(each) <= LONGEST else b"" for each in spelling]
    wrapper = TokenizerWrapper(_Spelled([*tokens, b"\xff<end>"], end))
    return LLTokenizer(wrapper, eos_token=end, slices=LLTokenizer.json_slices()), end


class _Spelled:
    """A vocabulary as llguidance reads it. It never encodes a text, since no token is forced here."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], end: int) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = tokens, end, [end]

    def __call__(self, text: bytes) -> list[int]:
        return []


def _source(constraint: Constraint) -> str:
    """The constraint in llguidance's language. Raises ValueError for one that is not well formed, or too deep."""
    from llguidance import regex_to_lark

    if constraint.kind == "regex":
        bare = constraint.text.rstrip("\\")
        if (len(constraint.text) - len(bare)) % 2:
            raise ValueError(f"the {constraint.name} ends with a backslash that escapes nothing")
        return f"{_HEAD}start: /{regex_to_lark(constraint.text, _ASCII)}/\n"
    try:
        schema = parse_json(constraint.text) if constraint.kind == "json_schema" else {"type": "object"}
    except CodecError as error:
        raise ValueError(f"the {constraint.name} is {error}") from None
    if schema is False or not isinstance(schema, dict | bool):
        raise ValueError(f"the {constraint.name} allows nothing: expected an object with keywords")
    _expect_small({} if schema is True else schema, constraint.name)
    _close_bounds(schema)
    options = {"x-guidance": _OPTIONS}  # instead of those that the schema itself may ask for
    return f"{_HEAD}start: %json {json.dumps((schema if isinstance(schema, dict) else {}) | options)}\n"


def _close_bounds(schema: Any) -> None:
    """Replace exclusive bounds of numbers that are whole, in place: llguidance 1.9 lets some of them through (4 < 4 < 4.5).

    The closed bounds lie 1e-9 further in.
    """
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        if not isinstance(part, dict):
            continue
        for name, (closed, way, nearer) in _BOUNDS.items():
            bound = part.get(closed) if part.get(name) is True else part.get(name)  # True is of draft 4
            other = part.get(closed, bound)
            if not (_is_number(bound) and _is_number(other)) or part.get("type") == "integer":
                continue  # what is no number is refused by the library
            if abs(bound) < 1 << 53 and bound == int(bound):
                del part[name]
                inner = bound + way * 1e-9
                inner = math.nextafter(bound, way * math.inf) if inner == bound else inner
                part[closed] = nearer(other, inner) if closed in part else inner
        for key, value in part.items():
            if key in _BY_NAME and isinstance(value, dict):
                pending += value.values()
            elif key not in ("const", "enum"):
                pending.append(value)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _expect_small(schema: Any, name: str) -> None:
    """Raise ValueError for a schema that would take the compiler too long, or overflow its stack.

    Each reference may lead it through all levels again.
    """
    deepest, count, references = 0, 0, set[str]()
    pending = [(schema, 1)]
    while pending:
        value, level = pending.pop()
        deepest, count = max(deepest, level), count + 1
        if isinstance(value, dict) and isinstance(to := value.get("$ref"), str):
            references.add(to)
        inner = value.values() if isinstance(value, dict) else value
        pending += [(each, level + 1) for each in inner if isinstance(each, dict | list)]
    if count > PARTS:
        raise ValueError(f"the {name} has {count} objects and lists: expected at most {PARTS}")
    if (depth := deepest * (1 + len(references))) > DEPTH:
        raise ValueError(f"the {name} is too deep: its levels times its references are {depth}, expected at most {DEPTH}")
