"""How weights travel from the trainer to the engines. No torch here: the command line reads it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tidemill.core.config import Config


class SyncSettings(Config):
    carrier: Literal["shared_memory", "checkpoint"] = "shared_memory"  # checkpoint: files, for engines sharing only a disk
    keep: int = Field(default=2, ge=2)  # versions the checkpoint carrier keeps on disk: engines may yet read the one before
