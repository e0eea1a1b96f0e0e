"""What a request is turned into, and how it is answered: bodies -> choices asked of the engine -> a reply or its events.

Every check that can refuse a request is made before anything is sampled. A seed decides the noise of each choice by its
place among the `n` of its prompt, so a prompt gives the same text alone and in a list.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np

from tidemill.engine.core import NativeEngine
from tidemill.models.tokenizer import Tokenizer
from tidemill.seeds import derive_seed
from tidemill.serving.bodies import MAX_CHOICES, Body, ChatBody, CompletionBody, messages_of, parse, prompts_of
from tidemill.serving.choices import POLICY, Asked, Piece, of_prompt, sample, whole
from tidemill.serving.errors import ApiError
from tidemill.serving.reading import Reader
from tidemill.serving.shapes import ChatShape, CompletionShape, Names, Usage
from tidemill.types import SamplingParams


@dataclass(slots=True)
class Prepared:
    """A checked request. `echoes[i]` is what choice i begins with; a choice of None is its echo alone."""

    shape: CompletionShape | ChatShape
    asked: list[Asked | None]
    echoes: list[Piece | None]
    usage: Usage
    stream: bool
    include_usage: bool


class Service:
    def __init__(self, engine: NativeEngine, tokenizer: Tokenizer, name: str, *, context: int, vocab: int) -> None:
        """name: of the model. context: tokens a reply may fill, its prompt included. vocab: ids below it are tokens."""
        self.engine, self.name, self.context = engine, name, context
        self.reader = Reader(tokenizer, context)
        self._tokenizer, self._vocab, self._names = tokenizer, vocab, Names(tokenizer)
        self._created = int(time.time())

    def model(self) -> dict[str, Any]:
        about = {"id": self.name, "object": "model", "created": self._created, "owned_by": "tidemill"}
        return about | {"max_model_len": self.context}

    def check_model(self, name: str) -> None:
        if name != self.name:
            message = f"model {name[:100]!r} is not served here: this server has {self.name!r}"
            raise ApiError(message, status=404, param="model", code="model_not_found")

    async def completion(self, raw: bytes) -> Prepared:
        body = parse(CompletionBody, raw)
        self.check_model(body.model)
        if body.max_tokens == 0 and not body.echo:
            raise ApiError("max_tokens = 0: expected at least 1, or echo to look at the prompt alone", param="max_tokens")
        prompts = prompts_of(body.prompt)
        if len(prompts) * body.n > MAX_CHOICES:
            raise ApiError(f"{len(prompts)} prompts times n = {body.n}: expected at most {MAX_CHOICES} choices", param="n")
        top = body.logprobs or 0
        seed = _seed(body)
        asked: list[Asked | None] = []
        echoes: list[Piece | None] = []
        rows = [self._checked(await self._encoded(p), body.max_tokens, "prompt") for p in prompts]
        for prompt, tokens in zip(prompts, rows, strict=True):
            echo = await self._echo(prompt, tokens, body) if body.echo else None
            for i in range(body.n):
                echoes.append(echo)
                asked.append(self._asked(body, tokens, body.max_tokens, top, seed, i) if body.max_tokens else None)
        shape = CompletionShape(self.name, body.logprobs is not None, self._names)
        return _prepared(shape, asked, echoes, sum(map(len, rows)), body)

    async def chat(self, raw: bytes) -> Prepared:
        body = parse(ChatBody, raw)
        self.check_model(body.model)
        if body.top_logprobs and not body.logprobs:
            raise ApiError("top_logprobs was given without logprobs: set logprobs to true", param="top_logprobs")
        limits = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise ApiError("max_tokens and max_completion_tokens differ: give one of them", param="max_tokens")
        tokens = self._checked(await self.reader.chat(messages_of(body.messages)), 1, "messages")
        limit = limits.pop() if limits else self.context
        seed = _seed(body)
        asked = [self._asked(body, tokens, limit, body.top_logprobs, seed, i) for i in range(body.n)]
        shape = ChatShape(self.name, body.logprobs, self._names)
        return _prepared(shape, list(asked), [None] * body.n, len(tokens), body)

    async def reply(self, prepared: Prepared) -> dict[str, Any]:
        choices = await asyncio.gather(*map(self._whole, prepared.asked, prepared.echoes))
        prepared.usage.completion_tokens = sum(choice.sampled for choice in choices)
        return prepared.shape.reply(choices, prepared.usage)

    async def events(self, prepared: Prepared) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a streamed reply, choices interleaved as their tokens come. Closing it aborts what still runs."""
        shape, usage = prepared.shape, prepared.usage
        last = {"usage": None} if prepared.include_usage else {}
        for index in range(len(prepared.asked)):
            for event in shape.opening(index):
                yield event | last
        async with aclosing(self._merged(prepared)) as pieces:
            async for index, piece in pieces:
                usage.completion_tokens += piece.sampled
                yield shape.chunk(index, piece) | last
        if prepared.include_usage:
            yield shape.closing(usage)

    async def _merged(self, prepared: Prepared) -> AsyncGenerator[tuple[int, Piece], None]:
        arrived: asyncio.Queue[tuple[int, Piece] | asyncio.Task[None]] = asyncio.Queue()

        async def pump(index: int) -> None:
            async with aclosing(self._pieces(prepared.asked[index], prepared.echoes[index])) as pieces:
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

    async def _pieces(self, asked: Asked | None, echo: Piece | None) -> AsyncGenerator[Piece, None]:
        shift = 0
        if echo is not None:
            shift = len(echo.text)
            yield Piece(echo.text, echo.tokens, "length" if asked is None else None)
        if asked is not None:
            async with aclosing(sample(self.engine, self._tokenizer, asked, live=True)) as pieces:
                async for piece in pieces:
                    yield piece.shifted(shift)

    async def _whole(self, asked: Asked | None, echo: Piece | None) -> Piece:
        if asked is None:
            assert echo is not None
            return Piece(echo.text, echo.tokens, "length")
        piece = await whole(self.engine, self._tokenizer, asked)
        if echo is None:
            return piece
        piece = piece.shifted(len(echo.text))
        return Piece(echo.text + piece.text, echo.tokens + piece.tokens, piece.finish, piece.sampled)

    async def _echo(self, prompt: str | list[int], tokens: np.ndarray, body: CompletionBody) -> Piece:
        text = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, skip_special_tokens=True)
        scored = None
        if body.logprobs is not None:
            scored = await self.engine.score(tokens, POLICY, 1.0, body.logprobs)
        return of_prompt(tokens, self._tokenizer, text, scored)

    async def close(self) -> None:
        await self.reader.close()
        await self.engine.close()

    async def _encoded(self, prompt: str | list[int]) -> np.ndarray:
        if isinstance(prompt, str):
            return await self.reader.text(prompt)
        if outside := [token for token in prompt if not 0 <= token < self._vocab]:
            message = f"token id {outside[0]!s:.40}: this model knows 0 to {self._vocab - 1}"
            raise ApiError(message, param="prompt")
        return np.array(prompt, np.int32)

    def _checked(self, tokens: np.ndarray, wanted: int, param: str) -> np.ndarray:
        if not len(tokens):
            raise ApiError(f"{param} has no tokens: give at least one character", param=param)
        if len(tokens) + min(wanted, 1) > self.context:
            message = (
                f"{param} is {len(tokens)} tokens, and the context holds {self.context}, reply included: shorten it, "
                "or serve the model with a longer context"
            )
            raise ApiError(message, param=param, code="context_length_exceeded")
        return tokens

    def _asked(self, body: Body, tokens: np.ndarray, limit: int, top: int, seed: int, index: int) -> Asked:
        params = SamplingParams(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=min(max(body.top_k, 0), self._vocab),
            min_p=body.min_p,
            max_tokens=min(limit, self.context - len(tokens)),
            ignore_eos=body.ignore_eos,
            seed=derive_seed(seed, "choice", index),
            top_logprobs=top,
        )
        return Asked(tokens, params, tuple(body.stop))


def _seed(body: Body) -> int:
    return secrets.randbits(63) if body.seed is None else body.seed


def _prepared(
    shape: CompletionShape | ChatShape, asked: list[Asked | None], echoes: list[Piece | None], prompt: int, body: Body
) -> Prepared:
    options = body.stream_options
    include = options is not None and options.include_usage
    return Prepared(shape, asked, echoes, Usage(prompt), body.stream, include)
