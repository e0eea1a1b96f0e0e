"""Settings of weight sync, in a module without torch because the command line reads it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tidemill.core.config import Config


class SyncSettings(Config):
    carrier: Literal["shared_memory", "checkpoint"] = "shared_memory"  # checkpoint: files, for engines sharing only a disk
    keep: int = Field(default=2, ge=2)  # versions kept on disk with checkpoint: engines may still read the previous one
