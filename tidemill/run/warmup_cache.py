"""Cache of warm-up results for later runs of the same recipe: `runs/warm-starts/DIGEST/`.

    find(name)          the entry, if it is private and every byte is as written; else None, and the reason is noted
    keep(made, name)    seal the folder `made`, with its record, and put it there

An entry becomes a policy, so it is read only if nobody else can have written it: folder and files belong to this user, and
no one else may write to them. An entry has the manifest of a checkpoint, whose step is the warm-up's.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tidemill.controller.controller import ROLE
from tidemill.core import fault_injection
from tidemill.core.atomic_files import put_in_place, write_json
from tidemill.core.errors import CheckpointError, ConfigError
from tidemill.run.sft_warmup import WarmedUp
from tidemill.run.storage.checkpoint_manifest import Position, seal, verify
from tidemill.run.storage.run_folder import read_json

RECORD = "warm_start.json"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class WarmStartCache:
    """The folder of cached warm-ups."""

    folder: Path
    note: Callable[[str], None]

    def prepare(self) -> bool:
        """Make the folder, private. Returns False, with a note, if it cannot be trusted or written."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _expect_own(self.folder, self.folder.stat())
            self.folder.chmod(0o700)
        except (OSError, CheckpointError) as error:
            self.note(f"the cache of warm-ups is not used: {error}")
            return False
        return True

    def find(self, name: str) -> WarmedUp | None:
        """The record of a usable entry, or None. An unusable entry is removed."""
        entry = self.folder / name
        if not os.path.lexists(entry):
            return None
        try:
            return read_kept(entry)
        except CheckpointError as error:
            self.note(f"the warm-up kept in {entry} cannot be used, and is made again: {error}")
            entry.unlink() if entry.is_symlink() or entry.is_file() else shutil.rmtree(entry, ignore_errors=True)
            return None

    def keep(self, made: Path, name: str) -> Path:
        """Move a result into the cache and return the entry.

        If two runs warmed up at the same time, the first one's result is kept.
        """
        entry = self.folder / name
        if (entry / RECORD).is_file():
            shutil.rmtree(made)
        else:
            put_in_place(made, entry)
        return entry


def record(folder: Path, warmed: WarmedUp) -> None:
    """Write the result's record beside the model in `folder`, seal it, and make all of it private."""
    write_json(folder / RECORD, asdict(warmed))
    fault_injection.reach(ROLE, "warm-start", path=folder / RECORD)
    seal(folder, Position(warmed.steps, 0, 0), threading.Event())
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)


def read_kept(folder: Path) -> WarmedUp:
    """The record of a result that is whole and this user's own. Raises CheckpointError."""
    try:
        for path in (folder, *folder.rglob("*")):
            _expect_own(path, path.lstat())
        warmed = WarmedUp(**read_json(folder / RECORD))
    except (OSError, ConfigError, TypeError) as error:
        raise CheckpointError(str(error)) from None
    verify(folder, warmed.steps)
    return warmed


def _expect_own(path: Path, found: os.stat_result) -> None:
    if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        raise CheckpointError(f"{path} is neither a folder nor a file")
    if found.st_uid != os.geteuid():
        raise CheckpointError(f"{path} belongs to another user (number {found.st_uid})")
    if found.st_mode & _OTHERS_WRITE:
        raise CheckpointError(f"{path} may be written by others (mode {stat.S_IMODE(found.st_mode):o})")
