"""`runs/NAME/`: what a run leaves behind, and where.

    config.json   format.json   ledger.sqlite   trajectories/   metrics.jsonl   trace.json   report.json   logs/   weights/
    initial/ and final/ (Hugging Face folders)    checkpoints/step-000123/    profile.json.gz, where it was asked for
    warm-up/, until there is an initial/: checkpoints of the warm-up
    source/ (functions of the notebook or program that began it)    hub.json (commits of what the hub gave)

The folder is private to its owner. It belongs to one recipe: `open` refuses to go on under another one.
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
from tidemill.core.errors import ConfigError
from tidemill.core.serialization import CodecError, parse_json
from tidemill.ledger.lock import FolderLock
from tidemill.ledger.records import LedgerError, RunFolderError
from tidemill.run.recipe import RunConfig, check_same_run
from tidemill.run.recipe_files import absolute
from tidemill.run.status_file import FAILURE, STATUS
from tidemill.run.storage.folder_format import FILE, check_format, migrated, write_format
from tidemill.run.storage.model_folder import MADE
from tidemill.run.storage.run_files import RunReport, expect

_BEFORE_CONFIG = {"config.json.partial"}
"""What a start that was killed may leave before there is a config.json."""
_EVERY_START = {"config.json", FILE, "ledger.lock", "ledger.sqlite", "metrics.jsonl", "source", "hub.json", FAILURE}
_EMPTY = {"logs", "checkpoints", "trajectories"}
"""What every start makes before anything is computed: files, and folders that hold nothing yet."""


_WRITTEN_LATE = {"checkpoints", "initial.partial", "logs", "metrics.jsonl", "trajectories", "weights", FAILURE, STATUS}
"""What processes make anew in a folder that was renamed or deleted under them."""


class RunFolderGone(LedgerError):
    """It was renamed or deleted while its run went on. The message is for the user as it is."""


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.trace = path / "trace.json"
        self.profile, self.profiled = path / "profile", path / "profile.json.gz"  # while it is recorded; when it is whole
        self.report = path / "report.json"
        self.interrupted = path / "interrupted.json"
        self.initial = path / "initial"
        self.warm_up = path / "warm-up"
        self.final = path / "final"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.warnings = self.logs / "warnings.log"  # of the controller, such as what an environment raised
        self.source = path / "source"
        self.weights = path / "weights"  # of the checkpoint carrier
        self._made = False  # by this process

    @classmethod
    def open(cls, config: RunConfig) -> RunFolder:
        """Create the folder, or take up one that holds a run."""
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
        if not self.config.exists():  # first of all: it makes the folder a run's, also when the start is killed here
            write_json(self.config, absolute(dump(config)))
        fault_injection.reach(ROLE, "config", path=self.config)
        self.logs.mkdir(exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)

    def claim(self, config: RunConfig, begun: bool) -> None:
        """Write the recipe; one that has begun (admitted a group) goes on only under its own. Under the ledger's lock."""
        if begun:
            check_same_run(_as_known_now(self.recipe()), dump(config), self.path)
        elif self.initial.is_symlink():
            self.initial.unlink()  # of a start that failed
        elif self.initial.exists():
            beside = self._beside_initial()
            os.rename(self.initial, beside)  # never half of it under its name
            shutil.rmtree(beside)
        write_json(self.config, absolute(dump(config)))
        write_format(self.path)

    def withdraw(self) -> None:
        """Remove the folder of a start that was refused, if that start made it and all that is in it. Nothing here may hide
        why it was refused."""
        names = {p.name for p in self.path.iterdir() if not p.name.startswith(MADE)} if self._made else set[str]()
        if not self._made or names - _EVERY_START - _EMPTY:
            return
        if any(p.is_file() and p.stat().st_size for name in _EMPTY for p in (self.path / name).rglob("*")):
            return
        with contextlib.suppress(RunFolderError, OSError):  # another start has taken it up, or the disk is to blame
            lock = FolderLock(self.path)  # until it is gone
            try:
                away = self.path.with_name(f".{self.path.name}.withdrawn")
                os.rename(self.path, away)  # never half of it under its name
                shutil.rmtree(away)
            finally:
                lock.release()

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        folder = cls(path)
        if not folder.config.is_file():
            raise ConfigError(f"{path} is not a run: it has no config.json; give the run_dir of a recipe that was trained")
        check_format(path)
        return folder

    def recipe(self) -> dict[str, Any]:
        """As it was resolved, without keys that are none any more: they were of what is over before a run begins."""
        return migrated(read_json(self.config), check_format(self.path))

    def summary(self) -> dict[str, Any] | None:
        """The report of a run that came to its end; None before that."""
        return self.reported() if self.final.is_dir() else None

    def reported(self) -> dict[str, Any] | None:
        """The same, also where `final` was removed since."""
        return expect(self.report, read_json(self.report), RunReport) if self.report.is_file() else None

    @property
    def gone(self) -> bool:
        """Whether it was renamed or deleted while this process used it."""
        return not self.config.exists()

    def sweep(self) -> None:
        """Remove what processes wrote at the old place of a folder that is gone, where nothing else stands there."""
        with contextlib.suppress(OSError):
            if self.gone and {p.name for p in self.path.iterdir()} <= _WRITTEN_LATE:
                shutil.rmtree(self.path)

    def write_report(self, report: dict[str, Any], complete: bool) -> None:
        """`report.json` of a run that came to its end, `interrupted.json` of one that has yet to go on."""
        write_json(self.report if complete else self.interrupted, report)
        if complete:
            self.interrupted.unlink(missing_ok=True)

    def keep_initial(self, start: Path, copy: bool) -> None:
        """`initial` is the folder that reinforcement learning began with: a copy of it, or a link to it."""
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
        """Where there is nothing yet: what stood there was cut off by a kill."""
        beside = self.path / "initial.partial"
        shutil.rmtree(beside, ignore_errors=True)
        return beside

    async def write_final(self, export: Callable[[str], Awaitable[None]]) -> None:
        """`final` as `export` writes it: whole, in place of an earlier one."""
        fault_injection.reach(ROLE, "final")
        await export(str(self.final))
        fault_injection.reach(ROLE, "report")


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(path.read_bytes())
    except (OSError, CodecError) as error:
        raise ConfigError(f"{path} is not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}, expected an object")
    return value


def _as_known_now(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe that an older version wrote: settings that it did not know are at their defaults, for so it ran."""
    try:
        return dump(build(RunConfig, recipe))
    except ConfigError:
        return recipe
