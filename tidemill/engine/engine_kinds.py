"""Registry of engine kinds, with the settings and the spec that all kinds share.

No torch here. A new engine is one module, with a subclass of `BaseEngineSettings` and a function `(EngineSpec, Receiver |
None, Cores) -> Engine`, and one entry in the table.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field

from tidemill.core.config import Config
from tidemill.core.registry import KindSettings, Registry
from tidemill.core.types import Version
from tidemill.core.weight_update import UpdateSupport
from tidemill.models.adapter_config import BaseDtype
from tidemill.runtime.cpu_sharing import CoreShare

UNPUBLISHED = Version(-1)  # an engine's version before the first publication; nothing may be sampled from it
ENGINES = Registry("engine.kind")
_NATIVE, _TRANSFORMERS = "tidemill.engine.native", "tidemill.engine.transformers"
_OPENAI = "tidemill.engine.openai"
ENGINES.register("native", f"{_NATIVE}.engine_settings:EngineSettings", f"{_NATIVE}.build_native_engine:build")
ENGINES.register(
    "transformers",
    f"{_TRANSFORMERS}.transformers_settings:TransformersSettings",
    f"{_TRANSFORMERS}.transformers_engine:build",
)
_VLLM = "tidemill.engine.vllm"
ENGINES.register("vllm", f"{_VLLM}.vllm_settings:VllmSettings", f"{_VLLM}.build_vllm_engine:build")
_SGLANG = "tidemill.engine.sglang"
ENGINES.register("sglang", f"{_SGLANG}.sglang_settings:SglangSettings", f"{_SGLANG}.build_sglang_engine:build")
ENGINES.register("openai", f"{_OPENAI}.openai_settings:OpenaiSettings", f"{_OPENAI}.openai_engine:build")


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
    def elsewhere(self) -> bool:
        """True when the weights are a server's that runs already, which takes no memory of the run."""
        return False

    @property
    def altering(self) -> list[str]:
        """The given settings that may change what is sampled, by name: a run that has some compares samples first."""
        return [f"engine.options.{name}" for name in getattr(self, "options", {})]

    @property
    def fixed_threads(self) -> bool:
        """True when the number of threads is part of the result, so that no core may be lent."""
        return False


class EngineSpec(Config):
    """Everything that an engine is built from, as plain data that travels to its process."""

    role: str = "engine"  # reference; engine-NAME of a policy that is a whole model
    name: str = "engine-0"
    model: Path  # a Hugging Face folder
    engine: BaseEngineSettings
    transport: str | None = None  # source of new weights; None: the engine is never updated
    cached_versions: int = 2  # recent versions whose prefix cache may still be found
    sleeps: bool = False  # it sleeps before each update, so it needs no memory for weights beside those it serves
    adapter_rank: int = 0  # highest rank of the adapters that its versions are; 0: they are whole weights
    base_dtype: BaseDtype = "float32"  # numbers of the model that these adapters are added to
    serves: str = UNPUBLISHED.policy  # the policy that its model is, where it serves one
    proves: bool = False  # the version of a model that nothing updates has its fingerprint
    policies: tuple[str, ...] = ()  # trained policies that it serves side by side, as adapters; (): it serves one policy
    frozen: dict[str, Path] = Field(
        default_factory=dict
    )  # policies beside them that nothing updates, and their PEFT folders
    core_share: CoreShare | None = None  # None: its cores are its own
    profile: Path | None = None  # folder for `operator_profiler`
    logs: Path | None = None  # folder for the log of a server that this engine starts

    @property
    def version(self) -> Version:
        """The version of the folder's weights: 0 unless others are to be published."""
        return replace(Version(0) if self.transport is None else UNPUBLISHED, policy=self.serves)

    @property
    def side_by_side(self) -> bool:
        """True for an engine that serves several policies at once."""
        return bool(self.policies or self.frozen)

    @property
    def names(self) -> tuple[str, ...]:
        """The policies that it serves side by side."""
        return (*self.policies, *self.frozen)

    @property
    def adapters(self) -> bool:
        """True for an engine whose versions are adapters."""
        return self.adapter_rank > 0 or self.side_by_side

    def takes(self, carried: UpdateSupport | None) -> UpdateSupport:
        """The updates of this engine. carried: those that its receiver takes; None: it has no receiver."""
        if carried is None:
            return UpdateSupport(())
        return UpdateSupport(("adapter",) if self.adapters else ("full", "delta"), several_parts=True).both(carried)
