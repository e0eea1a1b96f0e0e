"""What of a run's beginning needs torch: it is done in a process that ends, so that the controller never imports it.

Imported, torch takes more private memory than all else that a controller holds, and a processor for two seconds; on a
device, to ask what is free there takes a part of it for as long as the process lives.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tidemill.models.architecture import Architecture
from tidemill.models.tokenizer import class_name
from tidemill.run.recipe import RunConfig
from tidemill.run.storage.model_folder import ModelFolder, check_companions, expect_readable, resolve_model

if TYPE_CHECKING:
    from tidemill.trainer.telemetry import Offload


class Preparation(Protocol):
    async def open_model(self, beside: str) -> str | None:
        """Make the model if it is to be made in the folder `beside`, and see that it can be opened and that its
        companions read the same tokens. Raises what `ModelFolder.open` and `check_companions` do.

        What it returns is the class of its tokenizer, see `class_name`: to choose one, transformers imports torch.
        """
        ...

    async def check_memory(self, model: str, longest: int) -> None:
        """See `memory.check_memory`; `model` is the policy's folder."""
        ...


class Preparer:
    """Of the runs of one recipe."""

    def __init__(self, config: RunConfig, offload: Offload) -> None:
        """offload: calls what blocks; in a process of its own, in a thread, for a device or a slow disk may take longer than
        is waited for a heartbeat."""
        self._config, self._offload = config, offload

    async def open_model(self, beside: str) -> str | None:
        return await self._offload(partial(self._open_model, Path(beside)))

    async def check_memory(self, model: str, longest: int) -> None:
        await self._offload(partial(self._check_memory, Path(model), longest))

    def _open_model(self, beside: Path) -> str | None:
        config = self._config
        check_companions(config.reference, config.critic, config.model)
        expect_readable(config)
        folder = resolve_model(config.model, beside, config.seed)
        return class_name(ModelFolder.open(folder).tokenizer)

    def _check_memory(self, model: Path, longest: int) -> None:
        from tidemill.run.planner.memory_model import check_memory

        check_memory(self._config, Architecture.from_folder(model), longest)
