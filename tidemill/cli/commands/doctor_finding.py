"""DoctorFinding: one line of `tidemill doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """A finding about this machine, with advice."""

    name: str
    status: Status
    found: str
    advice: str = ""  # what to do; empty when there is nothing to do
