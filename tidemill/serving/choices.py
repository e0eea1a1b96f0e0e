"""One choice of a reply: the engine's tokens as pieces of text, each with the tokens it is made of.

The logprobs are the unmodified model's, whatever the temperature; alternatives are of the same distribution. A stop id that
was sampled is among the tokens, without text. Tokens that begin behind the place where a stop string cut are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import numpy as np

from tidemill.engine.core import NativeEngine
from tidemill.engine.requests import Token
from tidemill.models.tokenizer import Tokenizer
from tidemill.serving.text import Detokenizer, StopStrings
from tidemill.types import Completion, Finish, SamplingParams, Scored

POLICY = "policy"


@dataclass(frozen=True, slots=True)
class Asked:
    """What one choice is sampled from, and how."""

    tokens: np.ndarray  # [P] int32
    params: SamplingParams
    stops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float | None  # None: nothing predicts it
    top: list[tuple[int, float]]  # alternatives, likeliest first
    offset: int  # in characters of the choice's text, where the token begins


@dataclass(slots=True)
class Piece:
    """`finish` and `sampled`, the number of tokens it took, are given with the last piece of a choice."""

    text: str
    tokens: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    sampled: int = 0

    def shifted(self, by: int) -> Piece:
        """As a piece of a text in which `by` characters stand before the reply."""
        tokens = [replace(token, offset=token.offset + by) for token in self.tokens] if by else self.tokens
        return Piece(self.text, tokens, self.finish, self.sampled)


class Assembler:
    """Tokens in, pieces out; a token leaves together with the text that begins with it."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...], ends: tuple[int, ...]) -> None:
        """ends: the ids that end a completion, which have no text even where the tokenizer would show them."""
        self._ends = ends
        self._detokenizer, self._stops = Detokenizer(tokenizer), StopStrings(stops)
        self._waiting: deque[TokenLogprob] = deque()
        self._decoded = 0  # characters that the detokenizer gave out
        self._sent = 0  # and those of them that left
        self._sampled = 0

    @property
    def stopped(self) -> bool:
        return self._stops.found

    def push(self, token: Token) -> Piece:
        number, _, logprob, top = token
        self._sampled += 1
        self._waiting.append(TokenLogprob(number, logprob, top, self._decoded))
        return self._piece("" if number in self._ends else self._detokenizer.push(number))

    def finish(self, finish: Finish) -> Piece:
        """The last piece, for the reason the engine gave; a stop string, found now or before, takes precedence."""
        piece = Piece("")
        if not self.stopped:
            piece = self._piece(self._detokenizer.flush())
        if self.stopped:
            finish = Finish.STOP
        else:
            piece.text += self._stops.flush()
            piece.tokens += self._waiting
        piece.finish = "stop" if finish is Finish.STOP else "length"
        piece.sampled = self._sampled
        return piece

    def _piece(self, text: str) -> Piece:
        self._decoded += len(text)
        piece = Piece(self._stops.push(text) if text else "")
        self._sent += len(piece.text)
        while self._waiting and self._waiting[0].offset < self._sent:
            piece.tokens.append(self._waiting.popleft())
        return piece


async def sample(engine: NativeEngine, tokenizer: Tokenizer, asked: Asked, *, live: bool) -> AsyncGenerator[Piece, None]:
    """The pieces of one choice; the last one has its `finish`. Close it (`aclosing`) to abort.

    live: a piece as soon as there is text; otherwise everything at the end, which is cheaper.
    """
    assembler = Assembler(tokenizer, asked.stops, () if asked.params.ignore_eos else engine.eos_ids)
    if not live and not asked.stops:
        completion = await engine.generate(asked.tokens, asked.params, POLICY, "")
        for token in _tokens(completion):
            yield assembler.push(token)
    else:
        stream = engine.stream(asked.tokens, asked.params, POLICY, "")
        try:
            async for token in stream:  # bounded: by the tokens asked for
                piece = assembler.push(token)
                if piece.text:
                    yield piece
                if assembler.stopped:
                    break
        finally:
            await stream.aclose()
        completion = stream.completion
    yield assembler.finish(Finish.STOP if completion is None else completion.finish)


async def whole(engine: NativeEngine, tokenizer: Tokenizer, asked: Asked) -> Piece:
    """A choice as one piece."""
    result = Piece("")
    async with aclosing(sample(engine, tokenizer, asked, live=False)) as pieces:
        async for piece in pieces:
            result.text += piece.text
            result.tokens += piece.tokens
            result.finish, result.sampled = piece.finish, piece.sampled
    return result


def of_prompt(tokens: np.ndarray, tokenizer: Tokenizer, text: str, scored: Scored | None) -> Piece:
    """A prompt as the first piece of its echo: `text`, and its tokens where `scored` has their logprobs."""
    piece = Piece(text)
    if scored is None:
        return piece
    detokenizer, offset = Detokenizer(tokenizer), 0
    for t, token in enumerate(tokens.tolist()):
        top: list[tuple[int, float]] = []
        if t and scored.top_ids is not None and scored.top_logprobs is not None:
            top = list(zip(scored.top_ids[t].tolist(), scored.top_logprobs[t].tolist(), strict=True))
        piece.tokens.append(TokenLogprob(token, float(scored.logprobs[t]) if t else None, top, min(offset, len(text))))
        offset += len(detokenizer.push(token))
    return piece


def _tokens(completion: Completion) -> list[Token]:
    n = len(completion.tokens)
    tops: list[list[tuple[int, float]]] = [[]] * n
    if completion.top_ids is not None and completion.top_logprobs is not None:
        rows = zip(completion.top_ids.tolist(), completion.top_logprobs.tolist(), strict=True)
        tops = [list(zip(ids, logprobs, strict=True)) for ids, logprobs in rows]
    columns = completion.tokens.tolist(), completion.logprobs.tolist(), completion.model_logprobs.tolist(), tops
    return list(zip(*columns, strict=True))
