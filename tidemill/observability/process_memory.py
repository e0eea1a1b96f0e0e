"""Memory of this process in bytes, and its peak.

The proportional set size divides shared pages among their users. Linux reports it; elsewhere the greatest resident size
so far takes its place.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path


def memory_bytes() -> int:
    """Memory of this process now: the proportional set size, else the peak resident size."""
    size = pss_bytes()
    return max_resident_bytes() if size is None else size


def pss_bytes() -> int | None:
    """Proportional set size of this process; None where the system does not report it."""
    try:
        text = Path("/proc/self/smaps_rollup").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return None


def max_resident_bytes() -> int:
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


class PeakMemory:
    """The greatest `memory_bytes` at any `update`; read every EVERY_S seconds, as it takes 27 ms for 1 GB."""

    EVERY_S = 2.0

    def __init__(self) -> None:
        self.peak = 0
        self._next = 0.0

    def update(self) -> int:
        """Measure, unless that was done a moment ago, and return the peak so far in bytes."""
        now = time.monotonic()
        if now >= self._next:
            self.peak = max(self.peak, memory_bytes())
            self._next = now + self.EVERY_S
        return self.peak
