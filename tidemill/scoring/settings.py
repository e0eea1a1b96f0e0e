"""Settings of the scoring stage."""

from __future__ import annotations

from pydantic import Field

from tidemill.config import Config


class ScoringSettings(Config):
    """Worker processes that judge attempts."""

    workers: int = Field(2, ge=0, description="worker processes; 0 judges inside the controller, for breakpoint()")
    limit_s: float = Field(10.0, gt=0, description="seconds one call may take before its worker is killed")
    memory_mb: int = Field(0, ge=0, description="address space of a worker in MB; 0 is unlimited")
