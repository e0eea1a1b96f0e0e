"""Resume of a run from its newest checkpoint and its ledger.

Steps that are in the ledger but in no checkpoint are trained again from the recorded trajectories, under a new incarnation.
Finished groups without a fate are used as they are; those in flight are sampled again. From a step on of which a trajectory
cannot be read, steps are undone in the ledger, because no weights hold them, and sampled anew.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tidemill.controller.train_step import train_on
from tidemill.core.errors import ConfigError
from tidemill.core.interfaces import Algorithm, Trainer
from tidemill.core.policy_version import PolicyKey
from tidemill.core.types import Group, Task, Version
from tidemill.ledger.database import lost_log
from tidemill.ledger.ledger import SqliteLedger
from tidemill.run.storage.checkpoint_manifest import Position
from tidemill.run.storage.checkpoints import Checkpoints

Reached = Callable[[int, int], Awaitable[None]]
"""Called with a step and its incarnation, while the trainer has the weights before that step."""


@dataclass(slots=True)
class ResumePoint:
    """The state from which the controller starts. A new run stands at the beginning."""

    step: int = 0
    incarnation: int = 0
    next_id: int = 0
    left: list[Group | tuple[int, Task]] = field(default_factory=list)  # admitted without a fate, in order
    versions: dict[PolicyKey, Version] = field(default_factory=dict)
    saved: int = 0  # step of the loaded checkpoint; 0: there was none

    @property
    def live(self) -> list[int]:
        """The ids of the groups that were admitted and have no fate."""
        return [each.id if isinstance(each, Group) else each[0] for each in self.left]


async def take_up(
    ledger: SqliteLedger,
    checkpoints: Checkpoints,
    trainer: Trainer,
    algorithm: Algorithm,
    note: Callable[[str], None],
    reached: Reached,
    policies: Sequence[str] = ("policy",),
) -> ResumePoint:
    """Bring the trainer to where the ledger says the run was, and return where that is.

    reached: awaited with each step on the way, while the trainer has its weights. policies: that are trained.
    """
    first = (await load_newest(ledger, checkpoints, trainer)).step
    begun = _undo_unreadable(ledger, first, ledger.next_step(), note)
    incarnation = ledger.incarnation()
    if first < begun:
        incarnation += 1  # a replay need not be bit-identical, so its versions are others
        note(f"training {begun - first} recorded steps again (from step {first}); nothing is sampled for them")
        await train_again(range(first, begun), incarnation, ledger, trainer, algorithm, reached)
    known = published(ledger, policies)
    return ResumePoint(begun, incarnation, ledger.next_group_id(), _left(ledger, known), known, saved=first)


def published(ledger: SqliteLedger, policies: Sequence[str]) -> dict[PolicyKey, Version]:
    """The recorded versions of the trained policies. Those of frozen ones are recorded, too, and sample nothing to train."""
    return {version.key: version for version in ledger.versions() if version.policy in policies}


async def load_newest(ledger: SqliteLedger, checkpoints: Checkpoints, trainer: Trainer) -> Position:
    """Load the newest checkpoint. Raises ConfigError if it is of an unknown step."""
    if (latest := await checkpoints.newest()) is None:
        return Position(0, 0, 0)
    (folder, position), begun = latest, ledger.next_step()
    if position.step > begun:
        why = lost_log(begun, f"{folder} is a checkpoint of step {position.step}")
        raise ConfigError(
            f"{why}, or this is the checkpoint of another run; put the newer ledger.sqlite and ledger.sqlite-wal back, or "
            "give another run_dir"
        )
    await trainer.load(str(folder / "trainer"))
    return position


async def train_again(
    steps: Iterable[int],
    incarnation: int,
    ledger: SqliteLedger,
    trainer: Trainer,
    algorithm: Algorithm,
    reached: Reached,
) -> None:
    """Train recorded steps once more, as this incarnation. `reached` is awaited with (step, incarnation) before each."""
    for step in steps:
        await reached(step, incarnation)
        lost = ledger.unreadable(ledger.trained_again(step))  # their gradients were applied when they were trained first
        fresh, again = ([ledger.load(group_id) for group_id in ids] for ids in ledger.replay_step(step, incarnation, lost))
        prepared, _, metrics = await train_on(trainer, algorithm, fresh, again, step)
        ledger.end_step(step, incarnation, prepared.metrics | metrics)


def _undo_unreadable(ledger: SqliteLedger, first: int, begun: int, note: Callable[[str], None]) -> int:
    """Undo the steps from the first unreadable one on, and return the next step."""
    lost = {step: found for step in range(first, begun) if (found := ledger.unreadable(ledger.groups_of(step)))}
    if not lost:
        return begun
    undone = ledger.undo_steps(min(lost), {group_id for found in lost.values() for group_id in found})
    count, reason = undone.unreadable, next(iter(lost[min(lost)].values()))
    steps = ", ".join(str(step + 1) for step in lost)
    several = undone.last > undone.first
    which = f"steps {undone.first + 1} to {undone.last + 1} are" if several else f"step {undone.last + 1} is"
    note(
        f"{count} group{'s' if count > 1 else ''} of step{'s' if len(lost) > 1 else ''} {steps} cannot be read ({reason}): "
        f"{which} undone and sampled anew; dropped as unreadable: {count}, with them as undone: {undone.others}"
    )
    return undone.first


def _left(ledger: SqliteLedger, known: Mapping[PolicyKey, Version]) -> list[Group | tuple[int, Task]]:
    """The groups that were admitted and have no fate, loaded if they had finished.

    A finished group is sampled again if a kill kept the publication of the weights that sampled it from being recorded.
    """
    left: list[Group | tuple[int, Task]] = []
    for each in ledger.pending():
        group = ledger.load(each.id) if each.finished else None
        if group and (strangers := [source for source in group.sources if known.get(source.key) != source]):
            ledger.renounce(each.id, f"it was sampled by {strangers[0]}, whose publication was not recorded")
            group = None
        left.append(group or (each.id, each.task))
    return left
