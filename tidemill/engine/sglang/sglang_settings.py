"""Settings of engines that are SGLang servers. No torch here: the command line loads this file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from tidemill.engine.remote.server_settings import ServerSettings

ENVIRONMENT = Path(".peers/sglang/bin/python")  # in the working folder or beside the package
BUILD = "set engine.python to the Python of an environment that holds SGLang, or engine.url to the address of a server"


class SglangSettings(ServerSettings):
    """Settings of an engine that is an SGLang server."""

    kind: Literal["sglang"] = Field(default="sglang", description="Kind of engine")
    load: Literal["disk", "collective"] = Field(
        default="disk",
        description="Way in which the server gets verified weights from its engine. disk: files that both see; collective: "
        "broadcasts over a process group",
    )
