"""Settings of the native engine. No torch here: the command line loads this file."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from tidemill.engine.engine_kinds import BaseEngineSettings


class EngineSettings(BaseEngineSettings):
    """Settings of the native engine."""

    kind: Literal["native"] = "native"
    max_sequences: int = Field(default=128, ge=1)  # sequences that run at the same time
    page_size: int = Field(default=16, ge=1)  # tokens in a page of the KV cache
    # MiB of the KV cache; None: enough for all sequences, or a share of free memory
    kv_memory_mb: int | None = Field(default=None, ge=1)
    prefill_chunk: int = Field(default=2048, ge=1, le=1 << 17)  # prompt tokens in one step, beside the decoding sequences
    # sequences in flight at an update: keep their KV, finish first while the update waits, or recompute their KV
    in_flight: Literal["keep", "finish", "recompute"] = "keep"
    prefix_cache: bool = True  # reuse the KV of equal prompt beginnings
    # a sequence's bits depend only on its own tokens, whatever is computed beside it; float32 on the CPU
    batch_invariant: bool = False

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
