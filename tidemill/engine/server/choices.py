"""One choice of a reply: tokens from the engine become pieces of text with logprobs.

The logprobs are the unmodified model's, whatever the temperature; alternatives are of the same distribution. A stop id that
was sampled is among the tokens, without text. Tokens that begin behind the place where a stop string cut are left out,
unless the request wants the ids of all that was sampled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

import numpy as np

from tidemill.api_formats.detokenizer import Detokenizer, Marks, StopStrings
from tidemill.api_formats.replies import TextPiece, TokenLogprob
from tidemill.api_formats.vocabulary import Vocabulary
from tidemill.core.errors import ApiError
from tidemill.core.token_extras import MODEL_LOGPROBS
from tidemill.core.types import Completion, Constraint, Finish, GenerateRequest, SamplingParams, Scored
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.engine.native.request_state import Token
from tidemill.engine.server.prometheus_metrics import Clock


@dataclass(frozen=True, slots=True)
class Asked:
    """The prompt of one choice, and its sampling parameters."""

    tokens: np.ndarray  # [P] int32
    params: SamplingParams
    stops: tuple[str, ...] = ()
    begun: bool = False  # the reply's text goes on behind the prompt's
    shown: bool = False  # special tokens are part of the text
    every: bool = False  # tokens behind a cut are listed too
    extras: tuple[str, ...] = ()  # token extras that the reply needs
    constraint: Constraint | None = None  # what the reply must be

    @property
    def whole(self) -> GenerateRequest:
        """The request for a completion that comes as one."""
        return GenerateRequest(self.tokens, self.params, constraint=self.constraint, extras=self.extras)


class Assembler:
    """Turns tokens into pieces; a token leaves together with the text that begins with it."""

    def __init__(self, vocabulary: Vocabulary, asked: Asked, ends: tuple[int, ...]) -> None:
        """Assemble one choice.

        ends: the ids that end a completion, which have no text even where the tokenizer would show them.
        """
        self._ends, self._every, self._least = ends, asked.every, asked.params.min_tokens
        self._detokenizer = Detokenizer(vocabulary, begun=asked.begun, shown=asked.shown)
        self._marks = Marks(asked.stops, vocabulary)
        self._stops = StopStrings(self._marks.stops)
        self._waiting: deque[TokenLogprob] = deque()
        self._decoded = 0  # characters that the detokenizer gave out
        self._sent = 0  # and those of them that left
        self._sampled = 0

    @property
    def stopped(self) -> bool:
        return self._stops.found

    def push(self, token: Token) -> TextPiece:
        number, _, logprob, top = token
        self._sampled += 1
        first, shown = self._detokenizer.first, self._detokenizer.shown
        data, text = (b"", "") if number in self._ends else self._detokenizer.push(number)
        self._waiting.append(TokenLogprob(number, logprob, top, self._decoded, data, first, shown))
        return self._piece(text, "" if data else self._marks.of(number))

    def finish(self, finish: Finish) -> TextPiece:
        """The last piece, with the engine's reason; a stop string takes precedence."""
        piece = TextPiece("")
        if not self.stopped:
            piece = self._piece(self._detokenizer.flush())
        if not self.stopped:
            piece.text += self._stops.flush()
        if self.stopped:
            finish, piece.stop = Finish.STOP, self._marks.written.get(self._stops.stop, self._stops.stop)
        if not self.stopped or self._every:
            end = self._sent + len(piece.text)
            self._list(piece, [replace(token, offset=min(token.offset, end)) for token in self._waiting])
        piece.finish = "stop" if finish is Finish.STOP else "length"
        piece.sampled = self._sampled
        return piece

    def _piece(self, text: str, mark: str = "") -> TextPiece:
        self._decoded += len(text)
        sends = self._stops.push if self._sampled > self._least else self._stops.skip
        piece = TextPiece(sends(text + mark))
        self._sent += len(piece.text)
        begun = list[TokenLogprob]()
        while self._waiting and self._waiting[0].offset < self._sent:
            begun.append(self._waiting.popleft())
        self._list(piece, begun)
        return piece

    @staticmethod
    def _list(piece: TextPiece, tokens: list[TokenLogprob]) -> None:
        piece.tokens += tokens
        piece.ids += [token.token for token in tokens]


