"""Settings of the native engine. No torch here: the command line loads this file."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from tidemill.engine.engine_kinds import BaseEngineSettings


class EngineSettings(BaseEngineSettings):
    kind: Literal["native"] = "native"
    max_sequences: int = Field(default=128, ge=1)  # rows that run at the same time
    page_size: int = Field(default=16, ge=1)  # tokens of a KV page
    kv_memory_mb: int | None = Field(default=None, ge=1)  # None: max_sequences full contexts, within a share of what is free
    prefill_chunk: int = Field(default=2048, ge=1, le=1 << 17)  # prompt tokens computed in one step, beside its decode rows
    in_flight: Literal["keep", "finish", "recompute"] = "keep"  # see `types.InFlight`
    prefix_cache: bool = True
    batch_invariant: bool = (
        False  # a row's bits depend on nothing but its own tokens: float32 on the CPU, see `batch_invariant`
    )

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
