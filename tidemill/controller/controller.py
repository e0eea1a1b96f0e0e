"""The training loop: admit -> rollout -> buffer -> train -> publish -> release.

    tasks --admit--> rollout (environment x engine) --group--> buffer --batch--> trainer --apply--> version v + 1
      ^                 ^                                                          |
      |                 +------- engines commit v + 1 <------- publish <-----------+
      +------------------------ release the step's slots <-----+

Step s trains weights s into weights s + 1. Its forward and backward run while version s is still being published. Its
update waits until the publication has ended, because weights must not change under a reader. With `stream`, the gradient
of finished groups is computed while the step's other groups are still sampled. Synchronous RL is max_lag = 0, no other loop.
With `turns`, trainer and engines share a device: the gradient waits for the publication, and rollouts for its end.

A step's composition is in the ledger before its gradient is complete, and before any weight changes (I3). Every token's
version is one that this run published (I1), and none is older than max_lag (I2). Only replayed groups (`again`) may be
older, as old as the recipe allows.
This module knows protocols only: no torch, no engine, no process. Tests run it under virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from tidemill.controller.admission_buffer import Buffer
from tidemill.controller.circuit_breaker import Gate
from tidemill.controller.device_turns import DeviceTurns
from tidemill.controller.dropped_groups import Drops
from tidemill.controller.train_step import Begun, computed_tokens, train_on
from tidemill.core import fault_injection
from tidemill.core.attempt_checks import check_attempts
from tidemill.core.errors import PolicyMismatch, RunFailed
from tidemill.core.interfaces import Algorithm, Ledger, Publisher, Roller, Trainer
from tidemill.core.policy_version import PolicyKey
from tidemill.core.types import Array, Group, Metrics, Sample, Task, TrainResult, Update, Version
from tidemill.observability.stall_report import waiting
from tidemill.observability.timeline import Timeline

ROLE = "controller"  # this process's role in fault injection
Publication = asyncio.Task[list[Version]]  # of one step: a version of each policy
PATIENCE_S = 3.0  # wait for the last checkpoint before the user is told of it


class Observer(Protocol):
    """Receiver of the loop's events, in order. It cannot change what happens."""

    def rolled_out(self, group: Group, dropped: str | None) -> None: ...
    async def trained(
        self, step: int, groups: Sequence[Group], samples: Sequence[Sample], result: TrainResult, metrics: Metrics
    ) -> None: ...
    def published(self, version: Version) -> None: ...
    def evaluated(self, step: int, results: Metrics) -> None: ...
    def saving(self, step: int) -> None:
        """All steps are trained, and the run waits until the checkpoint of this step is written."""
        ...


@dataclass(frozen=True, slots=True)
class Schedule:
    """The loop's length and the steps at which it does more than train.

    Steps are counted from the beginning of the run.
    """

    steps: int
    first: int = 0  # > 0 when a run goes on
    saved: int = 0  # step of the newest checkpoint; 0: there is none
    incarnation: int = 0
    eval_every: int = 0  # 0: never
    checkpoint_every: int = 0  # 0: only at the end
    probe_every: int = 0  # 0: never
    deterministic: bool = False  # the policy that samples a group depends on the group alone
    stream: int = 0  # finished tokens with which a waiting trainer begins, if by_group; 0: it waits for all
    barren: int = 100  # the run stops when this many times a step's groups are dropped in a row


@dataclass(slots=True)
class Hooks:
    """Functions that the loop awaits at set points. None: nothing is done there."""

    evaluate: Callable[[Version], Awaitable[Metrics]] | None = None
    # (steps done, next admission id) -> once the state is copied, the coroutine that writes it while training goes on
    checkpoint: Callable[[int, int], Awaitable[Coroutine[Any, Any, None]]] | None = None
    # raises PolicyMismatch, before the update, if engines and trainer disagree on what the present version sampled
    agree: Callable[[Version, Sequence[Group], Sequence[Sample], Sequence[Array]], Awaitable[None]] | None = None
    probe: Callable[[Version, Sequence[Sample], Sequence[Array]], Awaitable[None]] | None = None