async def sample(
    engine: NativeEngine, vocabulary: Vocabulary, asked: Asked, clock: Clock, *, live: bool
) -> AsyncGenerator[TextPiece, None]:
    """The pieces of one choice; the last one has its `finish`. Close it (`aclosing`) to abort.

    live: a piece as soon as there is text; otherwise everything at the end, which is cheaper.
    """
    ends = asked.params.stop_ids if asked.params.ignore_eos else (*asked.params.stop_ids, *engine.eos_ids)
    assembler = Assembler(vocabulary, asked, ends)
    if not live and not asked.stops:
        try:
            completion = await engine.generate(asked.whole)
        except ValueError as error:  # what can be checked before was checked: its grammar could not be followed further
            raise ApiError(str(error)) from None
        clock.first(completion.first_token_s)
        for token in _tokens(completion):
            yield assembler.push(token)
    else:
        if asked.constraint is not None:
            await engine.grammars.compiled(asked.constraint)
        stream = engine.stream(replace(asked.whole, extras=()))
        try:
            async for token in stream:  # bounded: by the tokens asked for
                clock.first()
                piece = assembler.push(token)
                if piece.text:
                    yield piece
                if assembler.stopped:
                    break
        finally:
            await stream.aclose()
        completion = stream.completion
    last = assembler.finish(Finish.STOP if completion is None else completion.finish)
    clock.finished(last.sampled, last.finish or "")
    yield last


def of_prompt(tokens: np.ndarray, vocabulary: Vocabulary, text: str | None, scored: Scored | None) -> TextPiece:
    """A prompt as the first piece of its echo, with its tokens if `scored` has their logprobs.

    text: the prompt, if it was given as text. Spelled special tokens then belong to it.
    """
    shown = text is not None and text == _decoded(tokens, vocabulary, shown=True)
    piece = TextPiece(_decoded(tokens, vocabulary, shown=shown) if text is None else text)
    if scored is None:
        return piece
    detokenizer, offset = Detokenizer(vocabulary, shown=shown), 0
    for t, token in enumerate(tokens.tolist()):
        top: list[tuple[int, float]] = []
        if t and scored.top_ids is not None and scored.top_logprobs is not None:
            top = list(zip(scored.top_ids[t].tolist(), scored.top_logprobs[t].tolist(), strict=True))
        logprob, first = float(scored.logprobs[t]) if t else None, detokenizer.first
        data, settled = detokenizer.push(token)
        piece.tokens.append(TokenLogprob(token, logprob, top, min(offset, len(piece.text)), data, first, shown))
        offset += len(settled)
    return piece


def goes_on(tokens: np.ndarray, vocabulary: Vocabulary) -> bool:
    """True if a text after these tokens would continue a text in them."""
    return not vocabulary.special.keys() >= set(tokens.tolist())


def _decoded(tokens: np.ndarray, vocabulary: Vocabulary, *, shown: bool) -> str:
    detokenizer = Detokenizer(vocabulary, shown=shown)
    return "".join([*(detokenizer.push(token)[1] for token in tokens.tolist()), detokenizer.flush()])


def _tokens(completion: Completion) -> list[Token]:
    n = len(completion.tokens)
    tops: list[list[tuple[int, float]]] = [[]] * n
    if completion.top_ids is not None and completion.top_logprobs is not None:
        rows = zip(completion.top_ids.tolist(), completion.top_logprobs.tolist(), strict=True)
        tops = [list(zip(ids, logprobs, strict=True)) for ids, logprobs in rows]
    known = completion.extras.get(MODEL_LOGPROBS.name)
    model: list[float | None] = [None] * n if known is None else known.tolist()
    columns = completion.tokens.tolist(), completion.logprobs.tolist(), model, tops
    return list(zip(*columns, strict=True))
