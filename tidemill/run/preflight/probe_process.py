"""A short-lived process that does the part of a run's start that needs torch.

It spares the controller torch's private memory, two seconds, and a part of the GPU's memory for as long as it lives.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.core.token_extras import TokenExtra
from tidemill.core.types import Version
from tidemill.models.architecture import Architecture
from tidemill.models.tokenizer import class_name
from tidemill.run.frozen_folders import frozen_version
from tidemill.run.planner.device_plan import DevicePlan, Given
from tidemill.run.recipe import RunConfig
from tidemill.run.storage.model_folder import ModelFolder, check_companions, expect_readable, resolve_model

if TYPE_CHECKING:
    from tidemill.trainer.telemetry import Offload


class Preparation:
    """The preparation of one recipe's run. Its async methods can be called from another process."""

    def __init__(self, config: RunConfig, offload: Offload) -> None:
        """Prepare a run of `config`. offload: calls blocking functions."""
        self._config, self._offload = config, offload
        self._devices: DevicePlan | None = None

    async def open_model(self, beside: str) -> str | None:
        """Open or make the model, and check that its companions read the same tokens.

        beside: the folder for a new model. Returns the class of its tokenizer, see `class_name`: to choose one, transformers
        imports torch. Raises what `ModelFolder.open` and `check_companions` raise.
        """
        return await self._offload(partial(self._open_model, Path(beside)))

    async def place(self, model: str, given: Given) -> DevicePlan:
        """The device plan of the run, see `device_plan.place`. model: the policy's folder. given: from the recipe itself."""
        self._devices = await self._offload(partial(self._place, Path(model), given))
        return self._devices

    async def check_memory(self, model: str, longest: int) -> None:
        """Check the run's memory, after `place`: see `memory_check.check_memory`. model: the policy's folder."""
        await self._offload(partial(self._check_memory, Path(model), longest))

    async def frozen(self) -> list[Version]:
        """The versions that engines serve of the frozen policies, with their folders' fingerprints.

        Raises ValueError for a folder that holds neither an adapter nor a model, or not what its run recorded.
        """
        return await self._offload(self._frozen)

    async def extras(self) -> list[TokenExtra]:
        """The token extras that the recipe's losses read. Raises ValueError for a loss that cannot be loaded."""
        return await self._offload(self._extras)

    def _open_model(self, beside: Path) -> str | None:
        config = self._config
        check_companions(config)
        expect_readable(config)
        folder = resolve_model(config.model, beside, config.seed)
        return class_name(ModelFolder.open(folder).tokenizer)

    def _place(self, model: Path, given: Given) -> DevicePlan:
        from tidemill.run.planner.device_rates import planned_devices
        from tidemill.run.planner.memory_model import Models

        return planned_devices(self._config, given, Models.of(self._config, Architecture.from_folder(model)))

    def _check_memory(self, model: Path, longest: int) -> None:
        from tidemill.run.planner.memory_check import check_memory

        check_memory(self._config, Architecture.from_folder(model), longest, self._devices)

    def _frozen(self) -> list[Version]:
        dtype = self._config.engine.dtype
        return [frozen_version(name, given, dtype) for name, given in self._config.frozen_policies.items()]

    def _extras(self) -> list[TokenExtra]:
        from tidemill.algorithms.losses import extras_of

        specs = [each.loss_spec() for each in self._config.algorithms.values()]
        return list(dict.fromkeys(extra for spec in specs for extra in extras_of(spec)))
