"""Settings for metric sinks and the trace."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from tidemill.core.config import Config


class LogSettings(Config):
    """Metric sinks and the trace."""

    sinks: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        default=(), description="Sinks of metrics besides metrics.jsonl, which is always written"
    )
    project: str = Field(default="tidemill", min_length=1, description="Name of the project in W&B")
    trace: bool = Field(default=True, description="Write trace.json, the spans of all processes on one clock")
    trace_events: int = Field(
        default=100_000, ge=1_000, description="Most spans in the trace. A longer run is drawn more coarsely"
    )

    @field_validator("sinks")
    @classmethod
    def _once(cls, sinks: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(sinks)) != len(sinks):
            raise ValueError("names a sink twice: give each once")
        return sinks
