"""Settings of weight sync, and the registry of transports, without torch.

A new transport is one module, with a subclass of `BaseSyncSettings` and a function `() -> transport.Transport` that makes
both ends, and one entry in the table.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

from pydantic import Field

from tidemill.core.errors import RenamedKey
from tidemill.core.registry import KindSettings, Registry

_SETTINGS = "tidemill.weight_sync.sync_settings:SyncSettings"
TRANSPORTS = Registry("placement.sync.transport", key="transport")
TRANSPORTS.register("shared_memory", _SETTINGS, "tidemill.weight_sync.transport:shared_memory")
TRANSPORTS.register("checkpoint", _SETTINGS, "tidemill.weight_sync.transport:checkpoint")
TRANSPORTS.register("collective", _SETTINGS, "tidemill.weight_sync.transport:collective")
TRANSPORTS.register("direct", _SETTINGS, "tidemill.weight_sync.transport:direct")

OLD_NAME = "carrier"  # of the key `transport`


class BaseSyncSettings(KindSettings, registry=TRANSPORTS):
    """Settings that every transport has, which a run reads whatever the transport."""

    @property
    def same_host(self) -> bool:
        """True if trainer and engines must be on one machine."""
        return True

    @property
    def live(self) -> bool:
        """True if the trainer sends while engines receive."""
        return False

    @property
    def every_full(self) -> int:
        """Versions from one full version to the next. 1: every one is full."""
        return 1

    @property
    def reread(self) -> bool:
        """True if an engine can read the weights of the version in force again."""
        return not self.live and self.every_full == 1

    @classmethod
    def _chosen(cls, given: Any) -> Any:
        if isinstance(given, dict) and OLD_NAME in given:
            if "transport" in given:
                raise ValueError(f"{OLD_NAME} and transport are two names of one key: leave out {OLD_NAME}, the old one")
            warnings.warn("placement.sync.carrier is called placement.sync.transport now", RenamedKey, stacklevel=2)
            given = {"transport" if key == OLD_NAME else key: value for key, value in given.items()}
        return super()._chosen(given)


class SyncSettings(BaseSyncSettings):
    """Transport of new weights from the trainer to the engines."""

    transport: Literal["shared_memory", "checkpoint", "collective", "direct"] = Field(
        default="shared_memory",
        description="Transport of new weights to the engines. checkpoint: files, for engines that share only a disk; "
        "collective: broadcasts from the trainer's ranks, while engines receive; direct: messages from rank to engine",
    )
    keep: int = Field(default=2, ge=2, description="Versions that the transport `checkpoint` keeps on disk")

    full_every: int = Field(
        default=1,
        ge=1,
        description="Versions from one full version to the next; those between send only what changed. 1: all are full",
    )

    @property
    def every_full(self) -> int:
        return self.full_every

    @property
    def same_host(self) -> bool:
        return self.transport != "checkpoint"

    @property
    def live(self) -> bool:
        return self.transport in ("collective", "direct")
