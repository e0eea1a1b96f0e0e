"""Weight updates between two steps of an engine: stage, commit, verify.

    stage, in turns with steps -> commit, at once or when nothing is in flight -> prove, in turns with steps

(On a CUDA device a thread stages and verifies, beside the steps. Live weights arrive in a thread on any device, because to
receive them is to wait for others.) Code outside of an `await` runs between two steps: new
weights are committed there.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tidemill.core import fault_injection
from tidemill.core.errors import PolicyMismatch
from tidemill.core.executors import background, in_thread
from tidemill.core.policy_version import PolicyKey
from tidemill.core.types import InFlight, Version
from tidemill.core.weight_update import UpdateSupport, WeightUpdate
from tidemill.engine.native.activity import Activity
from tidemill.engine.native.scheduler import Scheduler
from tidemill.engine.native.served_versions import ServedVersions
from tidemill.engine.native.staged_weights import Staging, VersionStaging, Weights
from tidemill.engine.native.step_plan import Sequence
from tidemill.models.piecewise import Work, at_once

T = TypeVar("T")
TURN_S = 0.0025  # half of the 5 ms by which a step may be delayed; the rest is for the last piece and for cold caches
SHARE = 1 / 20  # of the time since the last turn: even with slow steps the work ends in 20 times its own time


class WeightUpdater:
    """The served weights, and their change."""

    def __init__(
        self,
        weights: Weights,
        staging: VersionStaging | None,
        served: ServedVersions,
        scheduler: Scheduler,
        activity: Activity,
        *,
        name: str,
        in_flight: InFlight,
        check: Callable[[], None],
        settle: Callable[[], None],
    ) -> None:
        """Serve `weights` until the first update.

        staging: None if nothing is ever updated. served: the versions of these weights. check: raises when the engine has
        failed. settle: ends the step under way.
        """
        self.weights, self.served = weights, served
        self._staging, self._scheduler, self._activity = staging, scheduler, activity
        self.takes = UpdateSupport(()) if staging is None else staging.takes
        self._name, self._in_flight = name, in_flight
        self._check, self._settle = check, settle
        on_cuda = weights.decoder.embed.weight.device.type == "cuda"
        self._tells_device: ThreadPoolExecutor | None = background("staging") if on_cuda else None
        self._receives: ThreadPoolExecutor | None = None  # from the first live update on
        self._give_up = threading.Event()  # ends the receiving under way
        self.one_at_a_time = asyncio.Lock()  # bounded: held for an update or a sleep, with the caller's deadline
        # What waits for the end of sequences in flight, and of which policies.
        self._draining: tuple[Callable[[], None], asyncio.Future[None], frozenset[int]] | None = None
        self._latest: WeightUpdate | None = None  # that was committed

    async def update(self, update: WeightUpdate, fail: Callable[[Exception], None]) -> Version:
        """Stage, commit and verify a version.

        fail: called when the served weights cannot be verified: nothing more may be sampled from them.
        """
        async with self.one_at_a_time:
            self._check()
            if self._staging is None:
                raise RuntimeError(f"engine {self._name} was built without a receiver: it cannot be updated")
            self.takes.check(update, f"engine {self._name}", self.served.of(update.version.policy))
            self.served.expect_next(update.version, self._name)
            step, policy = update.version.step, self.served.numbers[update.version.policy]
            fault_injection.reach(self._name, "stage", step)
            if update.live:
                await self._arrive(update, self._staging)
            work = self._staging.stage(update, self.weights)
            staged = await self._beside_steps("stage", work, step=step, bytes=update.bytes)
            await self.between_steps(partial(self._swap, staged), {policy})
            proof = self._staging.prove(self.weights, update.version)
            try:
                await _to_the_end(self._beside_steps("prove", proof, step=step))  # also when nobody waits for it any more
            except PolicyMismatch as error:
                fail(error)
                raise
            self._latest = None if update.live or update.kind == "delta" else update  # those cannot be read once more
            return self.served.present(policy)

    async def _arrive(self, update: WeightUpdate, staging: VersionStaging) -> None:
        """Receive live weights beside the steps. When cancelled, this breaks the transfer off for all."""
        if update.rendezvous is None:
            raise PolicyMismatch(f"{update.version} is sent while engines receive, and no rendezvous for it was given")
        self._receives = self._receives or background("receiving")
        stop = self._give_up = threading.Event()
        with self._activity.beside("receive", step=update.version.step, bytes=update.bytes):
            await in_thread(staging.arrive, update, self.weights, stop, stop=stop, pool=self._receives)

    async def remember(self, fail: Callable[[Exception], None]) -> None:
        """Read the latest update again if `forget` freed its weights. Raises PolicyMismatch when there is none any more."""
        if self.weights.held:
            return
        if self._latest is None:
            raise PolicyMismatch(f"engine {self._name} gave its weights back and has had no update since: update it first")
        await self.update(self._latest, fail)

    def expect_updates(self) -> None:
        """Raise ValueError if no update can bring weights that were freed."""
        if self._staging is None:
            raise ValueError(
                f"sleep(weights=True): engine {self._name} was built without a receiver, so it could get no weights again; "
                "let it keep them"
            )
        if self.weights.adapters is not None:
            raise ValueError(
                f"sleep(weights=True): engine {self._name} serves several policies on one base, which no update brings; "
                "let it keep its weights"
            )

    def forget(self) -> None:
        """Free the served weights and the spare ones."""
        if self.weights.held:
            self.weights = self.weights.forgotten()
        if isinstance(self._staging, Staging):
            self._staging.forget()

    async def between_steps(self, act: Callable[[], None], policies: Collection[int] | None = None) -> None:
        """Call `act`, with in_flight = "finish" once nothing is in flight any more. Nothing begins until then.

        policies: those that it is about, by number; sequences of the others go on and begin. None: all.
        """
        self._check()
        about = frozenset(self.served.numbers.values() if policies is None else policies)
        if self._in_flight != InFlight.FINISH or not self._scheduler.begun(about):
            act()
            return
        self._scheduler.draining = about
        drained = asyncio.get_running_loop().create_future()
        self._draining = (act, drained, about)
        try:
            await drained  # bounded: by the longest sequence in flight, and the caller's deadline
        finally:
            self._draining, self._scheduler.draining = None, frozenset()

    def act_when_drained(self) -> None:
        """Do what waits for it once nothing is in flight."""
        if self._draining is not None and not self._scheduler.begun(self._draining[2]):
            (act, drained, _), self._draining = self._draining, None
            act()
            self._scheduler.draining = frozenset()
            drained.set_result(None)

    def fail(self, error: Exception) -> None:
        """Fail with `error` what waits for the end of sequences in flight."""
        if self._draining is not None and not self._draining[1].done():
            self._draining[1].set_exception(error)

    async def close(self) -> None:
        self._give_up.set()
        async with self.one_at_a_time:  # an update may still be receiving
            if self._staging is not None:
                self._staging.close()
                self._staging = None
        for pool in filter(None, (self._tells_device, self._receives)):
            pool.shutdown(wait=False)

    async def _beside_steps(self, name: str, work: Work[T], **args: float) -> T:
        if self._tells_device is not None:
            with self._activity.beside(name, **args):
                return await in_thread(partial(at_once, work), pool=self._tells_device)
        return await in_turns(work, lambda begin, end: self._activity.span(name, begin, end, **args), self._check)

    def _swap(self, staged: Weights) -> None:
        """Commit: the next step runs on `staged`."""
        assert self._staging is not None
        fault_injection.reach(self._name, "commit", staged.version.step)
        self._settle()
        begin = time.monotonic()
        if isinstance(self._staging, Staging):
            self._staging.retire(self.weights)
        self.weights = staged
        policy = self.served.commit(staged.version)
        before, self._scheduler.salts[policy] = self._scheduler.salts[policy], staged.version.key
        self._scheduler.blocks.retire(self.served.recent)
        if self._in_flight == InFlight.RECOMPUTE:
            self._scheduler.begin_again(policy)
        else:
            self._restart(policy, before)
        self._activity.span("commit", begin, time.monotonic(), step=staged.version.step)

    def _restart(self, policy: int, before: PolicyKey) -> None:
        """Restart a policy's scores, and its sequences that began under the salt `before` and have sampled nothing.

        All their tokens will be of the new version, so their KV must be, too.
        """
        scheduler = self._scheduler
        own = [sequence for sequence in scheduler.running.values() if sequence.policy == policy]
        for sequence in [s for s in own if s.probe or self._only_prompt(s, before)]:
            scheduler.preempt(sequence)
        for sequence in scheduler.waiting:
            if self._only_prompt(sequence, before):
                sequence.salt = None

    def _only_prompt(self, sequence: Sequence, salt: PolicyKey) -> bool:
        """True if a sequence has begun under this salt and has sampled nothing yet."""
        begun = sequence.slot >= 0 and not sequence.released and sequence.salt == salt
        return begun and self._scheduler.length[sequence.slot] == len(sequence.prompt)


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Do `work`. When cancelled, this ends it first, and raises what it raises."""
    working = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(working)  # bounded: by the caller's deadline
    except asyncio.CancelledError:
        await asyncio.wait({working})  # bounded: it reads this engine's weights
        working.result()
        raise


async def in_turns(work: Work[T], note: Callable[[float, float], None], check: Callable[[], None]) -> T:
    """Do `work` in small turns between an engine's steps. It ends when this is cancelled or `check` raises.

    It needs no thread, so nothing competes with the threads that compute a step, neither for cores nor for the interpreter.
    The engine's loop and this one each come once in a round of the event loop. Without steps, turn follows turn, and calls
    and heartbeats are answered between them.

    note: called with the beginning and the end of each turn, by the monotonic clock.
    """
    ended = time.monotonic()
    try:
        while True:
            await asyncio.sleep(0)  # first, because earlier work in this round, such as a commit, delays the step too
            check()
            begin = time.monotonic()
            until = begin + max(TURN_S, SHARE * (begin - ended))
            try:
                next(work)
                while time.monotonic() < until:
                    next(work)
            except StopIteration as done:
                return done.value
            finally:
                ended = time.monotonic()
                note(begin, ended)
    finally:
        work.close()
