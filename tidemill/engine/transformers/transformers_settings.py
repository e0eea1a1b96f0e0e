"""Settings of the engine over `transformers`. No torch here: the command line loads this file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tidemill.engine.engine_kinds import BaseEngineSettings


class TransformersSettings(BaseEngineSettings):
    """Settings of the engine over `transformers`."""

    kind: Literal["transformers"] = Field(default="transformers", description="Kind of engine")
    max_sequences: int = Field(default=16, ge=1, description="Sequences that run at the same time")
    in_flight: Literal["keep", "finish", "recompute"] = Field(
        default="keep",
        description="Sequences in flight at an update: keep their KV, finish them before it, or recompute their KV",
    )
