"""Settings of the native engine. No torch here: the command line loads this file."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from tidemill.core.config import Config
from tidemill.engine.engine_kinds import BaseEngineSettings


class SpeculationSettings(Config):
    """Settings of speculative decoding. Tokens and logprobs are those without it."""

    method: Literal["none", "ngram", "rollouts"] = Field(
        default="none",
        description="Drafts from the sequence's own tokens (ngram), or also from other replies to its prompt (rollouts)",
    )
    num_speculative_tokens: int = Field(default=8, ge=1, description="Most draft tokens of a sequence in one step")
    step_tokens: int = Field(
        default=16,
        ge=4,
        description="Most tokens of a step with drafts. It has some while at most a quarter as many sequences are live",
    )


class EngineSettings(BaseEngineSettings):
    """Settings of the native engine."""

    kind: Literal["native"] = Field(default="native", description="Kind of engine")
    max_sequences: int = Field(default=128, ge=1, description="Sequences that run at the same time")
    page_size: int = Field(default=16, ge=1, description="Tokens in a page of the KV cache")
    kv_memory_mb: int | None = Field(
        default=None,
        ge=1,
        description="Size of the KV cache in MiB. none: enough for all sequences, or a share of free memory",
    )
    prefill_chunk: int = Field(default=2048, ge=1, le=1 << 17, description="Most prompt tokens computed in one step")
    in_flight: Literal["keep", "finish", "recompute"] = Field(
        default="keep",
        description="Sequences in flight at an update: keep their KV, finish them before it, or recompute their KV",
    )
    prefix_cache: bool = Field(default=True, description="Reuse the KV of equal prompt beginnings")
    batch_invariant: bool = Field(
        default=False, description="Compute equal bits for a sequence in any batch. Needs float32 on the CPU"
    )
    speculation: SpeculationSettings = SpeculationSettings()

    @property
    def altering(self) -> list[str]:
        return [] if self.speculation.method == "none" else ["engine.speculation.method"]

    @property
    def fixed_threads(self) -> bool:
        return self.batch_invariant

    @model_validator(mode="after")
    def _check_invariant(self) -> Self:
        if self.batch_invariant and (self.dtype != "float32" or self.device == "cuda"):
            raise ValueError(
                f"batch_invariant with dtype={self.dtype!r} and device={self.device!r}: it is for float32 on the CPU; "
                "set dtype='float32' and device='cpu', or turn batch_invariant off"
            )
        return self
