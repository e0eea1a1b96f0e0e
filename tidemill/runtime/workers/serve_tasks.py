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
from tidemill.runtime.workers import frames, worker_setup
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
        self._running: dict[int, tuple[asyncio.Task[frames.CallResult | frames.CallFailure], Channel]] = {}

    async def serve(self, frames_in: int) -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        # A fork that returns into this loop ends at once: it shares the loop's files with this process.
        os.register_at_fork(after_in_child=lambda: loop.call_soon(os._exit, 0))
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(frames_in, "rb", buffering=0))
        kind = frames.to_worker(self._handler.requests, self._handler.notes)
        try:
            while True:
                header = await reader.readexactly(frames.HEADER_BYTES)  # bounded: its parent's end closes the pipe
                body = await reader.readexactly(frames.size_of(header))  # bounded: as above
                self._hear(serialization.decode(body, kind))
                await asyncio.sleep(0)  # calls begin one by one, so that many slow beginnings are not one long silence
        except asyncio.IncompleteReadError:
            return

    def _hear(self, frame: Any) -> None:
        if isinstance(frame, frames.WorkerPing):
            self._say(frame)
        elif isinstance(frame, frames.WorkerCall):
            channel = Channel(frame.id, self._say)
            task = asyncio.get_running_loop().create_task(self._run(frame, channel))
            self._running[frame.id] = task, channel
            task.add_done_callback(partial(self._end, frame.id))
        elif frame.id in self._running:
            task, channel = self._running[frame.id]
            if isinstance(frame, frames.WorkerNote):
                channel.hear(frame.message)
            elif isinstance(frame, frames.CancelCall):
                channel.cancelled = True
                task.cancel()

    async def _run(self, call: frames.WorkerCall, channel: Channel) -> frames.CallResult | frames.CallFailure:
        try:
            self._handler.load(call.request)
            self._say(frames.CallBegan(call.id))
            return frames.CallResult(call.id, await self._handler.call(call.request, channel))
        except BaseException as error:  # the user's code may raise anything, sys.exit() included
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the parent asked for it
            return failure(call.id, error)

    def _end(self, number: int, task: asyncio.Task[frames.CallResult | frames.CallFailure]) -> None:
        """Report the end of a call, cancelled ones included: the parent waits for it."""
        del self._running[number]
        try:
            self._say(frames.CallFailure(number, "cancelled", "") if task.cancelled() else task.result())
        except ValueError as error:
            self._say(failure(number, error))
