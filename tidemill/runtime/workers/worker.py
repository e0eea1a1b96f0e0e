"""One worker process as its parent uses it: calls with limits, messages to and from them, and a watch over it.

A worker is given up when it died, was stopped by a signal, wrote something else than frames, was late with a call, did not
end a cancelled one, or left pings unanswered because its event loop was blocked. It is then killed, and every call that it
was doing fails with the first of these reasons.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from tidemill.core import serialization
from tidemill.core.errors import CallFailed, CodecError, WorkerLost
from tidemill.observability.stall_report import waiting
from tidemill.runtime.workers import child, frames
from tidemill.runtime.workers.child import WorkerProcess
from tidemill.runtime.workers.stopped import stopped_instead

LOOKS = 20  # checks of a worker within a limit
TURN_S = 1.0  # time for a worker with everything loaded to begin a call, on a busy machine


@dataclass(frozen=True)
class WorkerKind:
    """Kind of worker: the module that runs in it, the types of its messages, and its limits."""

    module: str  # serves calls when it is run as a program
    title: str  # name of such a worker in messages
    results: Any  # type of a call's result
    notes: Any = None  # type of the messages that a call sends before
    memory_mb: int = 0  # of address space; 0 is unlimited
    most: int = 1 << 20  # bytes of a frame from a worker
    patience_s: float | None = None  # limit for the answer to a ping and for the end of a cancelled call.
    # None: the worker does one call at a time, answers no pings, and is killed when its call is cancelled


class OpenCall:
    """A running call: `tell` it a message, or `fail` it."""

    def __init__(self, worker: Worker, number: int, hear: Callable[[OpenCall, Any], None] | None) -> None:
        loop = asyncio.get_running_loop()
        self.id, self._worker, self._hear = number, worker, hear
        self.began: asyncio.Future[None] = loop.create_future()
        self.result: asyncio.Future[Any] = loop.create_future()
        self.over = False  # the worker has ended it

    def tell(self, message: Any) -> None:
        self._worker.post(frames.WorkerNote(self.id, message))

    def fail(self, error: Exception) -> None:
        if not self.result.done():
            self.result.set_exception(error)

    def take(self, frame: frames.CallBegan | frames.WorkerNote | frames.CallResult | frames.CallFailure) -> None:
        began = self.began.done()
        self.over = self.over or isinstance(frame, frames.CallResult | frames.CallFailure)
        if isinstance(frame, frames.CallBegan):
            if not began:
                self.began.set_result(None)
        elif isinstance(frame, frames.CallFailure):
            reason = frame.reason if began else frame.reason.removeprefix("ConfigError: ")  # of an import: a sentence
            self.fail(CallFailed(reason, frame.trace, began))
        elif self.result.done():
            return
        elif isinstance(frame, frames.CallResult):
            self.result.set_result(frame.value)
        elif self._hear is not None:
            self._hear(self, frame.message)


class Worker:
    """A running worker process: `serve()` beside any number of `call(...)`; `end(...)` it."""

    def __init__(self, process: WorkerProcess, kind: WorkerKind) -> None:
        self.process, self._kind = process, kind
        self._frames = frames.from_worker(kind.results, kind.notes)
        self._calls: dict[int, OpenCall] = {}
        self._leaving: dict[int, tuple[str, int]] = {}  # cancelled calls, and the checks since then
        self._pinged = self._ponged = 0
        self._spoke = False  # since the latest check
        self._loaded: str | None = None  # by its latest call
        self.watched = False  # pings begin when it has loaded what every call needs
        self.ended: asyncio.Future[WorkerLost] = asyncio.get_running_loop().create_future()

    @property
    def load(self) -> int:
        return len(self._calls)

    async def call(
        self,
        number: int,
        request: Any,
        what: str,
        *,
        loads: str = "",
        limit_s: float | None = None,
        hear: Callable[[OpenCall, Any], None] | None = None,
    ) -> Any:
        """Have a request answered. Raises WorkerLost, CallFailed, or what `OpenCall.fail` was given.

        what: the call's name in messages. loads: what the handler imports for it, which may take longer the first time.
        limit_s: counts from when that is done. hear: is called with the call and each of its messages; it may raise
        CodecError.
        """
        if self.ended.done():
            raise self.ended.result()
        call = self._calls[number] = OpenCall(self, number, hear)
        self.post(frames.WorkerCall(number, request))
        try:
            with waiting(f"{self._kind.title} ({self.process.pid})", what, limit_s):
                if limit_s is not None:
                    known, self._loaded = loads == self._loaded, loads
                    begin_s = max(limit_s, TURN_S) if known else child.STARTUP_LIMIT_S
                    await self._within({call.began, call.result}, begin_s, f"{what} did not start")
                    await self._within({call.result}, limit_s, f"{what} did not return")
                return await call.result  # bounded: here or by the caller's deadline, and by the watch over the worker
        finally:
            del self._calls[number]
            if not call.over:
                self._cancel(number, what)

    def post(self, frame: Any) -> None:
        if not self.ended.done():
            self.process.post(serialization.encode(frame))

    def end(self, kind: str, reason: str) -> None:
        """Kill the worker, and fail its calls; the first reason counts."""
        if self.ended.done():
            return
        self.ended.set_result(WorkerLost(reason, kind))
        self.process.kill()
        for call in self._calls.values():
            call.fail(WorkerLost(reason, kind, began=call.began.done()))

    async def serve(self) -> WorkerLost:
        """Read frames and watch over the worker until it is of no use and every call has failed; returns why."""
        hearing = asyncio.ensure_future(self._hear())
        work = {hearing, asyncio.ensure_future(self._standing_still(hearing))}
        if self._kind.patience_s is not None:
            work.add(asyncio.ensure_future(self._watch(self._kind.patience_s)))
        try:
            # bounded: by the watch, while there is anything to wait for
            done, _ = await asyncio.wait({self.ended, *work}, return_when=asyncio.FIRST_COMPLETED)
            for task in work & done:
                self.end(*task.result())
            return self.ended.result()
        finally:
            self.end("closed", f"{self._kind.title} was stopped")
            for task in work:
                task.cancel()

    async def _within(self, either: set[asyncio.Future[Any]], limit_s: float, what: str) -> None:
        """Wait for one of two futures, and end the worker at the limit."""
        # Time is counted in checks, not by the clock: while this process itself stood still, it could receive no reply.
        for _ in range(LOOKS + 1):
            if (await asyncio.wait(either, timeout=limit_s / LOOKS, return_when=asyncio.FIRST_COMPLETED))[0]:
                return
        self.end("timeout", f"{what} within {limit_s:g} s and was killed")

    def _cancel(self, number: int, what: str) -> None:
        if self._kind.patience_s is None:
            self.end("cancelled", f"{what} was cancelled")
        elif not self.ended.done():
            self._leaving[number] = what, 0
            self.post(frames.CancelCall(number))

    async def _hear(self) -> tuple[str, str]:
        title = self._kind.title
        try:
            while True:
                self._take(serialization.decode(await self.process.receive(self._kind.most), self._frames))
                await asyncio.sleep(0)  # a flood of frames must not block the event loop
        except CodecError as error:
            return "protocol", f"{title} wrote something else than a frame: {error}"
        except (asyncio.IncompleteReadError, ConnectionError):
            return "died", await self.process.epitaph()

    def _take(self, frame: Any) -> None:
        self._spoke = True
        if isinstance(frame, frames.WorkerPing):
            self._ponged = frame.number
            return
        ends = isinstance(frame, frames.CallResult | frames.CallFailure)
        if ends:
            self._leaving.pop(frame.id, None)
        if frame.id in self._calls:
            self._calls[frame.id].take(frame)
        if ends and frame.children:  # processes that a call left behind end with its worker
            self.end("left", f"a call of {self._kind.title} left processes behind")

    async def _watch(self, patience_s: float) -> tuple[str, str]:
        """Wait until the worker is silent for its limit, in checks as in `_within`; returns the reason in words."""
        numbers, silent = itertools.count(1), 0
        while True:
            await asyncio.sleep(patience_s / LOOKS)  # bounded: by `serve`
            answered = self._pinged == self._ponged
            silent, self._spoke = 0 if answered or self._spoke else silent + 1, False
            if answered and self.watched and (self._calls or self._leaving):
                self._pinged = next(numbers)
                self.post(frames.WorkerPing(self._pinged))
            if silent > LOOKS:
                return "timeout", f"{self._kind.title} did not give control back for {patience_s:g} s{await self._where()}"
            for number, (what, checks) in self._leaving.items():
                self._leaving[number] = what, checks + 1
                if checks > LOOKS:
                    return "timeout", f"{what} went on for {patience_s:g} s after it was cancelled"

    async def _standing_still(self, hearing: asyncio.Future[tuple[str, str]]) -> tuple[str, str]:
        if await stopped_instead(self.process.pid, hearing):
            return "stopped", f"{self._kind.title} was stopped by a signal and was killed"
        return hearing.result()

    async def _where(self) -> str:
        where = "its worker is gone"
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            where = await self.process.where()
        return f" ({where})" if where else ""
