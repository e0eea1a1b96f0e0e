"""Finds the model that a command's MODEL|RUN argument names."""

from __future__ import annotations

from pathlib import Path

from tidemill.cli.commands.run_state import state_of
from tidemill.core.errors import ConfigError
from tidemill.core.hub import fetch, is_name
from tidemill.run.storage.run_folder import RunFolder


def model_of(path: Path) -> Path:
    """The folder of a model: given itself, by its hub name, or as a run's `final/`.

    Raises ConfigError if there is none.
    """
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
    return final


def is_run(path: Path) -> bool:
    """True for the folder of a run."""
    return (path / "ledger.sqlite").is_file()
