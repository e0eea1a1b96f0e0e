"""Settings of the scoring stage: its worker processes, their limits, and tolerated errors."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tidemill.core.config import Config


class ScoringSettings(Config):
    """Worker processes that judge attempts, with their limits."""

    workers: int = Field(default=2, ge=0, description="Worker processes that judge. 0: the controller, for breakpoint()")
    limit_s: float = Field(default=10.0, gt=0, description="Seconds that one call may take before its worker is killed")
    memory_mb: int = Field(default=0, ge=0, description="Address space of a worker in MB. 0: unlimited")
    max_error_share: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Share of infrastructure errors among the latest outcomes, above which admission pauses",
    )
    pause_s: float = Field(default=600.0, gt=0, description="Seconds that admission may pause before the run ends")
    accept: tuple[Literal["gold", "garbage"], ...] = Field(
        default=(), description="Failed checks of the reward that are accepted: gold replies that fail, garbage that passes"
    )

    def workers_as(self) -> dict[str, Any]:
        """The arguments of `RewardPool`."""
        return self.model_dump(include={"workers", "limit_s", "memory_mb"})
