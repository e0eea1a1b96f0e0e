"""Settings of engines behind `/v1/completions`. No torch here: the command line loads this file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tidemill.engine.engine_kinds import BaseEngineSettings


class OpenaiSettings(BaseEngineSettings):
    """Settings of an engine that is a server with OpenAI's completions."""

    kind: Literal["openai"] = Field(default="openai", description="Kind of engine")
    url: str = Field(description="Address of the server, http://HOST:PORT")
    key_variable: str = Field(default="", description="Environment variable that holds the key of the server at engine.url")
    served_model: str = Field(
        default="", description="Model of a server that has several, by its name there. Left out: its only one"
    )

    @property
    def elsewhere(self) -> bool:
        return True
