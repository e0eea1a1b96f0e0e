"""Tokenizes prompts and chats beside the event loop, with bounds on time and memory.

    short text -> here (microseconds)     chat, long text -> a lane's process (`reader_process`) -> tokens, or an ApiError

There is a lane for short requests and one for long ones, so that short requests never wait for long ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tidemill.core.errors import ApiError, CallFailed, NoWorkers, WorkerLost
from tidemill.core.types import Array
from tidemill.engine.server.reader_process import (
    MOST_REPLY,
    ChatToRender,
    LoadTokenizer,
    PromptRefused,
    Reply,
    Request,
    Text,
    too_long,
)
from tidemill.models.conversations import prompt_tokens
from tidemill.models.token_bounds import reach_of
from tidemill.models.tokenizer import Tokenizer, class_name
from tidemill.runtime.workers.child import STARTUP_LIMIT_S
from tidemill.runtime.workers.worker import WorkerKind
from tidemill.runtime.workers.worker_pool import WorkerPool

HERE = 1000  # characters of a text, up to which it is tokenized in this process
SHORT = 1 << 15  # characters of a request, up to which the short lane takes it
LIMIT_S = 15.0  # seconds to render and tokenize one request
QUEUE_S = 30.0  # seconds to wait for earlier requests
_SLACK_S = 5.0  # seconds for the process itself to answer
_MODULE = "tidemill.engine.server.reader_process"


class Reader:
    """Tokenizes texts and chats, in this process or in the lanes' processes."""

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        """Read with `tokenizer`, which the lanes' processes load again from its folder.

        context: tokens that a request may hold.
        """
        self._tokenizer, self._context, self._reach = tokenizer, context, reach_of(tokenizer)
        load = LoadTokenizer(tokenizer.name_or_path, class_name(tokenizer), context, LIMIT_S)
        self._short, self._long = _Lane(load), _Lane(load)

    def begin(self) -> None:
        """Start the process for the first chat without waiting for it."""
        if self._tokenizer.chat_template:
            self._short.begin()

    async def text(self, text: str, *, special: bool = True, bounded: bool = True) -> Array:
        """The tokens of a text: [P] int32. Raises ApiError.

        special: add the tokenizer's special tokens. bounded: refuse a text that the context cannot hold.
        """
        if len(text) <= HERE:
            return np.array(self._tokenizer.encode(text, add_special_tokens=special), np.int32)
        if bounded and self._reach is not None and self._reach.exceeds(text, self._context):
            message = too_long("the prompt", self._reach.least(text), self._context)
            raise ApiError(message, param="prompt", code="context_length_exceeded")
        return await self._ask(Text(text, special, bounded), len(text), "prompt")

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Array:
        """The tokens of a chat, ready for the reply: [P] int32. Raises ApiError.

        options: further names that the template may use. tools: that the chat offers.
        """
        values = [value for message in messages for value in message.values()]
        size = sum(len(value if isinstance(value, str) else str(value)) for value in (*values, *tools)) + len(messages)
        if size <= HERE and not self._tokenizer.chat_template and not options and not tools:
            return prompt_tokens(self._tokenizer, [dict(message) for message in messages])
        request = ChatToRender([dict(message) for message in messages], dict(options or {}), [dict(tool) for tool in tools])
        return await self._ask(request, size, "messages")

    async def close(self) -> None:
        await asyncio.gather(self._short.close(), self._long.close())

    async def _ask(self, request: Request, size: int, param: str) -> Array:
        lane = self._short if size <= SHORT else self._long
        reply = await lane.ask(request)
        if isinstance(reply, PromptRefused):
            raise ApiError(reply.why, param=param, code="context_length_exceeded" if reply.too_long else None)
        return reply.tokens


class _Lane:
    """One process that does one request after the other; started when it is first needed."""

    def __init__(self, load: LoadTokenizer) -> None:
        kind = WorkerKind(_MODULE, "the process that reads prompts", Reply | None, most=MOST_REPLY)
        self.pool, self._limit_s = WorkerPool(kind, 1, preload=load), load.limit_s + _SLACK_S
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()  # tasks that go on after the client has left

    def begin(self) -> None:
        self._spawn(self.pool.start())  # the first request reports why it could not

    async def ask(self, request: Request) -> Reply:
        try:
            async with asyncio.timeout(QUEUE_S):
                await self._turn.acquire()
        except TimeoutError:
            raise ApiError(f"the server is busy: no turn within {QUEUE_S:g} s", status=503) from None
        work = self._spawn(self._exchange(request))
        await asyncio.wait({work}, timeout=2 * (STARTUP_LIMIT_S + self._limit_s))
        return work.result()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_SLACK_S)
        await self.pool.close()

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieve the error
        return task

    async def _exchange(self, request: Request) -> Reply:
        """Do a request that has the turn, and give the turn back."""
        try:
            for is_last in (False, True):
                try:
                    return await self.pool.call(request, self.pool.kind.title, limit_s=self._limit_s)
                except WorkerLost as lost:
                    if lost.began or is_last or not lost.was_up:  # else it ended before the request was sent
                        raise ApiError(str(lost), status=503) from None
            raise AssertionError("the last one returns")
        except (NoWorkers, CallFailed) as error:
            raise ApiError(str(error), status=503) from None
        finally:
            self._turn.release()
