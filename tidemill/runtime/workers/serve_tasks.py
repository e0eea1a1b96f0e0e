"""Loop of a worker that does many calls at once, each as a task of one event loop, until its input ends.

Answers to pings show that the event loop is not blocked.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
from functools import partial
from typing import Any

from tidemill.core import serialization
from tidemill.runtime.workers import worker_setup
from tidemill.runtime.workers.frames import (
    HEADER_BYTES,
    CallBegan,
    CallFailure,
    CallResult,
    CancelCall,
    WorkerCall,
    WorkerNote,
    WorkerPing,
    size_of,
    to_worker,
)
from tidemill.runtime.workers.worker_setup import Channel, FrameWriter, Handler, failure


def serve(handler: Handler, most: int) -> None:
    """Answer calls with `handler`, whose `call` is a coroutine. most: bytes of a frame that the parent takes."""
    frames_in, frames_out = worker_setup.settle()
    faulthandler.enable()  # a crash writes its stack
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # a blocked event loop writes its stack on request
    asyncio.run(_Tasks(handler, FrameWriter(frames_out, most)).serve(frames_in))


class _Tasks:
    """The running calls of one worker process."""

    def __init__(self, handler: Handler, writer: FrameWriter) -> None:
        self._handler, self._say = handler, writer.say
        self._running: dict[int, tuple[asyncio.Task[CallResult | CallFailure], Channel]] = {}

    async def serve(self, frames_in: int) -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        # A fork that returns into this loop ends at once: it shares the loop's files with this process.
        os.register_at_fork(after_in_child=lambda: loop.call_soon(os._exit, 0))
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(frames_in, "rb", buffering=0))
        kind = to_worker(self._handler.requests, self._handler.notes)
        try:
            while True:
                # bounded: the worker lives as long as its parent, whose end closes the pipe
                size = size_of(await reader.readexactly(HEADER_BYTES))
                # bounded: as above
                self._hear(serialization.decode(await reader.readexactly(size), kind))
        except asyncio.IncompleteReadError:
            return

    def _hear(self, frame: Any) -> None:
        if isinstance(frame, WorkerPing):
            self._say(frame)
        elif isinstance(frame, WorkerCall):
            channel = Channel(frame.id, self._say)
            task = asyncio.get_running_loop().create_task(self._run(frame, channel))
            self._running[frame.id] = task, channel
            task.add_done_callback(partial(self._end, frame.id))
        elif frame.id in self._running:
            task, channel = self._running[frame.id]
            if isinstance(frame, WorkerNote):
                channel.hear(frame.message)
            elif isinstance(frame, CancelCall):
                channel.cancelled = True
                task.cancel()

    async def _run(self, call: WorkerCall, channel: Channel) -> CallResult | CallFailure:
        try:
            self._handler.load(call.request)
            self._say(CallBegan(call.id))
            return CallResult(call.id, await self._handler.call(call.request, channel))
        except BaseException as error:  # the user's code may raise anything, sys.exit() included
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the parent asked for it
            return failure(call.id, error)

    def _end(self, number: int, task: asyncio.Task[CallResult | CallFailure]) -> None:
        """Report the end of a call, cancelled ones included: the parent waits for it."""
        del self._running[number]
        try:
            self._say(CallFailure(number, "cancelled", "") if task.cancelled() else task.result())
        except ValueError as error:
            self._say(failure(number, error))
