"""Answers requests: a body becomes choices for the engine, then a reply or its events.

Every check that can refuse a request is made before anything is sampled. The noise of a choice follows from the seed and its
place among the `n` choices of its prompt, so a prompt gives the same text alone and in a list.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tidemill.api_formats.anthropic_bodies import CountBody, MessagesBody
from tidemill.api_formats.anthropic_replies import MessagesShape
from tidemill.api_formats.body_decoding import beside
from tidemill.api_formats.parameters import parse
from tidemill.api_formats.replies import ChatShape, CompletionShape, StreamShape, TextPiece, Usage
from tidemill.api_formats.requests import Body, ChatBody, CompletionBody
from tidemill.api_formats.responses_bodies import ResponsesBody
from tidemill.api_formats.responses_replies import ResponsesShape
from tidemill.api_formats.vocabulary import Vocabulary
from tidemill.core.errors import ApiError
from tidemill.core.seeding import derive_seed
from tidemill.core.token_extras import MODEL_LOGPROBS
from tidemill.core.types import SamplingParams
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.engine.server.choices import Asked, goes_on, of_prompt, sample
from tidemill.engine.server.prometheus_metrics import Clock, Metrics
from tidemill.engine.server.prompt_reader import Reader
from tidemill.engine.server.prompts import Prompts
from tidemill.engine.server.reply_reading import ReplyReading, reading_of
from tidemill.engine.server.tokenize_routes import TokenRoutes
from tidemill.models.tokenizer import Tokenizer

MOST_TOP_K = 1 << 30  # more than any vocabulary, and a machine integer
REPLY_TOKENS = 4096  # reply tokens of a chat that gives no limit


@dataclass(slots=True)
class CheckedRequest:
    """A checked request, ready to be sampled.

    `echoes[i]` is the beginning of choice i; a choice of None consists of its echo alone.
    """

    shape: StreamShape
    asked: list[Asked | None]
    echoes: list[TextPiece | None]
    usage: Usage
    stream: bool
    include_usage: bool
    clock: Clock
    reading: ReplyReading | None = None  # a reply is read when it is whole


class Service:
    """The model behind the API: checks requests and answers them."""

    def __init__(
        self,
        engine: NativeEngine,
        tokenizer: Tokenizer,
        name: str,
        *,
        context: int,
        vocab: int,
        reply_tokens: int | None = None,
        model_logprobs: bool = True,
    ) -> None:
        """Serve `engine` under the model name `name`.

        context: tokens of a prompt and its reply together. vocab: ids below it have an embedding. reply_tokens: limit of a
        chat that gives none; None: see `limit_of`.
        model_logprobs: True if the engine knows the unmodified model's logprobs; else requests for them are refused.
        """
        self.engine, self.name, self.context = engine, name, context
        self.metrics = Metrics(name, engine.pages)
        self.reader = Reader(tokenizer, context)
        self.prompts = Prompts(tokenizer, self.reader, context=context, vocab=vocab)
        self._vocabulary, self._tokenizer, self._reply_tokens = Vocabulary(tokenizer), tokenizer, reply_tokens
        self.tokens = TokenRoutes(tokenizer, self.prompts, self.check_model)
        self._created, self._model_logprobs = int(time.time()), model_logprobs

    def model(self) -> dict[str, Any]:
        about = {"id": self.name, "object": "model", "created": self._created, "owned_by": "tidemill"}
        return about | {"max_model_len": self.context}

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            message = f"model {name[:100]!r} is not served here: this server has {self.name!r}"
            raise ApiError(message, status=404, param="model", code="model_not_found")

    async def _check(self, body: CompletionBody | ChatBody) -> bool:
        """Check the model's name, tokens, logprobs and schema in a body. Returns True if it asks for logprobs."""
        self.check_model(body.model)
        self.prompts.check_ids(body.stop_token_ids, "stop_token_ids", "stop_token_ids")
        self.prompts.check_ids([*body.logit_bias], "logit_bias", "logit_bias")
        if body.wants_logprobs and not self._model_logprobs:
            message = "the engine behind this server does not report the model's logprobs: leave logprobs out"
            raise ApiError(message, param="logprobs")
        if body.held is not None:
            field, constraint = body.held
            try:
                await self.engine.grammars.compiled(constraint)
            except ValueError as error:
                raise ApiError(f"{field}: {error}", param=field) from None
        return body.wants_logprobs

    async def completion(self, raw: bytes) -> CheckedRequest:
        body = await beside(raw, parse, CompletionBody, raw)
        clock = Clock(self.metrics)
        logprobs = await self._check(body)
        rows = list[np.ndarray]()
        for i, prompt in enumerate(body.prompt):
            place = f"prompt[{i}]" if len(body.prompt) > 1 else "prompt"
            tokens = await self.prompts.of_text(prompt, place, special=body.add_special_tokens)
            rows.append(self.prompts.check(tokens, body.max_tokens, place, "prompt"))
            await asyncio.sleep(0)  # let others run between two prompts
        asked: list[Asked | None] = []
        echoes: list[TextPiece | None] = []
        seed = _seed(body)
        for prompt, tokens in zip(body.prompt, rows, strict=True):
            echo = await self._echo(prompt, tokens, body) if body.echo else None
            begun = goes_on(tokens, self._vocabulary)
            for i in range(body.n):
                echoes.append(echo)
                one = asked_of(body, tokens, min(body.max_tokens, self.context - len(tokens)), seed, i, begun=begun)
                asked.append(one if body.max_tokens else None)
        ids = [row.tolist() for row in rows for _ in range(body.n)] if body.return_token_ids else None
        shape = CompletionShape(self.name, self._vocabulary, logprobs, ids, body.return_tokens_as_token_ids)
        return CheckedRequest(shape, asked, echoes, Usage(sum(map(len, rows))), body.stream, body.include_usage, clock)

    async def chat(self, raw: bytes) -> CheckedRequest:
        body = await beside(raw, parse, ChatBody, raw)

        def shape(tokens: np.ndarray) -> ChatShape:
            ids = [tokens.tolist()] if body.return_token_ids else None
            return ChatShape(self.name, self._vocabulary, body.wants_logprobs, ids, body.return_tokens_as_token_ids)

        return await self._chat(body, shape, include_usage=body.include_usage)

    async def responses(self, raw: bytes) -> CheckedRequest:
        body = await beside(raw, parse, ResponsesBody, raw)
        if body.previous_response_id:
            message = "previous_response_id: this server keeps no conversations: send the whole one as input"
            raise ApiError(message, param="previous_response_id")
        body = body.model_copy(update={"store": False})
        shape = ResponsesShape(self.name, secrets.token_hex(12), int(time.time()), body)
        return await self._chat(body.chat(), lambda _: shape, thoughts=True)

    async def messages(self, raw: bytes) -> CheckedRequest:
        body = await beside(raw, parse, MessagesBody, raw)
        return await self._chat(body.chat(), lambda _: MessagesShape(self.name, secrets.token_hex(12)), thoughts=True)

    async def count_tokens(self, raw: bytes) -> dict[str, Any]:
        """The length of a prompt of Anthropic's messages."""
        body = (await beside(raw, parse, CountBody, raw)).chat()
        self.check_model(body.model)
        return {"input_tokens": len(await self.prompts.of_chat(body))}

    async def _chat(
        self,
        body: ChatBody,
        shape: Callable[[np.ndarray], StreamShape],
        *,
        thoughts: bool = False,
        include_usage: bool = True,
    ) -> CheckedRequest:
        """A chat in any of the APIs. shape: the reply's format, from the prompt's tokens. thoughts: see `reading_of`."""
        clock = Clock(self.metrics)
        await self._check(body)
        tokens = await self.prompts.of_chat(body)
        tokens = self.prompts.check(tokens, 1, self.prompts.place_of(tokens, body), "messages")
        reading = reading_of(self._tokenizer, body, tokens, thoughts)
        limit = limit_of(body, self.context - len(tokens), self.context, self._reply_tokens)
        seed = _seed(body)
        asked: list[Asked | None] = [asked_of(body, tokens, limit, seed, i) for i in range(body.n)]
        if reading is not None:  # special tokens may begin a call
            asked = [each and replace(each, shown=True) for each in asked]
        usage, echoes = Usage(len(tokens)), [None] * body.n
        return CheckedRequest(shape(tokens), asked, list(echoes), usage, body.stream, include_usage, clock, reading)

    async def reply(self, prepared: CheckedRequest) -> dict[str, Any]:
        choices = await asyncio.gather(*(self._whole(prepared, i) for i in range(len(prepared.asked))))
        prepared.usage.completion_tokens = sum(choice.sampled for choice in choices)
        return prepared.shape.reply(choices, prepared.usage)

    async def events(self, prepared: CheckedRequest) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a streamed reply, choices interleaved. Closing it aborts unfinished choices."""
        shape, usage = prepared.shape, prepared.usage
        last = shape.between if prepared.include_usage else {}
        for index in range(len(prepared.asked)):
            for event in shape.opening(index, usage):
                yield event | last
        async with aclosing(self._merged(prepared)) as pieces:
            async for index, piece in pieces:
                usage.completion_tokens += piece.sampled
                for event in shape.chunks(index, piece):
                    yield event | last
        if prepared.include_usage:
            for event in shape.closing(usage):
                yield event

    async def _merged(self, prepared: CheckedRequest) -> AsyncGenerator[tuple[int, TextPiece], None]:
        """Pieces of all choices as they come.

        They wait here for a slow client. Stop strings are still searched at once, and end their choice.
        """
        arrived: asyncio.Queue[tuple[int, TextPiece] | asyncio.Task[None]] = asyncio.Queue(
            sum(map(most_pieces, prepared.asked))
        )

        async def pump(index: int) -> None:
            if prepared.reading is not None:
                arrived.put_nowait((index, await self._whole(prepared, index)))
                return
            async with aclosing(self._pieces(prepared, index, live=True)) as pieces:
                async for piece in pieces:
                    arrived.put_nowait((index, piece))

        tasks = [asyncio.create_task(pump(index)) for index in range(len(prepared.asked))]
        for task in tasks:
            task.add_done_callback(arrived.put_nowait)
        running = len(tasks)
        try:
            while running:
                item = await arrived.get()  # bounded: by the tokens asked for; an engine that fails fails its requests
                if isinstance(item, tuple):
                    yield item
                else:
                    running -= 1
                    item.result()  # raises what the choice ended with
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)  # bounded: they are cancelled

    async def close(self) -> None:
        await self.reader.close()
        await self.engine.close()

    async def _pieces(self, prepared: CheckedRequest, index: int, *, live: bool) -> AsyncGenerator[TextPiece, None]:
        asked, echo, shift = prepared.asked[index], prepared.echoes[index], 0
        if echo is not None:
            shift = len(echo.text)
            yield TextPiece(echo.text, echo.tokens, "length" if asked is None else None)
        if asked is not None:
            async with aclosing(sample(self.engine, self._vocabulary, asked, prepared.clock.copy(), live=live)) as pieces:
                async for piece in pieces:
                    yield piece.shifted(shift) if shift else piece

    async def _whole(self, prepared: CheckedRequest, index: int) -> TextPiece:
        """A choice as one piece."""
        result = TextPiece("")
        async with aclosing(self._pieces(prepared, index, live=False)) as pieces:
            async for piece in pieces:
                result.text += piece.text
                result.tokens += piece.tokens
                result.ids += piece.ids
                result.finish, result.sampled, result.stop = piece.finish, piece.sampled, piece.stop
        return result if prepared.reading is None else prepared.reading.read(result)

    async def _echo(self, prompt: str | list[int], tokens: np.ndarray, body: CompletionBody) -> TextPiece:
        scored = None
        if body.logprobs is not None:
            scored = await self.engine.score(tokens, "policy", 1.0, body.logprobs)
        return of_prompt(tokens, self._vocabulary, prompt if isinstance(prompt, str) else None, scored)


def most_pieces(asked: Asked | None) -> int:
    """The most items of one choice that wait: echo, a piece for each token, last piece, and end."""
    return 2 if asked is None else asked.params.max_tokens + 3


def _seed(body: Body) -> int:
    return secrets.randbits(63) if body.seed is None else body.seed


def limit_of(body: ChatBody, room: int, context: int, usual: int | None) -> int:
    """The most tokens of a chat's reply, within the `room` that its prompt leaves.

    A chat that gives no limit gets the model's `usual` one, or else 4096 and at most half the context: then a reply without
    an end stops, and the conversation can go on.
    """
    asked = body.limit
    if asked is None:
        asked = max(usual or min(REPLY_TOKENS, context // 2), body.min_tokens, 1)
    return min(asked, room)


def asked_of(
    body: CompletionBody | ChatBody, tokens: np.ndarray, limit: int, seed: int, index: int, *, begun: bool = False
) -> Asked:
    """Choice `index` of a prompt's choices."""
    params = SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=min(max(body.top_k, 0), MOST_TOP_K),
        min_p=body.min_p,
        max_tokens=max(limit, 1),
        stop_ids=tuple(dict.fromkeys(body.stop_token_ids)),
        ignore_eos=body.ignore_eos,
        seed=derive_seed(seed, "choice", index),
        top_logprobs=body.top_logprobs if isinstance(body, ChatBody) else body.logprobs or 0,
        min_tokens=body.min_tokens,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple(body.logit_bias.items()),
    )
    extras = (MODEL_LOGPROBS.name,) if body.wants_logprobs else ()
    held = None if body.held is None else body.held[1]
    return Asked(tokens, params, tuple(body.stop), begun, not body.skip_special_tokens, body.return_token_ids, extras, held)
