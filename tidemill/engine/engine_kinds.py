"""The kinds of engine: what all of them are set by and built from, and the table of what is built in. No torch here.

A new engine is one module, with a subclass of `BaseEngineSettings` and a function `(settings, EngineSetup) -> Engine`,
and one entry in the table.
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
    """What a run reads of an engine's settings, whatever its kind."""

    dtype: Literal["float32", "bfloat16"] = "float32"  # of the served weights and of the KV cache
    device: Literal["auto", "cpu", "cuda"] = "auto"
    context: int | None = Field(default=None, ge=2)  # None: the model's

    def context_of(self, model: int) -> int:
        """Tokens that a sequence may hold, were there memory for them. model: positions that it has."""
        return min(self.context or model, model)

    @property
    def fixed_threads(self) -> bool:
        """Whether the number of threads is part of the result, so that no core may be lent."""
        return False


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What an engine is built from, beside its settings."""

    model: Path  # a Hugging Face folder
    name: str  # of its process
    receiver: Receiver | None  # of new weights; None: an engine that is never updated
    version: Version  # what the folder's weights count as
    cores: Cores
    cached_versions: int  # recent versions whose prefix cache may still be found
