"""Settings of engines that are servers which take new weights. No torch here: the command line loads this file."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tidemill.core.errors import ConfigError
from tidemill.engine.engine_kinds import BaseEngineSettings

STARTED = ("python", "tensor_parallel", "kv_memory_mb", "options")  # settings that only a server that we start has


class ServerSettings(BaseEngineSettings):
    """Settings that servers of every kind have which take new weights."""

    python: str = Field(
        default="",
        description="Python of the environment that the server is installed in. Left out: the kind's own in .peers",
    )
    url: str | list[str] = Field(
        default="",
        description="Address of a server that runs already; of several engines, one for each. Left out: each engine starts "
        "its own",
    )
    key_variable: str = Field(default="", description="Environment variable that holds the key of the server at engine.url")
    max_sequences: int = Field(default=128, ge=1, description="Sequences that run at the same time")
    kv_memory_mb: int | None = Field(
        default=None,
        ge=1,
        description="Size of the KV cache of each rank in MiB. none: enough for all sequences, at most a quarter of the "
        "free memory; on CUDA devices as the server decides",
    )
    in_flight: Literal["keep", "finish", "recompute"] = Field(
        default="keep",
        description="Sequences in flight at an update: keep their KV, finish them before it, or recompute their KV",
    )
    prefix_cache: bool = Field(default=True, description="Reuse the KV of equal prompt beginnings")
    tensor_parallel: int = Field(default=1, ge=1, description="Processes of one server that share the weights")
    start_s: float = Field(default=600.0, gt=0, description="Seconds until a server must be ready")
    options: dict[str, Any] = Field(
        default={}, description="More options of the server, by their names: max-num-batched-tokens = 4096"
    )

    @property
    def elsewhere(self) -> bool:
        return bool(self.url)

    @property
    def urls(self) -> list[str]:
        """The addresses of servers that run already."""
        return [self.url] if isinstance(self.url, str) and self.url else [*self.url]

    def url_of(self, engine: str, updated: bool) -> str:
        """The address of an engine's server, by its number. Raises ConfigError if too few are there to be updated."""
        number, known = int(engine.rpartition("-")[2]), len(self.urls)
        if updated and number >= known:
            raise ConfigError(
                f"{engine}: engine.url names {known} servers, and each engine updates a server of its own; name one more"
            )
        return self.urls[number % known]

    @model_validator(mode="after")
    def _check_server(self) -> Self:
        fields = type(self).model_fields  # settings that travel to another process have all been set
        if self.url and (given := [name for name in STARTED if getattr(self, name) != fields[name].default]):
            raise ValueError(
                f"{given[0]} with url={self.url!r}: the server at that address runs already, so it would change nothing; "
                f"leave {given[0]} out, or leave url out"
            )
        if self.key_variable and not self.url:
            raise ValueError(
                f"key_variable={self.key_variable!r} without url: a server that is started here needs no key; leave it out"
            )
        return self
