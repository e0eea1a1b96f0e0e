"""Settings for metric sinks and the trace."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from tidemill.core.config import Config


class LogSettings(Config):
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()  # besides metrics.jsonl, which is always written
    project: str = Field(default="tidemill", min_length=1)  # the W&B project
    trace: bool = True  # write trace.json
    trace_events: int = Field(default=100_000, ge=1_000)  # most spans in it; a longer run is drawn more coarsely

    @field_validator("sinks")
    @classmethod
    def _once(cls, sinks: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(sinks)) != len(sinks):
            raise ValueError("names a sink twice: give each once")
        return sinks
