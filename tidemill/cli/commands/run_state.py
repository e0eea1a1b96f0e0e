"""The model or run that a command names, and the state of a run with a remedy."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tidemill.core.errors import ConfigError
from tidemill.core.hub import fetch, is_name
from tidemill.ledger.lock import holder
from tidemill.run.status_file import EVERY_S, FAILURE, STATUS
from tidemill.run.storage.run_files import Failure, Recipe, Status, read_json
from tidemill.run.storage.run_folder import RunFolder

LATE_S = 5 * EVERY_S  # a status older than this comes from a controller that does not run


@dataclass(frozen=True, slots=True)
class State:
    """A run's state, with its last status, its failure and its report, or None for each."""

    name: str  # running, stuck, complete, stopped, failed or killed
    pid: int | None
    status: dict[str, Any] | None
    failure: dict[str, Any] | None
    report: dict[str, Any] | None  # of a complete run

    def what_to_do(self) -> str:
        """The state and a remedy, for a run that lacks a file which it would write."""
        went = "give the command that began it once more, and it goes on from what is recorded"
        match self.name:
            case "running":
                return f"it is running (process {self.pid}), so wait; `tidemill why` shows where it is"
            case "stuck":
                return f"its process {self.pid} is stopped (SIGSTOP), and kill -CONT {self.pid} lets it go on"
            case "complete":
                return "the run came to its last step, so it was removed since"
            case "stopped":
                return f"it was stopped before its last step; {went}"
            case "failed":
                return f"it ended by an error, which `tidemill why` shows; once that is mended, {went}"
        return f"it was killed and does not run any more; {went}"


def model_of(path: Path) -> Path:
    """The folder of a model, given itself, by its hub name, or by its run."""
    if is_name(str(path)):
        return fetch(str(path), "model")
    if not path.is_dir():
        raise ConfigError(f"{str(path)!r} is not a folder: give a Hugging Face model folder, or a run's")
    if not is_run(path):
        return path
    final = RunFolder(path).final
    if not final.is_dir():
        now = state_of(RunFolder.existing(path)).what_to_do()
        raise ConfigError(
            f"run {str(path)!r} has no final/, which is written after its last step: {now}; or give a model folder"
        )
    if names := policies_in(final):
        raise ConfigError(f"run {str(path)!r} trained {len(names)} policies: give the model of one, {final / names[0]} say")
    return final


def policies_in(final: Path) -> list[str]:
    """The policies of which a run's `final` holds a model each; none where it is a model itself."""
    return [] if (final / "config.json").is_file() else sorted(each.parent.name for each in final.glob("*/config.json"))


def is_run(path: Path) -> bool:
    return (path / "ledger.sqlite").is_file()


def state_of(folder: RunFolder) -> State:
    status, failure, report = _if_there(folder, STATUS, Status), _if_there(folder, FAILURE, Failure), None
    pid = holder(folder.path)
    if pid is not None:
        late = status is None or status["pid"] != pid or time.time() - status["at"] > LATE_S
        state, failure = ("stuck" if late and _stopped(pid) else "running"), None
    elif _complete(folder, report := folder.reported()):
        state, failure = "complete", None
    elif failure is not None:
        state = "stopped" if failure["kind"] in ("CancelledError", "KeyboardInterrupt") else "failed"
    else:
        state = "stopped" if folder.interrupted.is_file() else "killed"
    return State(state, pid, status, failure, report if state == "complete" else None)


def _complete(folder: RunFolder, report: dict[str, Any] | None) -> bool:
    return report is not None and report["steps"] >= read_json(folder.config, Recipe)["steps"]


def _if_there(folder: RunFolder, name: str, kind: type[Status | Failure]) -> dict[str, Any] | None:
    """A status or failure file, or None. A running process may remove it at any moment."""
    file = folder.path / name
    try:
        return read_json(file, kind)
    except ConfigError:
        if file.is_file():
            raise
        return None


def _stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False
