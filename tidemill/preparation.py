"""What of a run's beginning needs torch: it is done in a process that ends, so that the controller never imports it.

Imported, torch takes more private memory than all else that a controller holds, and a processor for two seconds; on a
device, to ask what is free there takes a part of it for as long as the process lives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tidemill.model_folder import resolve_model
from tidemill.models.architecture import Architecture
from tidemill.recipe import RunConfig


class Preparation(Protocol):
    async def make_model(self, beside: str) -> None:
        """See `resolve_model`."""
        ...

    async def check_memory(self, model: str, longest: int) -> None:
        """See `memory.check_memory`; `model` is the policy's folder."""
        ...


class Preparer:
    """Of the runs of one recipe."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    async def make_model(self, beside: str) -> None:
        resolve_model(self._config.model, Path(beside), self._config.seed)

    async def check_memory(self, model: str, longest: int) -> None:
        from tidemill.memory import check_memory

        check_memory(self._config, Architecture.from_folder(Path(model)), longest)
