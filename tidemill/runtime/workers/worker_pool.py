"""Pool of worker processes of one kind, for code that may hang, crash or leak and must not harm this process.

call -> the worker with the fewest calls, started when first needed -> its result, or WorkerLost or CallFailed
worker ended -> it is killed with all that it started -> another one, when needed or after the pause that `lost` returns
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.core.errors import CallFailed, NoWorkers, WorkerLost
from tidemill.runtime.started_process import started_process
from tidemill.runtime.workers import guard
from tidemill.runtime.workers.child import MARK, REAP_LIMIT_S, STARTUP_LIMIT_S, WorkerProcess, closed
from tidemill.runtime.workers.worker import OpenCall, Worker, WorkerKind

Lost = Callable[[str], float]
"""From the reason of a lost worker to the seconds before the next one starts. Raises when it was one too many."""


class Guard:
    """Handle of the guard process, which kills a pool's workers if this process dies (see `guard`)."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()  # bounded: it covers the start of one process, which does not wait for it

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the guard process unless it runs."""
        async with self._lock:
            if self._process is None:
                self._process = await started_process(
                    *(sys.executable, "-I", "-S", str(Path(guard.__file__)), MARK),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.DEVNULL,
                )

    def tell(self, sign: str, group: int) -> None:
        """Add ("+") or remove ("-") a worker's process group."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(f"{sign}{group}\n".encode())

    async def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await asyncio.wait_for(self._process.wait(), REAP_LIMIT_S)
            await closed(self._process.stdin)
            self._process = None


@dataclass(slots=True, eq=False)
class _Slot:
    """Place of one worker, which successors take over."""

    worker: Worker | None = None
    keeper: asyncio.Task[None] | None = None
    late: bool = False  # the worker was lost, and its successor is not up yet
    waiting: int = 0  # calls that wait for the worker
    used: int = 0  # number of its latest call

    @property
    def up(self) -> bool:
        return self.worker is not None and not self.worker.ended.done()

    @property
    def order(self) -> tuple[bool, int, bool, int]:
        """Least for the slot that the next call should take: the least busy, and then the one whose caches are warm."""
        return self.late, self.waiting + (self.worker.load if self.worker else 0), not self.up, -self.used


