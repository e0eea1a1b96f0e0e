"""Where a run stands and how it goes on: newest checkpoint, steps begun after it, what was admitted and is undecided.

Steps that are in the ledger but in no checkpoint are trained again from the recorded trajectories, under a new incarnation;
nothing is sampled for them. Finished groups without a fate are used as they are; those in flight are sampled again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tidemill.checkpoints import Checkpoints
from tidemill.errors import ConfigError
from tidemill.gradient import Algorithm, train_on
from tidemill.ledger.ledger import SqliteLedger
from tidemill.protocols import Trainer
from tidemill.types import Group, Task, Version


@dataclass(slots=True)
class Standing:
    """What the controller needs to go on. A new run stands at the beginning."""

    step: int = 0
    incarnation: int = 0
    next_id: int = 0
    left: list[Group | tuple[int, Task]] = field(default_factory=list)  # admitted without a fate, in order
    versions: dict[tuple[int, int], Version] = field(default_factory=dict)
    saved: int = 0  # step of the checkpoint that was taken up; 0: there was none

    @property
    def live(self) -> list[int]:
        return [each.id if isinstance(each, Group) else each[0] for each in self.left]


async def take_up(
    ledger: SqliteLedger,
    checkpoints: Checkpoints,
    trainer: Trainer,
    algorithm: Algorithm,
    note: Callable[[str], None],
    reached: Callable[[Version], Awaitable[None]],
) -> Standing:
    """Bring the trainer to where the ledger says the run was, and say where that is. `reached` is awaited with each version
    on the way, while the trainer has its weights."""
    last, latest = ledger.last_step(), await checkpoints.newest()
    begun = 0 if last is None else last + 1
    first = 0
    if latest is not None:
        folder, position = latest
        if position.step > begun:
            raise ConfigError(
                f"{folder} is of step {position.step}, but the ledger knows {begun} steps: it is of another run"
            )
        await trainer.load(str(folder / "trainer"))
        first = position.step
    incarnation = ledger.incarnation()
    if first < begun:
        incarnation += 1  # a replay need not be bit-identical, so its versions are others
        note(f"training {begun - first} recorded steps again (from step {first}); nothing is sampled for them")
        for step in range(first, begun):
            await reached(Version(step, incarnation))
            await _train_again(step, incarnation, ledger, trainer, algorithm)
    left = [ledger.load(p.id) if p.finished else (p.id, p.task) for p in ledger.pending()]
    known = {(v.incarnation, v.step): v for v in ledger.versions()}
    return Standing(begun, incarnation, ledger.next_group_id(), left, known, saved=first)


async def _train_again(step: int, incarnation: int, ledger: SqliteLedger, trainer: Trainer, algorithm: Algorithm) -> None:
    fresh, again = ([ledger.load(group_id) for group_id in ids] for ids in ledger.replay_step(step, incarnation))
    prepared, _, metrics = await train_on(trainer, algorithm, fresh, again, step)
    ledger.end_step(step, incarnation, prepared.metrics | metrics)
