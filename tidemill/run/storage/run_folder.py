"""The run folder, `runs/NAME/`: names and places of the files that a run leaves.

    config.json   format.json   ledger.sqlite   trajectories/   metrics.jsonl   trace.json   report.json   logs/   weights/
    initial/ and final/ (Hugging Face folders)    checkpoints/step-000123/    profile.json.gz    warm-up/ (its checkpoints)
    source/ (functions of the notebook or program that began it)    hub.json (commits of models and data from the hub)

It is private to its owner and belongs to one recipe.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tidemill.controller.controller import ROLE
from tidemill.core import fault_injection
from tidemill.core.atomic_files import flush, put_in_place, write_json
from tidemill.core.config import build, dump
from tidemill.core.errors import ConfigError, RunFolderError
from tidemill.ledger.lock import FolderLock
from tidemill.run.recipe import RunConfig
from tidemill.run.recipe_files import absolute, check_same_run
from tidemill.run.status_file import FAILURE, STATUS
from tidemill.run.storage.folder_format import FILE, check_format, migrated, write_format
from tidemill.run.storage.model_folder import MADE
from tidemill.run.storage.run_files import RunReport, read_json

_BEFORE_CONFIG = {"config.json.partial"}
"""Files that a killed start may leave before there is a config.json."""
_EVERY_START = {"config.json", FILE, "ledger.lock", "ledger.sqlite", "metrics.jsonl", "source", "hub.json", FAILURE}
_EMPTY = {"logs", "checkpoints", "trajectories"}
"""Files, and empty folders, that every start makes before anything is computed."""


_WRITTEN_LATE = {"checkpoints", "initial.partial", "logs", "metrics.jsonl", "trajectories", "weights", FAILURE, STATUS}
"""Names that processes create again in a folder that was renamed or deleted under them."""


class RunFolder:
    """The files of one run, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.trace = path / "trace.json"
        self.profile, self.profiled = path / "profile", path / "profile.json.gz"  # in parts; complete
        self.report = path / "report.json"
        self.interrupted = path / "interrupted.json"
        self.initial = path / "initial"
        self.warm_up = path / "warm-up"
        self.final = path / "final"
        self.final_adapter = path / "final-adapter"  # beside it, of a run that trains one
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.warnings = self.logs / "warnings.log"  # the controller's, such as exceptions of an environment
        self.source = path / "source"
        self.weights = path / "weights"  # files of the checkpoint transport
        self._made = False  # by this process

    @classmethod
    def open(cls, config: RunConfig) -> RunFolder:
        """Create the folder, or take up one that holds a run. Raises ConfigError."""
        folder = cls(config.run_dir)
        try:
            folder._make(config)
        except OSError as error:
            raise ConfigError(f"run_dir {folder.path} cannot be written: {error}; give another run_dir") from None
        return folder

    def _make(self, config: RunConfig) -> None:
        if not self.config.exists() and self.path.exists() and {p.name for p in self.path.iterdir()} - _BEFORE_CONFIG:
            raise ConfigError(f"run_dir {self.path} is not empty and holds no run: give another run_dir, or empty it")
        self._made = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_format(self.path)
        if not self.config.exists():  # first, so that the folder counts as a run's even if the start is killed here
            write_json(self.config, absolute(dump(config)))
        fault_injection.reach(ROLE, "config", path=self.config)
        self.logs.mkdir(exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)

    def claim(self, config: RunConfig, begun: bool) -> None:
        """Write the recipe, while holding the ledger's lock. Raises ConfigError.

        begun: True once a group was admitted. Then a run is resumed only under its own recipe.
        """
        if begun:
            check_same_run(_as_known_now(self.recipe()), dump(config), self.path)
        elif self.initial.is_symlink():
            self.initial.unlink()  # left by a start that failed
        elif self.initial.exists():
            beside = self._beside_initial()
            os.rename(self.initial, beside)  # never half of it under its name
            shutil.rmtree(beside)
        write_json(self.config, absolute(dump(config)))
        write_format(self.path)

    def withdraw(self) -> None:
        """Remove the folder of a refused start, if that start made all that is in it."""
        names = {p.name for p in self.path.iterdir() if not p.name.startswith(MADE)} if self._made else set[str]()
        if not self._made or names - _EVERY_START - _EMPTY:
            return
        if any(p.is_file() and p.stat().st_size for name in _EMPTY for p in (self.path / name).rglob("*")):
            return
        with contextlib.suppress(RunFolderError, OSError):  # nothing here may hide the reason of the refusal
            lock = FolderLock(self.path)  # until it is gone
            try:
                away = self.path.with_name(f".{self.path.name}.withdrawn")
                os.rename(self.path, away)  # never half of it under its name
                shutil.rmtree(away)
            finally:
                lock.release()

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        """The folder of a run that has begun. Raises ConfigError if there is none."""
        folder = cls(path)
        if not folder.config.is_file():
            raise ConfigError(f"{path} is not a run: it has no config.json; give the run_dir of a recipe that was trained")
        check_format(path)
        return folder

    def recipe(self) -> dict[str, Any]:
        """The resolved recipe, migrated from the format that the folder was written in."""
        return migrated(read_json(self.config), check_format(self.path))

    def summary(self) -> dict[str, Any] | None:
        """The report of a run that came to its end; None before that."""
        return self.reported() if self.final.is_dir() else None

    def reported(self) -> dict[str, Any] | None:
        """The report of a run that came to its end, even if `final` was removed since."""
        return read_json(self.report, RunReport) if self.report.is_file() else None

    @property
    def gone(self) -> bool:
        """True when the folder was renamed or deleted while this process used it."""
        return not self.config.exists()

    def sweep(self) -> None:
        """Remove what processes wrote at the old place of a folder that is gone, if nothing else is there."""
        with contextlib.suppress(OSError):
            if self.gone and {p.name for p in self.path.iterdir()} <= _WRITTEN_LATE:
                shutil.rmtree(self.path)

    def write_report(self, report: dict[str, Any], complete: bool) -> None:
        """Write `report.json` for a complete run, or `interrupted.json` for one that can be resumed."""
        write_json(self.report if complete else self.interrupted, report)
        if complete:
            self.interrupted.unlink(missing_ok=True)

    def keep_initial(self, start: Path, copy: bool) -> None:
        """Make `initial` a copy of, or a link to, the folder that reinforcement learning began with."""
        if self.initial.is_symlink() or self.initial.exists():
            return
        if not copy:
            self.initial.symlink_to(os.path.relpath(start.resolve(), self.path.resolve()), target_is_directory=True)
            flush(self.path)
            return
        beside = self._beside_initial()
        shutil.copytree(start, beside)
        fault_injection.reach(ROLE, "initial", path=beside / "config.json")
        put_in_place(beside, self.initial)
        shutil.rmtree(self.warm_up, ignore_errors=True)

    def _beside_initial(self) -> Path:
        """A free path for making `initial`; anything that a kill left there is removed."""
        beside = self.path / "initial.partial"
        shutil.rmtree(beside, ignore_errors=True)
        return beside

    async def write_final(self, export: Callable[[str], Awaitable[None]]) -> None:
        """Let `export` write `final`: whole, in place of an earlier one."""
        fault_injection.reach(ROLE, "final")
        await export(str(self.final))
        fault_injection.reach(ROLE, "report")


def _as_known_now(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe of an older version, with settings that it did not know at their defaults."""
    try:
        return dump(build(RunConfig, recipe))
    except ConfigError:
        return recipe
