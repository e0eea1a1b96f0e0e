"""Settings of engines that are vLLM servers. No torch here: the command line loads this file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from tidemill.engine.remote.server_settings import ServerSettings

ENVIRONMENT = Path(".peers/vllm/bin/python")  # as `make vllm` builds it, in the working folder or beside the package
BUILD = "run `make vllm`, which builds that environment, or set engine.python to the Python of one with vLLM and vllm_plugin"


class VllmSettings(ServerSettings):
    """Settings of an engine that is a vLLM server."""

    kind: Literal["vllm"] = Field(default="vllm", description="Kind of engine")
    audit_every: int = Field(
        default=1, ge=0, description="Updates between two readings of the weights that are served. 0: none, only on demand"
    )
