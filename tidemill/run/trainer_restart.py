"""Restart of a lost trainer alone: engines keep their processes, their KV and what is in flight.

    lost -> restart budget -> a new process -> the newest checkpoint -> recorded steps, trained again -> the steps done

Nothing is published on the way, so no engine steps back. In a deterministic run the weights of each step must have the
fingerprint that they had. If recorded trajectories cannot be read, steps have to be undone: then the whole run starts again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tidemill.controller.policy_pools import Pool
from tidemill.core.errors import LedgerError, PeerLost, StartFailed
from tidemill.core.interfaces import Algorithm, Trainer
from tidemill.core.types import Version
from tidemill.ledger.ledger import SqliteLedger
from tidemill.run.replaceable_trainer import ReplaceableTrainer
from tidemill.run.resume import ResumePoint, load_newest, train_again
from tidemill.run.storage.checkpoints import Checkpoints


@dataclass(slots=True)
class TrainerRestart:
    """The controller's hook `restart`."""

    process: ReplaceableTrainer
    trainer: Trainer  # that process, with a reference that engines serve
    pool: Pool
    ledger: SqliteLedger
    checkpoints: Checkpoints
    algorithm: Algorithm
    point: ResumePoint  # where this process began; its incarnation is kept up to date
    exact: bool  # steps are repeated to the last bit, so their incarnation stays
    spend: Callable[[Exception], Awaitable[None]]  # waits as the restart budget says, or raises RunFailed
    note: Callable[[str], None]
    policies: Sequence[str] = ("policy",)  # that are trained

    async def __call__(self, lost: PeerLost, done: int) -> tuple[int, int]:
        """Start a trainer with the weights of the `done` steps. Returns their incarnation, and the checkpoint's step.

        Raises RunFailed when the restart budget is spent, and `lost` when the whole run has to start again.
        """
        cause: Exception = lost
        while True:
            await self.spend(cause)
            try:
                await self.process.replace()
                saved = (await load_newest(self.ledger, self.checkpoints, self.trainer)).step
                if why := self._unreadable(saved, done):
                    break
                return await self._train_again(saved, done), saved
            except (PeerLost, StartFailed, TimeoutError) as error:
                cause = error
        self.note(f"{why}; so all processes start again")
        raise lost

    def _unreadable(self, first: int, done: int) -> str:
        """The reason why the steps since the checkpoint cannot be trained again; "" if they can."""
        lost = self.ledger.unreadable(each for step in range(first, done) for each in self.ledger.groups_of(step))
        return next((f"group {group_id} cannot be read ({reason})" for group_id, reason in lost.items()), "")

    async def _train_again(self, first: int, done: int) -> int:
        point = self.point
        if first < self.ledger.next_step() and not self.exact:  # a replay need not be bit-identical: its versions are others
            point.incarnation = max(point.incarnation, self.ledger.incarnation()) + 1
        if first < done:
            self.note(f"training {done - first} recorded steps again (from step {first}); engines serve what they have")
        await train_again(
            range(first, done), point.incarnation, self.ledger, self.trainer, self.algorithm, self._expect_repeated
        )
        return point.incarnation

    async def _expect_repeated(self, step: int, incarnation: int) -> None:
        """Raise LedgerError if a deterministic run did not come to the weights that it had at this step."""
        known = {each.key: each for each in self.ledger.versions()} if self.exact else {}
        for version in [Version(step, incarnation, policy) for policy in self.policies]:
            if (recorded := known.get(version.key)) is not None:
                await self._expect(recorded, version)

    async def _expect(self, recorded: Version, version: Version) -> None:
        update = await self.trainer.publish(version)
        if update.version != recorded:
            raise LedgerError(
                f"{update.version.exact} was trained again, and is not {recorded.exact}: deterministic = true, and the "
                "trainer does not repeat itself; are its machine, library versions and number of threads the same?"
            )
        if recorded in self.pool.in_force:  # what it is to sample may need an engine that has just been started
            self.pool.restore(update)
