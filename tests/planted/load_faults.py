"""Faults of the engines' share beside a list schedule: who works when, and what counts. See `faults`."""

from __future__ import annotations

from faults import Fault

SCHEDULE, SHARE = "observability/test_list_schedule.py", "observability/test_engine_share.py"
LOAD_FAULTS = [
    Fault(
        "an engine checks its pages each time that it has no work",
        "if (begin := time.monotonic()) >= self._next_check:",
        "if (begin := time.monotonic()) >= 0.0:",
        "engine/native/test_idle_checks.py",
    ),
    Fault(
        "a server gives every phase all of its time",
        "rate = min(1.0, self._servers / max(len(self._served), 1))",
        "rate = 1.0",
        SCHEDULE,
    ),
    Fault(
        "a phase alone has all servers",
        "rate = min(1.0, self._servers / max(len(self._served), 1))",
        "rate = self._servers / max(len(self._served), 1)",
        SCHEDULE,
    ),
    Fault(
        "the tail of a schedule counts",
        "if filled and found.filled > 0 else (found.work, found.makespan)",
        "if False else (found.work, found.makespan)",
        SHARE,
    ),
    Fault(
        "each turn has the engine for itself",
        "each = np.diff(times) / np.maximum(under_way[:-1], 1)",
        "each = np.diff(times) / np.minimum(np.maximum(under_way[:-1], 1), 1)",
        SHARE,
    ),
    Fault(
        "waiting in the engine's queue is work",
        "own = _equal_parts([turn.engine for turn in turns], begun, answered)",
        "own = _equal_parts([turn.engine for turn in turns], asked, answered)",
        SHARE,
    ),
    Fault(
        "evaluations are time of the episodes",
        "self._cut = common(_joined([*self._cut, *evaluations]), kept)",
        "self._cut = common(_joined([*self._cut]), kept)",
        SHARE,
    ),
    Fault(
        "the places are those that were taken",
        "allowed=allowed_share(found.jobs, places, engines, enough)",
        "allowed=allowed_share(found.jobs, max(1, round(in_flight)), engines, enough)",
        SHARE,
    ),
    Fault(
        "an episode that fails never ends",
        "            found.end = self._clock()\n",
        "            found.end = found.end\n",
        SHARE,
    ),
]
