"""A short-lived process that does the part of a run's start that needs torch.

It spares the controller the import: torch takes more private memory than all else that a controller holds, and two seconds
of a processor. On a GPU, asking for the free memory takes a part of it for as long as the process lives.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tidemill.core.token_extras import TokenExtra
from tidemill.models.architecture import Architecture
from tidemill.models.tokenizer import class_name
from tidemill.run.recipe import RunConfig
from tidemill.run.storage.model_folder import ModelFolder, check_companions, expect_readable, resolve_model

if TYPE_CHECKING:
    from tidemill.trainer.telemetry import Offload


class Preparation(Protocol):
    """Interface of the process that prepares a run."""

    async def open_model(self, beside: str) -> str | None:
        """Open the model, and check that its companions read the same tokens.

        The model is made first if the recipe asks for a new one; it lies in the folder `beside`. Returns the class of its
        tokenizer, see `class_name`: to choose one, transformers imports torch. Raises what `ModelFolder.open` and
        `check_companions` raise.
        """
        ...

    async def check_memory(self, model: str, longest: int) -> None:
        """Check the run's memory: see `memory_model.check_memory`. model: the policy's folder."""
        ...

    async def extras(self) -> list[TokenExtra]:
        """The token extras that the recipe's losses read. Raises ValueError for a loss that cannot be loaded."""
        ...


class Preparer:
    """The preparation of one recipe's run, in this process."""

    def __init__(self, config: RunConfig, offload: Offload) -> None:
        """Prepare a run of `config`.

        offload: calls blocking functions. In a process of its own it uses a thread, because a device or a slow disk may
        take longer than a heartbeat.
        """
        self._config, self._offload = config, offload

    async def open_model(self, beside: str) -> str | None:
        return await self._offload(partial(self._open_model, Path(beside)))

    async def check_memory(self, model: str, longest: int) -> None:
        await self._offload(partial(self._check_memory, Path(model), longest))

    async def extras(self) -> list[TokenExtra]:
        return await self._offload(self._extras)

    def _open_model(self, beside: Path) -> str | None:
        config = self._config
        check_companions(config.reference, config.critic, config.model)
        expect_readable(config)
        folder = resolve_model(config.model, beside, config.seed)
        return class_name(ModelFolder.open(folder).tokenizer)

    def _check_memory(self, model: Path, longest: int) -> None:
        from tidemill.run.planner.memory_model import check_memory

        check_memory(self._config, Architecture.from_folder(model), longest)

    def _extras(self) -> list[TokenExtra]:
        from tidemill.algorithms.losses import extras_of

        specs = [each.loss_spec() for each in self._config.algorithms.values()]
        return list(dict.fromkeys(extra for spec in specs for extra in extras_of(spec)))
