"""Checkpoints: states of a run to resume from, in `checkpoints/step-000123/`.

    begin: the trainer copies its state, beside the next step's gradient -> training goes on; beside it:
    step-000123.partial/tidemill.checkpoint -> trainer/ -> manifest.json -> all of it flushed -> renamed to step-000123

A checkpoint is {weights, optimizer, schedule, trainer's random states} in trainer/, and a position in the manifest: with the
ledger, the whole data position. Every other seed derives from the run's seed and an admission id. A folder without the
marker `tidemill.checkpoint` is never touched. A damaged checkpoint is set aside, not deleted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from tidemill.controller.controller import ROLE
from tidemill.core import fault_injection
from tidemill.core.atomic_files import flush, remove_left, remove_marked
from tidemill.core.errors import CheckpointError
from tidemill.core.executors import in_thread
from tidemill.core.interfaces import Trainer
from tidemill.ledger.ledger import SqliteLedger
from tidemill.run.storage.checkpoint_manifest import (
    MANIFEST,
    Position,
    name_of,
    read_manifest,
    seal,
    step_of,
    strangers,
    verify,
)

T = TypeVar("T")
MARKER = "tidemill.checkpoint"
_MARKED = "A checkpoint of a Tidemill run. Tidemill deletes this folder when record.checkpoints and keep_every say so.\n"
_PARTIAL, _DAMAGED = ".partial", ".damaged"


class Checkpoints:
    """The checkpoints of one run: written, verified, and deleted when they are too many."""

    def __init__(
        self,
        folder: Path,
        ledger: SqliteLedger | None,
        note: Callable[[str], None],
        keep: int = 1,
        keep_every: int = 0,
        replays: int = 0,
    ) -> None:
        """Manage the checkpoints in `folder`.

        ledger: records them; None: they are in no run's record. keep: how many are kept. keep_every: those of every such
        step are kept for good, too; 0: none. replays: how many steps back a step may replay groups, which a resume needs,
        too.
        """
        self.folder, self._ledger, self._note = folder, ledger, note
        self._keep, self._keep_every, self._replays = keep, keep_every, replays
        self._told: set[str] = set()
        self._stopped = threading.Event()

    async def begin(self, trainer: Trainer, position: Position) -> Coroutine[Any, Any, None]:
        """Copy the trainer's state. Awaiting the result writes the copy, which later steps do not change.

        One at a time: call this only after the previous result has been awaited.
        """
        await trainer.snapshot()
        self._stopped = threading.Event()  # the loss of a trainer may have stopped the writing before
        return self._write(trainer, position)

    async def newest(self) -> tuple[Path, Position] | None:
        """The newest checkpoint that is whole; None when there never was one.

        Damaged ones are noted, and set aside if there is an older one to resume from. If there is none, nothing is touched
        and it raises CheckpointError: a run does not begin again by accident.
        """
        await self._in_thread(self._clean)
        damaged: list[tuple[Path, str]] = []
        for folder in reversed(self._ours()):
            try:
                position = await self._in_thread(verify, folder)
            except CheckpointError as error:
                damaged.append((folder, str(error)))
                self._note(f"checkpoint {folder.name} cannot be used: {error}")
                self._record("checkpoint_invalid", {"folder": folder.name, "reason": str(error)})
                continue
            for each, _ in damaged:
                self._set_aside(each)
            if damaged:
                self._note(f"going on from the older checkpoint {folder.name} instead")
            return folder, position
        if damaged or any(self.folder.glob(f"*{_DAMAGED}*")) or (self._ledger and self._ledger.events("checkpoint")):
            raise CheckpointError(
                f"{self.folder}: this run has had checkpoints, and none of them is usable"
                + "".join(f"; {why}" for _, why in damaged)
                + ". It is not begun again by accident: put one back as it was, or give another run_dir to begin anew"
            )
        return None

    def complete(self) -> list[Path]:
        """Checkpoints with a readable manifest, oldest first. Their files are not verified."""
        found = list[Path]()
        for folder in self._ours():
            with suppress(CheckpointError):
                read_manifest(folder)
                found.append(folder)
        return found

    async def _write(self, trainer: Trainer, position: Position) -> None:
        final = self.folder / name_of(position.step)
        partial = final.with_name(final.name + _PARTIAL)
        try:
            await self._in_thread(self._prepare, partial, final)
            await trainer.save(str(partial / "trainer"))
            await self._in_thread(self._publish, partial, final, position)
        except (ConnectionError, TimeoutError):
            raise  # the trainer has died, or hangs
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint {final} could not be written: {error}. Nothing is lost: the same command goes on from the "
                "checkpoint before, once that is mended"
            ) from error
        self._record("checkpoint", {"step": position.step})
        fault_injection.reach(ROLE, "retain", position.step)
        oldest = await self._in_thread(self._retire)
        if self._ledger is not None:
            self._ledger.retain(checkpoint=max(0, oldest - self._replays))

    def _record(self, kind: str, detail: dict[str, Any]) -> None:
        if self._ledger is not None:
            self._ledger.event(kind, detail)

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function in a thread. When cancelled it waits for the function's end.

        A process that resumes the run must find nobody else in the folder.
        """
        return await in_thread(function, *args, stop=self._stopped)

    def _prepare(self, partial: Path, final: Path) -> None:
        self._clean()
        if final.is_symlink() or final.exists():
            raise ValueError("it exists already; move it away")
        partial.mkdir(parents=True)
        (partial / MARKER).write_text(_MARKED)

    def _publish(self, partial: Path, final: Path, position: Position) -> None:
        step = position.step
        fault_injection.reach(ROLE, "manifest", step, path=seal(partial, position, self._stopped))
        fault_injection.reach(ROLE, "rename", step)
        os.rename(partial, final)
        flush(self.folder)

    def _retire(self) -> int:
        """Delete surplus checkpoints. Returns the oldest step that a resume may need."""
        complete = self.complete()
        for folder in complete[: -self._keep]:
            step = step_of(folder.name)
            if not (step and self._keep_every and step % self._keep_every == 0):
                try:
                    self._delete(folder)
                except OSError as error:  # the run can go on without this space
                    self._tell_once(f"{folder} is not deleted: {error}")
        return read_manifest(complete[-self._keep :][0]).step

    def _delete(self, folder: Path) -> None:
        """Delete a checkpoint if its manifest, marker and files are ours and nothing else is in it."""
        if not (folder / MARKER).is_file():
            self._tell_once(f"{folder} is not deleted: it holds no {MARKER}")
        elif others := strangers(folder):
            self._tell_once(f"{folder} is not deleted: it holds {others[0]}, which is not of the checkpoint")
        else:
            doomed = folder.with_name(folder.name + _PARTIAL)
            os.rename(folder, doomed)  # if a kill interrupts the deletion, no damaged checkpoint is left
            remove_marked(doomed, MARKER)

    def _clean(self) -> None:
        """Remove partial checkpoints that a kill left. Nothing reads them."""
        for partial in sorted(self.folder.glob(f"step-*{_PARTIAL}")):
            if not remove_left(partial, MARKER):
                self._tell_once(f"{partial} is left alone: it holds no {MARKER}, so it is not ours")

    def _ours(self) -> list[Path]:
        """Checkpoints, whole or damaged, oldest first."""
        found = {folder: step for folder in self.folder.glob("step-*") if (step := step_of(folder.name)) is not None}
        ours = [folder for folder in found if (folder / MARKER).is_file() or (folder / MANIFEST).is_file()]
        for other in sorted(found.keys() - set(ours)):
            self._tell_once(f"{other} is left alone: it holds neither {MARKER} nor {MANIFEST}, so it is no checkpoint")
        return sorted(ours, key=found.__getitem__)

    def _set_aside(self, folder: Path) -> None:
        names = (f"{folder.name}{_DAMAGED}{'' if i == 1 else f'-{i}'}" for i in range(1, 1000))
        aside = next(p for name in names if not (p := folder.with_name(name)).exists())
        os.rename(folder, aside)
        flush(self.folder)
        self._note(f"the damaged checkpoint is kept as {aside}; delete it when you have looked at it")

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._note(text)
