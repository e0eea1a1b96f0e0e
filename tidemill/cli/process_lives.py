"""Measured lives of a run's processes: how long each lived, and how much it grew."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

STARTING = "starting"  # name of a process that was forked and is not yet named in status.json
GROWN_S = 120.0  # seconds of age after which a process should not grow any more
WINDOW_S = 30.0  # seconds over which a size is a median, because memory varies with work
JUDGED_S = GROWN_S + WINDOW_S  # seconds of age from which growth is reported


@dataclass(frozen=True, slots=True)
class RunSize:
    resident_mb: float
    files: int  # open descriptors


@dataclass(frozen=True, slots=True)
class Look:
    name: str  # its name at that time: a role is forked before it reports its name
    age: float
    size: RunSize


@dataclass(frozen=True, slots=True)
class Life:
    """A process of the run, for as long as it was seen."""

    name: str
    seconds: float
    early: RunSize | None  # at the age of GROWN_S; None: it did not live to JUDGED_S
    late: RunSize  # at its end

    @property
    def growth(self) -> tuple[float, int] | None:
        """Growth from GROWN_S to the end: resident memory in percent, and open files."""
        if self.early is None:
            return None
        return 100 * (self.late.resident_mb / self.early.resident_mb - 1), self.late.files - self.early.files

    @classmethod
    def of(cls, looks: Sequence[Look]) -> Life:
        """The life of a process from its measurements, at least one; it may have been ending at the last."""
        name = next((look.name for look in reversed(looks) if not look.name.startswith(STARTING)), looks[-1].name)
        seconds = looks[-1].age
        looks = looks[:-1] or looks
        window = min(WINDOW_S, (seconds - GROWN_S) / 2) if seconds >= JUDGED_S else WINDOW_S
        early = [look.size for look in looks if GROWN_S <= look.age < GROWN_S + window]
        late = [look.size for look in looks if look.age >= seconds - window]
        judged = early and seconds >= JUDGED_S
        return cls(name, seconds, _median(early) if judged else None, _median(late or [looks[-1].size]))


def _median(sizes: list[RunSize]) -> RunSize:
    return RunSize(statistics.median(s.resident_mb for s in sizes), int(statistics.median_high([s.files for s in sizes])))