class WorkerPool:
    """Pool of workers: `await call(...)`; `await close()`."""

    def __init__(self, kind: WorkerKind, workers: int, *, preload: Any = None, lost: Lost | None = None) -> None:
        """preload: the first request to each worker, before it is up.

        lost: decides on a lost worker's successor, which then starts without being asked for. None: one starts when needed.
        """
        self.kind, self._preload, self._lost = kind, preload, lost
        self._slots = [_Slot() for _ in range(workers)]
        one_at_a_time = kind.patience_s is None
        self._free = asyncio.Semaphore(workers) if one_at_a_time else nullcontext()
        self._ids = itertools.count()
        self._guard = Guard()
        self._ending: set[asyncio.Task[None]] = set()
        self._changed: asyncio.Future[None] | None = None  # what waiting calls wait for
        self._failure: Exception | None = None  # why no worker is available any more
        self.starts = 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are up."""
        return [slot.worker.process.pid for slot in self._slots if slot.worker is not None and slot.up]

    async def call(
        self,
        request: Any,
        what: str,
        *,
        loads: str = "",
        limit_s: float | None = None,
        hear: Callable[[OpenCall, Any], None] | None = None,
    ) -> Any:
        """Have a worker answer a request (see `Worker.call`); the wait for one does not count. Raises also NoWorkers."""
        number = next(self._ids)
        async with self._free:  # bounded: by the limits of the calls before it, or by the caller's deadline
            slot, worker = await self._choose()
            slot.used = number + 1
            return await worker.call(number, request, what, loads=loads, limit_s=limit_s, hear=hear)

    async def start(self) -> None:
        for slot in self._slots:
            self._fill(slot)
        while not all(slot.up for slot in self._slots):
            await self._change()

    async def close(self) -> None:
        """Kill the workers, also in the middle of calls, and wait until they are gone."""
        self._failure = NoWorkers(f"{self.kind.title} was closed")
        self._wake(self._failure)
        keepers = [slot.keeper for slot in self._slots if slot.keeper is not None]
        for keeper in keepers:
            keeper.cancel()
        for tasks in (keepers, self._ending):
            if tasks:
                await asyncio.wait(tasks, timeout=2 * REAP_LIMIT_S)
        await self._guard.close()

    async def _choose(self) -> tuple[_Slot, Worker]:
        """The least busy worker that is up, or the first to come up. Raises WorkerLost when it cannot be started."""
        while True:
            slot = min(self._slots, key=lambda each: each.order)
            if self._failure is None and slot.worker is not None and slot.up:
                return slot, slot.worker
            slot.waiting += 1
            try:
                self._fill(slot)
                await self._change()
            finally:
                slot.waiting -= 1

    async def _change(self) -> None:
        """Wait until a worker came up, was lost or could not be started. Raises NoWorkers, or why it could not."""
        if self._failure is not None:
            raise NoWorkers(str(self._failure)) from self._failure
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        changed = self._changed
        await asyncio.wait({changed})  # bounded: by the caller's deadline; every start of a worker ends
        changed.result()

    def _wake(self, error: Exception | None = None) -> None:
        changed, self._changed = self._changed, None
        if changed is None:
            return
        if error is None:
            changed.set_result(None)
        else:
            changed.set_exception(error)
            changed.exception()  # whoever waited may have left

    def _fill(self, slot: _Slot) -> None:
        if slot.keeper is None and self._failure is None:
            slot.keeper = asyncio.ensure_future(self._keep(slot))

    async def _keep(self, slot: _Slot) -> None:
        """Keep a slot filled with one worker after another, until it fails for good or nobody waits for the next one."""
        try:
            while True:
                try:
                    reason, came_up = str(await self._employ(slot)), True
                except (WorkerLost, OSError) as error:
                    reason, came_up = str(error) or type(error).__name__, False
                if self._lost is not None:
                    slot.late = True
                    self._wake()
                    await asyncio.sleep(self._lost(reason))  # bounded: by its argument
                elif not came_up:
                    self._wake(WorkerLost(reason, was_up=False))
                    return
                elif not slot.waiting:
                    return
        except Exception as error:  # any error: callers that wait for a worker would wait for ever
            self._failure = error
            self._wake(NoWorkers(str(error)))
        finally:
            slot.keeper = None

    async def _employ(self, slot: _Slot) -> WorkerLost:
        """Run one worker to its end; returns why it ended. Raises WorkerLost, OSError, or NoWorkers for no other."""
        await self._guard.start()
        process = await WorkerProcess.start(self.kind.module, self.kind.title, self.kind.memory_mb)
        self._guard.tell("+", process.pid)
        self.starts += 1
        worker = Worker(process, self.kind)
        serving = asyncio.ensure_future(worker.serve())
        try:
            if self._preload is not None:
                await worker.call(-1, self._preload, self.kind.title, limit_s=STARTUP_LIMIT_S)
            worker.watched = True
            slot.worker, slot.late = worker, False
            self._wake()
            return await serving  # bounded: it lasts as long as the worker is of use, and `close` ends it
        except CallFailed as failed:
            why = f"{self.kind.title} cannot start: {failed}"
            raise (WorkerLost(why) if self._lost is None else NoWorkers(why)) from None
        finally:
            slot.worker = None
            serving.cancel()
            worker.end("closed", f"{self.kind.title} was stopped")
            reaping = asyncio.ensure_future(self._reap(process))
            self._ending.add(reaping)
            reaping.add_done_callback(self._ending.discard)

    async def _reap(self, process: WorkerProcess) -> None:
        await process.reap()
        process.kill()  # again, for processes forked while the first signal was on its way
        self._guard.tell("-", process.pid)
