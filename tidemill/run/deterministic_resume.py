"""Resume of a deterministic run: repeats the recorded steps to the last bit.

From its newest checkpoint the same loop runs again. What the ledger holds is compared with what happens, and its
trajectories are taken; a difference is an error. The version that samples a group follows from the group alone, because a
version is published only after everything that the one before it is to sample has been recorded (`Buffer.settled`).

An unreadable group is sampled again by the version that sampled it, with the same bits, which is checked. For a group from
before the checkpoint that version is gone: then the run resumes like any other (`resume`), and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tidemill.core.errors import LedgerError, PayloadLost
from tidemill.core.interfaces import Roller, Trainer
from tidemill.core.types import Group, Task
from tidemill.ledger.ledger import SqliteLedger
from tidemill.run.resume import ResumePoint, load_newest
from tidemill.run.storage.checkpoints import Checkpoints


async def take_up_exactly(
    ledger: SqliteLedger, checkpoints: Checkpoints, trainer: Trainer, note: Callable[[str], None]
) -> ResumePoint | None:
    """Bring the trainer to the newest checkpoint, and return where the run stands.

    Returns None, noted and recorded, if the steps since cannot be repeated to the last bit. Raises as `load_newest`.
    """
    begun, position = ledger.next_step(), await load_newest(ledger, checkpoints, trainer)
    # a power cut may have taken the last admissions: they are repeated, and sampled from the version to come, as then
    step, next_id = position.step, min(position.next_id, ledger.next_group_id())
    incarnation = position.incarnation
    if why := _unrepeatable(ledger, step, next_id, incarnation):
        ledger.event("not_repeated", {"reason": why})
        note(
            f"deterministic = true, but {why}: what was recorded since step {step} is trained again instead of repeated, so "
            "the weights are not, to the last bit, those of a run that nothing disturbed"
        )
        return None
    if step < begun:
        note(f"doing {begun - step} recorded steps again (from step {step}), to the last bit; nothing is sampled for them")
    # Groups in flight exist only at a checkpoint that a stop asked for. They belong to the version to be published next.
    left = [
        ledger.load(group_id) if ledger.has_finished(group_id) else (group_id, ledger.task_of(group_id))
        for group_id in ledger.waiting_at(step, next_id)
    ]
    known = {version.key: version for version in ledger.versions() if version.step <= step}  # of the only policy
    return ResumePoint(step, incarnation, next_id, left, known, saved=step)


def _unrepeatable(ledger: SqliteLedger, step: int, next_id: int, incarnation: int) -> str:
    """The reason why the steps since the checkpoint cannot be repeated; "" if they can."""
    if incarnation != ledger.incarnation():
        return "steps since the checkpoint were trained again before"
    waited = ledger.waiting_at(step, next_id)
    lost = ledger.unreadable(group_id for group_id in waited if ledger.has_finished(group_id))
    taken = {event.detail["group"]: event.detail["reason"] for event in ledger.events("payload_lost")}
    lost |= {each: taken[each] for each in waited if each in taken and not ledger.has_finished(each)}
    again = {group_id for later in range(step, ledger.next_step()) for group_id in ledger.trained_again(later)}
    lost |= ledger.unreadable(group_id for group_id in sorted(again) if group_id < next_id)
    differs = {event.detail["group"] for event in ledger.events("sampled_otherwise")}
    if lost or (lost := ledger.unreadable(each for each in sorted(differs) if ledger.has_finished(each))):
        group_id, reason = next(iter(lost.items()))
        return f"group {group_id} cannot be read and cannot be sampled again as it was ({reason})"
    return ""


class Recorded:
    """`interfaces.Ledger` and `interfaces.Roller` over a ledger that already holds the beginning."""

    def __init__(self, ledger: SqliteLedger, roller: Roller) -> None:
        self._ledger, self._roller = ledger, roller
        self._admitted = ledger.next_group_id()
        self._begun = ledger.next_step()

    async def rollout(self, group_id: int, task: Task) -> Group:
        if group_id < self._admitted and self._ledger.has_payload(group_id):
            try:
                return self._ledger.load(group_id)
            except PayloadLost as error:
                return await self._sampled_again(group_id, task, str(error))
        return await self._roller.rollout(group_id, task)

    async def _sampled_again(self, group_id: int, task: Task, reason: str) -> Group:
        group = await self._roller.rollout(group_id, task)
        if not self._ledger.record_again(group):
            self._ledger.event("sampled_otherwise", {"group": group_id})  # the next start does not try this again
            raise _differs(f"group {group_id} cannot be read ({reason}), and sampled again it is another")
        self._ledger.event("payload_made_again", {"group": group_id, "reason": reason})
        return group

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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)  # which refuses a fingerprint that differs from the recorded one


def _differs(what: str) -> LedgerError:
    return LedgerError(
        f"{what}: the run does not repeat itself; is a reward, an environment or the task data not deterministic?"
    )
