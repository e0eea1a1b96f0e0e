"""Registry of engine kinds, with the settings and inputs that all kinds share.

No torch here. A new engine is one module, with a subclass of `BaseEngineSettings` and a function `(settings, EngineSetup) ->
Engine`, and one entry in the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tidemill.core.registry import KindSettings, Registry
from tidemill.core.types import Version

if TYPE_CHECKING:
    from tidemill.models.weight_slices import Receiver
    from tidemill.runtime.cpu_sharing import Cores

ENGINES = Registry("engine.kind")
ENGINES.register(
    *("native", "tidemill.engine.native.engine_settings:EngineSettings", "tidemill.engine.native.build_native_engine:build")
)


class BaseEngineSettings(KindSettings, registry=ENGINES):
    """Engine settings that a run reads, whatever the engine's kind."""

    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Dtype of served weights and KV cache")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Device of the engines. auto: cuda if there is one, else cpu"
    )
    context: int | None = Field(default=None, ge=2, description="Most tokens of prompt and reply. none: the model's context")

    def context_of(self, model: int) -> int:
        """Tokens that a sequence may hold, given enough memory. model: positions that the model has."""
        return min(self.context or model, model)

    @property
    def fixed_threads(self) -> bool:
        """True when the number of threads is part of the result, so that no core may be lent."""
        return False


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Inputs of an engine's builder besides its settings."""

    model: Path  # a Hugging Face folder
    name: str  # name of its process
    receiver: Receiver | None  # source of new weights; None: the engine is never updated
    version: Version  # version of the folder's weights
    cores: Cores
    cached_versions: int  # recent versions whose prefix cache may still be found
