"""Settings of the native engine. No torch here: the command line loads this file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tidemill.config import Config


class EngineSettings(Config):
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the served weights and of the KV cache
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_sequences: int = Field(128, ge=1)  # rows that run at the same time
    page_size: int = Field(16, ge=1)  # tokens of a KV page
    kv_memory_mb: int | None = Field(None, ge=1)  # None: max_sequences full contexts, within a share of what is free
    prefill_chunk: int = Field(2048, ge=1)  # prompt tokens computed in one step, beside its decode rows
    context: int | None = Field(None, ge=2)  # None: the model's
    in_flight: Literal["keep", "finish", "recompute"] = "keep"  # see `types.InFlight`
    prefix_cache: bool = True
