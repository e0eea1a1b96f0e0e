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
When the trainer is lost, what belongs to it ends: its calls, a publication, a checkpoint, a gradient. Rollouts go on, and no
slot is released, until a new trainer has the weights of the steps done and these are published. The groups that were taken
for the next step stay its groups.
This module knows protocols only: no torch, no engine, no process. Tests run it under virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tidemill.controller.admission_buffer import Buffer
from tidemill.controller.circuit_breaker import Gate
from tidemill.controller.device_turns import DeviceTurns
from tidemill.controller.dropped_groups import Drops
from tidemill.controller.first_cause import first_cause, trainer_loss
from tidemill.controller.freshness import check_fresh, known
from tidemill.controller.schedule import Hooks, Observer, Schedule
from tidemill.controller.train_step import Begun, computed_tokens, train_on
from tidemill.core import fault_injection
from tidemill.core.attempt_checks import check_attempts
from tidemill.core.errors import PeerLost, RunFailed
from tidemill.core.interfaces import Algorithm, Ledger, Publisher, Roller, Trainer
from tidemill.core.policy_version import PolicyKey
from tidemill.core.types import Group, Task, TrainResult, Update, Version
from tidemill.observability.stall_report import waiting
from tidemill.observability.timeline import Timeline

ROLE = "controller"  # this process's role in fault injection
Publication = asyncio.Task[list[Version]]  # of one step: a version of each policy
PATIENCE_S = 3.0  # wait for the last checkpoint before the user is told of it


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
    policies: Sequence[str] = ("policy",)  # that are trained
    versions: dict[PolicyKey, Version] = field(default_factory=dict)  # those that were published
    learn: Callable[[Group], None] = lambda group: None  # called with each recorded group; `task_at` may depend on it
    again: Callable[[int], Sequence[Group]] = lambda step: ()  # groups of earlier steps that a step trains once more
    turns: DeviceTurns = field(default_factory=DeviceTurns)  # on the device, if trainer and engines share one
    timeline: Timeline = field(default_factory=Timeline)  # what the loop does when, for the time breakdown
    step: int = 0  # steps done
    incarnation: int = 0  # of the steps trained from here on
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _drops: Drops = field(default_factory=Drops)  # since the latest group that was kept
    _workers: list[asyncio.Task[None]] = field(default_factory=list)  # the rollouts
    _taken: list[Group] = field(default_factory=list)  # for the next step
    _again: Sequence[Group] | None = None  # that it trains once more; None: the ledger does not have it yet
    _owed: int = 0  # slots of the latest step, until its weights are published
    _evaluated: int = -1  # the latest version that was
    _saved: int = 0  # step of the latest checkpoint
    _saving: asyncio.Task[None] | None = None
    _report: Coroutine[Any, Any, None] | None = None  # of the latest step, not begun
    _reporting: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Ask the run to end after the step it is in."""
        self._stopping.set()

    async def run(self) -> int:
        """Train until the schedule's end or `stop()`. Returns the number of steps done.

        Any failure cancels the rest, and the first cause is raised.
        """
        self.step, self._saved, self.incarnation = self.schedule.first, self.schedule.saved, self.schedule.incarnation
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    try:
                        async with asyncio.TaskGroup() as own:  # what ends with the present trainer
                            await self._live(tasks, own)
                        break
                    except BaseExceptionGroup as failures:
                        lost = await trainer_loss(failures, self.hooks.ends)
                    await self._restart(lost)
        except BaseExceptionGroup as failures:
            raise first_cause(failures) from failures
        finally:
            if self._report is not None:
                self._report.close()
        return self.step

    async def _live(self, tasks: asyncio.TaskGroup, own: asyncio.TaskGroup) -> None:
        """Publish the weights of the steps done, and train the others.

        tasks: those of the run. own: those that end with the present trainer.
        """
        watching = own.create_task(self.hooks.ends()) if self.hooks.ends else None
        if self._owed:
            await self._settled()
        self._begin_report(tasks)
        publishing = own.create_task(self._publish(self.step))
        if not self._workers:  # nothing is sampled before the engines serve what this run published
            with self.timeline.phase("publication"):
                await asyncio.wait({publishing})  # bounded: its calls have deadlines
            works = [*(self._rollout_forever() for _ in range(self.buffer.slots)), *map(self._restore, self.restored)]
            self._workers += [tasks.create_task(work, name=f"rollout-{i}") for i, work in enumerate(works)]
        await self._train(tasks, own, publishing)
        for worker in self._workers:
            worker.cancel()
        said = asyncio.get_running_loop().call_later(PATIENCE_S, self.observer.saving, self.step)
        try:
            await self._written()
        finally:
            said.cancel()
        if watching:
            watching.cancel()

    async def _restart(self, lost: PeerLost) -> None:
        """Wait for a new trainer with the weights of the steps done. Meanwhile rollouts go on as far as there are slots."""
        if self.hooks.restart is None:
            raise lost
        for served in self.publisher.withdraw():
            if served.key not in self.versions:  # some engines may have committed it, and sample from it
                self.versions[served.key] = served
                self.ledger.publish(served)
        with self.timeline.phase("restart"), waiting("the trainer", "its restart"):
            await self.turns.of_new_trainer()
            self.incarnation, self._saved = await self.hooks.restart(lost, self.step)
        self._saving = None

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

    async def _train(self, tasks: asyncio.TaskGroup, own: asyncio.TaskGroup, publishing: Publication) -> None:
        if self.step > self._saved:  # these steps were trained again: save them, so that it need not be done once more
            await self._checkpoint(own, self.step)
        while self.step < self.schedule.steps:
            gathered = await self._gather(self.step, publishing)
            if gathered is None:
                break
            if self.turns.taken:
                await self._take_device(publishing)
            await self._train_step(*gathered, publishing)
            await self._settled()
            await self._reported()  # the step before; this one is reported during the next one, or before a checkpoint
            if self.step == self.schedule.steps or self._due(self.step, self.schedule.checkpoint_every):
                self._begin_report(tasks)
                await self._reported()
                await self._checkpoint(own, self.step)
            publishing = own.create_task(self._publish(self.step))
            with self.timeline.phase("publication"):
                await asyncio.sleep(0)  # the trainer is asked to publish before it is asked for the next gradient
            self._begin_report(tasks)
        await self._reported()
        await self._published(publishing)
        if self.step > self._saved:  # the run was asked to stop: save what was trained
            await self._checkpoint(own, self.step)

    async def _train_step(self, groups: list[Group], begun: Begun, publishing: Publication) -> None:
        """Record the next step, train it, and record its end."""
        step = self.step
        again = await self._begin(step, groups, begun, publishing)
        fault_injection.reach(ROLE, "train", step)
        before = partial(self._before_update, publishing, step, groups)
        with self.timeline.phase("train"):
            prepared, result, metrics = await train_on(self.trainer, self.algorithm, groups, again, step, before, begun)
        fault_injection.reach(ROLE, "apply", step)
        metrics = prepared.metrics | metrics
        self.step, self._owed, self._taken, self._again = step + 1, len(groups), [], None
        with self.timeline.phase("ledger"):
            self.ledger.end_step(step, self.incarnation, metrics)
        self._report = self.observer.trained(step, groups, prepared.samples, result, metrics)

    async def _begin(self, step: int, groups: list[Group], begun: Begun, publishing: Publication) -> Sequence[Group]:
        """Record the groups of a step. Returns those that it trains once more."""
        if self._again is not None:  # an earlier trainer had begun it, and is lost
            with self.timeline.phase("ledger"):
                self.ledger.replay_step(step, self.incarnation)
            return self._again
        with self.timeline.phase("ledger"):
            again = self.again(step)
        await self._expect_fresh(step, groups[len(begun.groups) :], again, publishing)
        with self.timeline.phase("ledger"):
            self.ledger.begin_step(step, self.incarnation, [g.id for g in groups], [g.id for g in again])
        self._again = again
        return again

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

    def _begin_report(self, tasks: asyncio.TaskGroup) -> None:
        """Have the observer told of the latest step. A lost trainer does not end this."""
        if self._report is not None:
            self._reporting, self._report = tasks.create_task(self._report), None

    async def _reported(self) -> None:
        if self._reporting:
            with self.timeline.phase("metrics"):
                await asyncio.wait({self._reporting})  # bounded: its calls have deadlines

    async def _published(self, publishing: Publication) -> list[Version]:
        with self.timeline.phase("publication"):
            return await publishing  # bounded: its calls have deadlines

    async def _gather(self, step: int, publishing: Publication) -> tuple[list[Group], Begun] | None:
        """Collect a step's groups, and the gradient of those that the trainer began with.

        Returns None when the run was asked to stop before they were complete. The groups taken so far stay pending then, and
        their gradient, which was never applied, is lost.
        """
        groups, begun = self._taken, Begun()
        stream = self.schedule.stream if self.algorithm.by_group else 0
        tokens = sum(map(computed_tokens, groups)) if stream else 0
        while left := self.buffer.batch - len(groups):
            with self.timeline.phase("rollouts"):
                if not await self._take(left if stream else 1):
                    return None
                if stream:
                    tokens += computed_tokens(groups[-1])
            if stream and tokens >= stream and left > 1 and not self.buffer.takeable(left - 1):
                part, tokens = groups[len(begun.groups) :], 0
                await self._expect_fresh(step, part, (), publishing)
                with self.timeline.phase("train"):
                    await begun.add(self.trainer, self.algorithm, part, step)
        return groups, begun

    async def _take(self, places: int) -> bool:
        """Take one more group of the next step; False when the run was asked to stop."""
        if self._stopping.is_set():
            return False
        taking = asyncio.ensure_future(self._take_next(places))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            with waiting("the rollouts", "a step's groups"):
                # bounded: episodes and judging have limits
                await asyncio.wait({taking, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return not stopping.done()
        finally:
            taking.cancel()
            stopping.cancel()

    async def _take_next(self, places: int) -> None:
        self._taken.append(await self.buffer.take(places))  # at once: the loss of the trainer cannot come in between

    async def _publish(self, step: int) -> list[Version]:
        """Publish weights `step` of every policy, release the slots of the step that made them, and evaluate if due.

        Policies share the step number: one that had no samples is published, too, so that none of its tokens is older than
        the slots say.
        Evaluation belongs here because it is pinned: the next version is not published before it has ended.
        """
        fault_injection.reach(ROLE, "publish", step)
        served = list[Version]()
        for policy in self.policies:
            version = await self.publisher.publish(Version(step, self.incarnation, policy))
            self.versions[version.key] = version
            with self.timeline.phase("ledger"):
                self.ledger.publish(version)
            self.observer.published(version)
            served.append(version)
        await self.turns.engines()
        await self.hooks.served(served)
        await self.buffer.release(self._owed)  # groups admitted from here on begin with these weights
        self._owed = 0
        due = step == self.schedule.steps or self._due(step, self.schedule.eval_every)
        if self.hooks.evaluate and due and self._evaluated < step:
            results = await self.hooks.evaluate(served)
            self._evaluated = step
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
                async with self.turns.borrowed():
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
            are_known = known(self.versions, groups)
        if not are_known:  # one engine already serves the new version, another has not committed it yet
            await self._published(publishing)
        with self.timeline.phase("freshness"):
            check_fresh(self.versions, step, groups, again, self.buffer.max_lag)
