"""Settings of weight sync and the table of transports, in a module without torch because the command line reads it.

A new transport is one module, with a subclass of `BaseSyncSettings` and a function `() -> transport.Transport` that makes
both ends, and one entry in the table.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

from pydantic import Field, model_validator

from tidemill.core.errors import RenamedKey
from tidemill.core.registry import KindSettings, Registry

_SETTINGS = "tidemill.weight_sync.sync_settings:SyncSettings"
TRANSPORTS = Registry("placement.sync.transport", key="transport")
TRANSPORTS.register("shared_memory", _SETTINGS, "tidemill.weight_sync.transport:shared_memory")
TRANSPORTS.register("checkpoint", _SETTINGS, "tidemill.weight_sync.transport:checkpoint")

OLD_NAME = "carrier"  # of the key `transport`


class BaseSyncSettings(KindSettings, registry=TRANSPORTS):
    """What a run reads of a transport's settings, whatever its kind."""

    @classmethod
    def _chosen(cls, given: Any) -> Any:
        if isinstance(given, dict) and OLD_NAME in given:
            given = _renamed(given)
        return super()._chosen(given)

    @model_validator(mode="before")
    @classmethod
    def _accept_old_name(cls, given: Any) -> Any:
        return _renamed(given) if isinstance(given, dict) and OLD_NAME in given else given


def _renamed(given: dict[str, Any]) -> dict[str, Any]:
    """The same table with `transport` for `carrier`, which is said in one line."""
    if "transport" in given:
        raise ValueError(f"{OLD_NAME} and transport are two names of one key: leave out {OLD_NAME}, the old one")
    warnings.warn("placement.sync.carrier is called placement.sync.transport now", RenamedKey, stacklevel=2)
    return {"transport" if key == OLD_NAME else key: value for key, value in given.items()}


class SyncSettings(BaseSyncSettings):
    transport: Literal["shared_memory", "checkpoint"] = "shared_memory"  # checkpoint: files, for engines sharing only a disk
    keep: int = Field(default=2, ge=2)  # versions kept on disk with checkpoint: engines may still read the previous one
