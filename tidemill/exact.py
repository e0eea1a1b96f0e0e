"""A deterministic run goes on by doing again, from its newest checkpoint, what the ledger says was done, to the last bit.

    admit, roll out, drop, begin a step: recorded already -> held against the record, its trajectories taken from it
                                         not recorded yet -> done, and recorded

So one loop serves the first attempt and every later one. What differs from the record is an error: the run was not
deterministic after all. Which version samples a group follows from the group alone, because a version is published only
after everything that the one before it is to sample has been recorded (`Buffer.settled`); a checkpoint is taken then, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidemill.checkpoints import Checkpoints
from tidemill.ledger.ledger import SqliteLedger
from tidemill.ledger.records import LedgerError
from tidemill.protocols import Roller, Trainer
from tidemill.resume import Standing
from tidemill.types import Group, Metrics, Task, Version


async def take_up_exactly(
    ledger: SqliteLedger, checkpoints: Checkpoints, trainer: Trainer, note: Callable[[str], None]
) -> Standing:
    """Bring the trainer to the newest checkpoint, and say what had been admitted by then without being trained on."""
    begun, latest = ledger.next_step(), await checkpoints.newest()
    if latest is None:
        step = next_id = 0
    else:
        folder, position = latest
        await trainer.load(str(folder / "trainer"))
        # a power cut may have taken the last admissions: they are repeated, and sampled from the version to come, as then
        step, next_id = position.step, min(position.next_id, ledger.next_group_id())
    if step < begun:
        note(f"doing {begun - step} recorded steps again (from step {step}), to the last bit; nothing is sampled for them")
    # In flight are, if any, groups of the version to be published next: those of a checkpoint that a stop asked for.
    left = [
        ledger.load(group_id) if ledger.has_finished(group_id) else (group_id, ledger.task_of(group_id))
        for group_id in ledger.waiting_at(step, next_id)
    ]
    known = {(v.incarnation, v.step): v for v in ledger.versions() if v.step <= step}
    return Standing(step, 0, next_id, left, known, saved=step)


class Recorded:
    """`protocols.Ledger` and `protocols.Roller` over a ledger in which the beginning is written already."""

    def __init__(self, ledger: SqliteLedger, roller: Roller) -> None:
        self._ledger, self._roller = ledger, roller
        self._admitted = ledger.next_group_id()
        self._begun = ledger.next_step()

    async def rollout(self, group_id: int, task: Task) -> Group:
        if group_id < self._admitted and self._ledger.has_payload(group_id):
            return self._ledger.load(group_id)
        return await self._roller.rollout(group_id, task)

    def admit(self, group_id: int, task: Task) -> None:
        if group_id >= self._admitted:
            self._ledger.admit(group_id, task)
        elif (recorded := self._ledger.task_of(group_id)) != task:
            raise _differs(f"group {group_id} is of task {recorded.id}, not {task.id}")

    def finish(self, group: Group) -> None:
        if group.id >= self._admitted or not self._ledger.has_finished(group.id):
            self._ledger.finish(group)

    def drop(self, group_id: int, reason: str) -> None:
        recorded = self._ledger.fate(group_id) if group_id < self._admitted else None
        if recorded is None:
            self._ledger.drop(group_id, reason)
        elif recorded != f"dropped: {reason}":
            raise _differs(f"group {group_id} was {recorded}, and is now to be dropped: {reason}")

    def begin_step(self, step: int, incarnation: int, group_ids: Sequence[int], again: Sequence[int] = ()) -> None:
        if step >= self._begun:
            self._ledger.begin_step(step, incarnation, group_ids, again)
        elif (recorded := self._ledger.replay_step(step, incarnation)) != (now := (list(group_ids), list(again))):
            raise _differs(f"step {step} was of groups {recorded}, and is now of {now}")

    def end_step(self, step: int, incarnation: int, metrics: Metrics) -> None:
        self._ledger.end_step(step, incarnation, metrics)

    def publish(self, version: Version) -> None:
        self._ledger.publish(version)  # which refuses another fingerprint than before

    def evaluation(self, step: int, results: Metrics) -> None:
        self._ledger.evaluation(step, results)

    def event(self, kind: str, detail: dict) -> None:
        self._ledger.event(kind, detail)


def _differs(what: str) -> LedgerError:
    return LedgerError(
        f"{what}: the run does not repeat itself; is a reward, an environment or the task data not deterministic?"
    )
