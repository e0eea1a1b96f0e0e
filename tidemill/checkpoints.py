"""`checkpoints/step-000123/`: a moment of a run from which it can go on, published by rename.

    trainer/    weights, optimizer, schedule, RNG (written by the trainer itself)
    run.json    steps done, incarnation, next admission id: with the ledger, all there is to know about the data position

Rollouts need no RNG state: every seed derives from the run's seed and an admission id.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from tidemill.durable import write_json
from tidemill.protocols import Trainer
from tidemill.run_folder import read_json

MARKER = "run.json"


@dataclass(frozen=True, slots=True)
class Position:
    step: int  # steps done: the weights are version `step`
    incarnation: int
    next_id: int  # admission id


class Checkpoints:
    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep

    async def save(self, trainer: Trainer, position: Position) -> None:
        name = f"step-{position.step:06d}"
        beside = self._folder / f"{name}.partial"
        for cut_off in self._folder.glob("step-*.partial"):  # by a kill; nothing reads them
            shutil.rmtree(cut_off)
        beside.mkdir(parents=True)
        await trainer.save(str(beside / "trainer"))
        write_json(beside / MARKER, asdict(position))
        final = self._folder / name
        if final.exists():
            shutil.rmtree(final)  # the same step of an earlier incarnation
        os.rename(beside, final)
        for old in self.all()[: -self._keep]:
            shutil.rmtree(old)

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first. A folder without our marker is none of ours and is never touched."""
        return sorted(p for p in self._folder.glob("step-*") if p.suffix != ".partial" and (p / MARKER).is_file())

    def latest(self) -> tuple[Path, Position] | None:
        found = self.all()
        return (found[-1], Position(**read_json(found[-1] / MARKER))) if found else None
