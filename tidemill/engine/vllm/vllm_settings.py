"""Settings of engines that are vLLM servers. No torch here: the command line loads this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tidemill.engine.engine_kinds import BaseEngineSettings

ENVIRONMENT = Path(".peers/vllm/bin/python")  # as `make vllm` builds it, in the working folder or beside the package
STARTED = ("python", "tensor_parallel", "kv_memory_mb", "options")  # settings that only a server that we start has


class VllmSettings(BaseEngineSettings):
    """Settings of an engine that is a vLLM server."""

    kind: Literal["vllm"] = Field(default="vllm", description="Kind of engine")
    python: str = Field(
        default="", description="Python of the environment that vLLM is installed in. Left out: .peers/vllm, by `make vllm`"
    )
    url: str = Field(default="", description="Address of a server that runs already. Left out: each engine starts its own")
    key_variable: str = Field(default="", description="Environment variable that holds the key of the server at engine.url")
    max_sequences: int = Field(default=128, ge=1, description="Sequences that run at the same time")
    kv_memory_mb: int | None = Field(
        default=None,
        ge=1,
        description="Size of the KV cache of each rank in MiB. none: enough for all sequences, at most a quarter of the "
        "free memory; on CUDA devices as vLLM decides",
    )
    in_flight: Literal["keep", "finish", "recompute"] = Field(
        default="keep",
        description="Sequences in flight at an update: keep their KV, finish them before it, or recompute their KV",
    )
    prefix_cache: bool = Field(default=True, description="Reuse the KV of equal prompt beginnings")
    tensor_parallel: int = Field(default=1, ge=1, description="Processes of one server that share the weights")
    audit_every: int = Field(
        default=1, ge=0, description="Updates between two readings of the weights that are served. 0: none, only on demand"
    )
    start_s: float = Field(default=600.0, gt=0, description="Seconds until a server must be ready")
    options: dict[str, Any] = Field(
        default={}, description="More options of the server, by their names: max-num-batched-tokens = 4096"
    )

    @property
    def elsewhere(self) -> bool:
        return bool(self.url)

    @model_validator(mode="after")
    def _check_server(self) -> Self:
        if self.url and (given := [name for name in STARTED if name in self.model_fields_set]):
            raise ValueError(
                f"{given[0]} with url={self.url!r}: the server at that address runs already, so it would change nothing; "
                f"leave {given[0]} out, or leave url out"
            )
        if self.key_variable and not self.url:
            raise ValueError(
                f"key_variable={self.key_variable!r} without url: a server that is started here needs no key; leave it out"
            )
        return self