@dataclass(slots=True)
class Controller:
    """The training loop and its parts: see the module."""

    schedule: Schedule
    buffer: Buffer
    task_at: Callable[[int], Task]  # admission id -> task
    roller: Roller
    trainer: Trainer
    publisher: Publisher
    ledger: Ledger
    algorithm: Algorithm
    observer: Observer
    hooks: Hooks = field(default_factory=Hooks)
    gate: Gate = field(default_factory=Gate)
    restored: list[Group | tuple[int, Task]] = field(default_factory=list)  # of a resumed run: finished, or in flight
    policies: Sequence[str] = ("policy",)  # that are trained; the first one is evaluated
    versions: dict[PolicyKey, Version] = field(default_factory=dict)  # those that were published
    learn: Callable[[Group], None] = lambda group: None  # called with each recorded group; `task_at` may depend on it
    again: Callable[[int], Sequence[Group]] = lambda step: ()  # groups of earlier steps that a step trains once more
    turns: DeviceTurns = field(default_factory=DeviceTurns)  # on the device, if trainer and engines share one
    timeline: Timeline = field(default_factory=Timeline)  # what the loop does when, for the time breakdown
    step: int = 0  # steps done
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _drops: Drops = field(default_factory=Drops)  # since the latest group that was kept
    _saved: int = 0  # step of the latest checkpoint
    _saving: asyncio.Task[None] | None = None
    _reporting: asyncio.Task[None] | None = None  # the observer of the latest step

    def stop(self) -> None:
        """Ask the run to end after the step it is in."""
        self._stopping.set()

    async def run(self) -> int:
        """Train until the schedule's end or `stop()`. Returns the number of steps done.

        Any failure cancels the rest, and the first cause is raised.
        """
        try:
            async with asyncio.TaskGroup() as group:
                # Nothing is sampled before the engines serve what this run published.
                publishing = group.create_task(self._publish(self.schedule.first, 0))
                with self.timeline.phase("publication"):
                    await asyncio.wait({publishing})  # bounded: its calls have deadlines
                workers = [group.create_task(self._rollout_forever(), name=f"rollout-{i}") for i in range(self.buffer.slots)]
                workers += [group.create_task(self._restore(each)) for each in self.restored]
                done = await self._train(group, publishing)
                for worker in workers:
                    worker.cancel()
                said = asyncio.get_running_loop().call_later(PATIENCE_S, self.observer.saving, done)
                try:
                    await self._written()
                finally:
                    said.cancel()
        except BaseExceptionGroup as failures:
            raise first_cause(failures) from failures
        return done

    async def _rollout_forever(self) -> None:
        while True:
            async with self.gate.door:  # bounded: a pause has its limit, and slots come back with each publication
                await self.gate.opens()
                group_id = await self.buffer.admit()
                self.gate.admitted(group_id)
            task = self.task_at(group_id)
            with self.timeline.phase("ledger"):
                self.ledger.admit(group_id, task)
            fault_injection.reach(ROLE, "admit", group_id)
            await self._roll_out(group_id, task)

    async def _restore(self, left: Group | tuple[int, Task]) -> None:
        """Finish a group that an earlier process admitted.

        A finished group is used as it is. Any other is sampled again with its own seeds.
        """
        if isinstance(left, Group):
            await self._offer(left)
        else:
            await self._roll_out(*left)

    async def _roll_out(self, group_id: int, task: Task) -> None:
        group = await self.roller.rollout(group_id, task)
        check_attempts(group)
        with self.timeline.phase("ledger"):
            self.ledger.finish(group)
        fault_injection.reach(ROLE, "finish", group_id)
        self.learn(group)
        await self._offer(group)

    async def _offer(self, group: Group) -> None:
        """Hand a finished group to the trainer, or drop it for its reason."""
        reason = self.algorithm.drop_reason(group)
        self.observer.rolled_out(group, reason)
        # A broken verifier must not look like a policy that earns nothing: see `circuit_breaker`.
        why = self.gate.judged(group.id, group.task.env, [t.outcome for t in group.ends])
        if why is not None:
            raise RunFailed(why)
        if reason is None:
            self._drops = Drops()
            await self.buffer.put(group)
        else:
            self._drops.add(group, reason)
            if self._drops.count >= self.schedule.barren * self.buffer.batch:  # it would go on for ever
                raise RunFailed(self._drops.cause())
            with self.timeline.phase("ledger"):
                self.ledger.drop(group.id, reason)
            await self.buffer.drop(group.id)

    async def _train(self, tasks: asyncio.TaskGroup, publishing: Publication) -> int:
        step, self._saved = self.schedule.first, self.schedule.saved
        self.step = step
        if step > self._saved:  # a resume trained these steps again: save them, so that it need not be done once more
            await self._checkpoint(tasks, step)
        while step < self.schedule.steps:
            gathered = await self._gather(step, publishing)
            if gathered is None:
                break
            groups, begun = gathered
            if self.turns.taken:
                await self._take_device(publishing)
            with self.timeline.phase("ledger"):
                again = self.again(step)
            await self._expect_fresh(step, groups[len(begun.groups) :], again, publishing)
            with self.timeline.phase("ledger"):
                incarnation = self.schedule.incarnation
                self.ledger.begin_step(step, incarnation, [g.id for g in groups], [g.id for g in again])
            fault_injection.reach(ROLE, "train", step)
            before = partial(self._before_update, publishing, step, groups)
            with self.timeline.phase("train"):
                prepared, result, metrics = await train_on(self.trainer, self.algorithm, groups, again, step, before, begun)
            fault_injection.reach(ROLE, "apply", step)
            self.step = step = step + 1
            with self.timeline.phase("ledger"):
                self.ledger.end_step(step - 1, incarnation, prepared.metrics | metrics)
            await self._settled()
            await self._reported()  # the step before; this one is reported during the next one, or before a checkpoint
            report = self.observer.trained(step - 1, groups, prepared.samples, result, prepared.metrics | metrics)
            saves = step == self.schedule.steps or self._due(step, self.schedule.checkpoint_every)
            if saves:
                with self.timeline.phase("metrics"):
                    await report  # bounded: its calls have deadlines
                await self._checkpoint(tasks, step)
            publishing = tasks.create_task(self._publish(step, len(groups)))
            with self.timeline.phase("publication"):
                await asyncio.sleep(0)  # the trainer is asked to publish before it is asked for the next gradient
            if not saves:
                self._reporting = tasks.create_task(report)
        await self._reported()
        await self._published(publishing)
        if step > self._saved:  # the run was asked to stop: save what was trained
            await self._checkpoint(tasks, step)
        return step

    async def _settled(self) -> None:
        """In a deterministic run: wait until the present weights have sampled all that is theirs."""
        if self.schedule.deterministic:
            with self.timeline.phase("rollouts"):
                await self.buffer.settled()

    async def _take_device(self, publishing: Publication) -> None:
        """Begin the trainer's turn, once engines have done what must be done before its update."""
        await self._published(publishing)
        await self._settled()
        with self.timeline.phase("publication"):
            await self.turns.trainer()

    async def _before_update(
        self, publishing: Publication, step: int, groups: Sequence[Group], update: Update, result: TrainResult
    ) -> None:
        """Wait for the publication, then verify that engines and trainer agree (I1).

        An update may not touch weights that are still being read, nor follow from rollouts of another policy.
        """
        served = await self._published(publishing)
        with self.timeline.phase("check"):
            for version in served:
                if self.hooks.agree:
                    await self.hooks.agree(version, groups, update.samples, result.logprobs)
                if self.hooks.probe and self._due(step, self.schedule.probe_every):
                    async with self.turns.lent():
                        await self.hooks.probe(version, update.samples, result.logprobs)

    async def _reported(self) -> None:
        if self._reporting:
            with self.timeline.phase("metrics"):
                await self._reporting  # bounded: its calls have deadlines

    async def _published(self, publishing: Publication) -> list[Version]:
        with self.timeline.phase("publication"):
            return await publishing  # bounded: its calls have deadlines

    async def _gather(self, step: int, publishing: Publication) -> tuple[list[Group], Begun] | None:
        """Collect a step's groups, and the gradient of those that the trainer began with.

        Returns None when the run was asked to stop before they were complete. The groups taken so far stay pending then, and
        their gradient, which was never applied, is lost.
        """
        groups, begun, tokens = list[Group](), Begun(), 0
        stream = self.schedule.stream if self.algorithm.by_group else 0
        while left := self.buffer.batch - len(groups):
            with self.timeline.phase("rollouts"):
                group = await self._take(left if stream else 1)
                if group is None:
                    return None
                groups.append(group)
                if stream:
                    tokens += computed_tokens(group)
            if stream and tokens >= stream and left > 1 and not self.buffer.takeable(left - 1):
                part, tokens = groups[len(begun.groups) :], 0
                await self._expect_fresh(step, part, (), publishing)
                with self.timeline.phase("train"):
                    await begun.add(self.trainer, self.algorithm, part, step)
        return groups, begun

    async def _take(self, places: int) -> Group | None:
        """Take one group of a step, or None when the run was asked to stop."""
        if self.buffer.takeable(places):
            return None if self._stopping.is_set() else await self.buffer.take(places)
        taking = asyncio.ensure_future(self.buffer.take(places))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            with waiting("the rollouts", "a step's groups"):
                # bounded: episodes and judging have limits
                await asyncio.wait({taking, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return None if stopping.done() else taking.result()
        finally:
            taking.cancel()
            stopping.cancel()

    async def _publish(self, step: int, trained: int) -> list[Version]:
        """Publish weights `step` of every policy, release the slots of the step that made them, and evaluate if due.

        Policies share the step number: one that had no samples is published, too, so that none of its tokens is older than
        the slots say.
        Evaluation belongs here because it is pinned: the next version is not published before it has ended.
        """
        fault_injection.reach(ROLE, "publish", step)
        served = list[Version]()
        for policy in self.policies:
            version = await self.publisher.publish(Version(step, self.schedule.incarnation, policy))
            self.versions[version.key] = version
            with self.timeline.phase("ledger"):
                self.ledger.publish(version)
            self.observer.published(version)
            served.append(version)
        await self.turns.engines()
        await self.buffer.release(trained)  # groups admitted from here on begin with these weights
        last = step == self.schedule.steps
        if self.hooks.evaluate and (last or self._due(step, self.schedule.eval_every)):
            results = await self.hooks.evaluate(served[0])
            self.ledger.evaluation(step, results)
            self.observer.evaluated(step, results)
        return served

    async def _checkpoint(self, tasks: asyncio.TaskGroup, step: int) -> None:
        """Begin a checkpoint: only the copy of the state is awaited.

        A write that fails ends the run at once. The end of the run waits for the last write.
        """
        self._saved = step
        fault_injection.reach(ROLE, "checkpoint", step)
        if self.hooks.checkpoint:
            await self._written()
            with self.timeline.phase("checkpoint"):
                write = await self.hooks.checkpoint(step, self.buffer.next_id)
            self._saving = tasks.create_task(write, name=f"checkpoint of step {step}")

    async def _written(self) -> None:
        """Wait for the latest checkpoint to be written."""
        if self._saving:
            with self.timeline.phase("checkpoint"), waiting("the disk", self._saving.get_name()):
                await asyncio.wait({self._saving})  # bounded: its call of the trainer has a deadline

    def _due(self, step: int, every: int) -> bool:
        return every > 0 and step % every == 0

    async def _expect_fresh(
        self, step: int, groups: Sequence[Group], again: Sequence[Group], publishing: Publication
    ) -> None:
        with self.timeline.phase("freshness"):
            known = self._known(groups)
        if not known:  # one engine already serves the new version, another has not committed it yet
            await self._published(publishing)
        with self.timeline.phase("freshness"):
            self._check(step, groups, again)

    def _known(self, groups: Sequence[Group]) -> bool:
        return all(self.versions.get(source.key) == source for group in groups for source in group.sources)

    def _check(self, step: int, groups: Sequence[Group], again: Sequence[Group]) -> None:
        """Verify I1 and I2 at the last moment before a gradient.

        Neither applies to offline replies, which no policy sampled. I2 does not apply to replayed groups.
        """
        for group in (*groups, *again):
            if not self._known([group]):
                raise PolicyMismatch(f"group {group.id} holds tokens of a policy which this run never published")
        for group in groups:
            if group.oldest is not None and step - group.oldest > self.buffer.max_lag:
                raise AssertionError(f"group {group.id} is {step - group.oldest} versions old at step {step}: bound broken")


def first_cause(failures: BaseExceptionGroup) -> BaseException:
    """The first exception that is not a mere cancellation: the one that the user should read."""
    for failure in failures.exceptions:
        if isinstance(failure, BaseExceptionGroup):
            return first_cause(failure)
        return failure
    raise AssertionError("an exception group is never empty")
