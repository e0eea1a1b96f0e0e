"""The calls of one episode's agent: each is asked of the chat once, however often the agent's library sends it.

    body -> a call -> chat.complete(...) -> replies, kept for a while
    the same body again, as a retry  -> the same call, under way or answered: nothing is sampled anew

An agent may well ask the same thing twice, to choose among the answers. So a request counts as a retry only if it says so
(`x-stainless-retry-count`, `Idempotency-Key`), or if whoever sent it first has left without the answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tidemill.core.chat_interface import Chat
from tidemill.core.episode_counts import listener_here, recorder_here
from tidemill.core.errors import ApiError, ContextFull, EpisodeOver
from tidemill.core.outcomes import clip
from tidemill.core.reply import Reply
from tidemill.gateway.dialects import Messages, ModelCall
from tidemill.gateway.stored_responses import StoredResponses

AT_ONCE = 128  # replies that the chat is asked for at a time; further ones wait
TURN_S = 600.0  # seconds that a reply may wait for its turn: clients rarely wait longer
MOST_CALLS = 256  # calls at a time, those that wait included
LINGER_S = 10.0  # seconds that a call goes on after its client has left: libraries try again within 8
MOST_KEPT = 16 << 20  # bytes of answered calls that are kept for retries


class GatewayCall:
    """One call, and everyone who waits for its replies."""

    def __init__(self, size: int) -> None:
        self.id, self.created = secrets.token_hex(12), int(time.time())
        self.size, self.waiting = size, 0  # bytes that it keeps; clients that wait for it
        self.left = False  # by everyone before it was answered
        self.work: asyncio.Task[list[Reply]] | None = None
        self.timer: asyncio.TimerHandle | None = None

    @property
    def answered(self) -> bool:
        return self.work is not None and self.work.done() and not self.work.cancelled() and self.work.exception() is None


class EpisodeCalls:
    """The calls of one episode, until it is closed."""

    def __init__(self, chat: Chat, tokens: int | None = None) -> None:
        """tokens: that all replies together may have; None: any number."""
        self._chat, self._budget = chat, tokens
        self._calls: OrderedDict[tuple[str, str], list[GatewayCall]] = OrderedDict()  # by digest and idempotency key
        self._kept, self._open = 0, 0
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._stored = StoredResponses()
        self._record = recorder_here()  # requests come in tasks of the server, which are of no episode
        self._heard = listener_here()
        self.over = ""  # why there are no further replies
        self.refused = ""  # status and message of the latest refusal
        self.counts: dict[str, int] = dict.fromkeys(("calls", "retries", "abandoned", "refused", "faults", "tokens"), 0)
        self.failure: Exception | None = None  # of the chat itself, which is no fault of the agent
        self.failing: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done when there is one
        self.asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done at the first call

    def earlier(self, name: str) -> Messages:
        """The conversation that ended with the reply of this id. Raises ApiError."""
        return self._stored.find(name)

    def call_of(self, path: str, raw: bytes, asked: ModelCall, headers: Mapping[str, str]) -> GatewayCall:
        """The call that a request makes, or makes again. Raises ApiError when there can be no more."""
        key = hashlib.sha256(path.encode() + b"\0" + raw).hexdigest(), headers.get("idempotency-key", "")
        again = bool(key[1]) or headers.get("x-stainless-retry-count", "0").strip() not in ("", "0")
        if (known := self._known(key, again)) is not None:
            self._count("retries")
            return known
        self._expect_open()
        if self._open >= MOST_CALLS:
            raise ApiError(f"{self._open} calls are under way, at most {MOST_CALLS} of an episode at a time", status=429)
        call = GatewayCall(len(raw))
        if not self.asked.done():
            self.asked.set_result(None)
        self._count("calls")
        self._open += 1
        self._calls.setdefault(key, []).append(call)
        call.work = asyncio.create_task(self._replies(asked, call))
        call.work.add_done_callback(lambda _: self._ended(key, call))
        return call

    @contextmanager
    def waiting_for(self, call: GatewayCall) -> Iterator[asyncio.Task[list[Reply]]]:
        """The call's work, for one more client. It goes on for a while when all of them have left."""
        assert call.work is not None
        call.waiting, call.left = call.waiting + 1, False
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        try:
            yield call.work
        finally:
            call.waiting -= 1
            if not call.waiting and not call.work.done():
                call.left = True
                call.timer = asyncio.get_running_loop().call_later(LINGER_S, self._abandon, call)

    def close(self, why: str) -> None:
        """End the episode: calls under way are cancelled, and there are no further ones."""
        self.over = self.over or why
        for call in self._under_way():
            assert call.work is not None
            call.work.cancel()

    async def closed(self) -> None:
        """Wait until the calls that `close` cancelled have ended."""
        if work := [call.work for call in self._under_way() if call.work is not None]:
            await asyncio.wait(work, timeout=LINGER_S)

    def refusal(self, error: Exception) -> ApiError:
        """The answer to an agent whose call has no replies."""
        self._count("refused")
        told = _refusal(error)
        self.refused = f"{told.status} {told}"
        self._heard(clip(self.refused))
        return told

    def _known(self, key: tuple[str, str], again: bool) -> GatewayCall | None:
        """The call that a request repeats: one that everybody has left comes first."""
        calls = [call for call in self._calls.get(key, []) if call.answered or (call.work and not call.work.done())]
        if left := [call for call in calls if call.left]:
            return left[0]
        return calls[-1] if again and calls else None

    def _under_way(self) -> list[GatewayCall]:
        return [call for calls in self._calls.values() for call in calls if call.work and not call.work.done()]

    async def _replies(self, asked: ModelCall, call: GatewayCall) -> list[Reply]:
        work = [asyncio.ensure_future(self._reply(each, asked)) for each in asked.conversations for _ in range(asked.n)]
        try:
            replies = await asyncio.gather(*work)
        except (ValueError, EpisodeOver, ApiError):
            raise
        except Exception as error:  # from the engine, or from the way to it
            if self.failure is None:
                self.failure = error
                self.failing.set_result(None)
            raise
        finally:
            for each in work:
                each.cancel()
        call.size += sum(len(reply.text) for reply in replies)
        if asked.kept is not None:
            self._stored.keep(call.id, [*asked.kept, replies[0].message], call.size)
        return replies

    async def _reply(self, messages: Messages, asked: ModelCall) -> Reply:
        try:
            async with asyncio.timeout(TURN_S):
                await self._turns.acquire()
        except TimeoutError:
            raise ApiError(f"{AT_ONCE} replies were under way for {TURN_S:g} s, and none ended", status=503) from None
        try:
            self._expect_open()
            given: dict[str, Any] = {"tools": asked.tools, "schema": asked.schema, "max_tokens": asked.limit}
            reply = await self._chat.complete(messages, **given)
        finally:
            self._turns.release()
        self.counts["tokens"] += reply.tokens
        for _ in reply.faults:
            self._count("faults")
        return reply

    def _count(self, kind: str) -> None:
        """Add 1 to a count, here and in the episode's counts."""
        self.counts[kind] += 1
        self._record([f"gateway/{kind}"])

    def _expect_open(self) -> None:
        """Raise ApiError when there are no further replies."""
        if self.failure is not None:
            raise ApiError(f"the model failed: {self.failure}", status=500)
        if self._budget is not None and self.counts["tokens"] >= self._budget:
            self.over = self.over or f"the episode's replies have used up its {self._budget} tokens"
        if self.over:
            raise ApiError(self.over, status=410, code="episode_over")

    def _ended(self, key: tuple[str, str], call: GatewayCall) -> None:
        """Keep an answered call for retries, and forget any other one."""
        self._open -= 1
        if call.timer is not None:
            call.timer.cancel()
        if call.answered:
            self._kept += call.size
            self._calls.move_to_end(key)
        else:
            self._forget(key, [call])
        for old in list(self._calls):
            if self._kept <= MOST_KEPT:
                return
            answered = [each for each in self._calls[old] if each.answered]
            self._kept -= sum(each.size for each in answered)
            self._forget(old, answered)

    def _forget(self, key: tuple[str, str], gone: list[GatewayCall]) -> None:
        self._calls[key] = [each for each in self._calls[key] if each not in gone]
        if not self._calls[key]:
            del self._calls[key]

    def _abandon(self, call: GatewayCall) -> None:
        """End a call that nobody waits for any more."""
        if not call.waiting and call.work is not None and not call.work.done():
            self._count("abandoned")
            call.work.cancel()


def _refusal(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextFull):
        return ApiError(str(error), status=400, code="context_length_exceeded")
    if isinstance(error, EpisodeOver):
        return ApiError(str(error), status=410, code="episode_over")
    if isinstance(error, ValueError):
        return ApiError(str(error), status=400)
    return ApiError(f"the model failed: {error}", status=500)
