"""List schedules: how long a list of jobs takes on a number of places, when nothing but the jobs themselves takes time.

A job is a list of phases, by turns outside of the servers and with them: [outside, served, outside, served, ...], in
seconds of each. Jobs begin in the order of the list, and a place takes the next one as soon as it is free. A phase outside
takes its time, beside all others. Servers share their time equally among the phases that are with them, and give none of
them more than one server: of n phases each gets min(1, servers / n) seconds of work a second. So no server is idle while
there are phases enough for all.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

Job = Sequence[float]  # seconds of its phases: outside, served, outside, served, ...


@dataclass(frozen=True, slots=True)
class ListSchedule:
    """The length of a schedule, and the work that servers do in it, in seconds."""

    makespan: float  # until the last job has ended
    work: float  # of all servers together
    filled: float  # until the last job begins; until then every place is taken
    work_filled: float  # work until then


def list_schedule(jobs: Sequence[Job], places: int, servers: int = 1) -> ListSchedule:
    """The list schedule of these jobs: see the module. It takes time in proportion to the phases, but for a logarithm."""
    assert places > 0 and servers > 0 and all(jobs), (places, servers)
    schedule = _Schedule(jobs, servers)
    for _ in range(min(places, len(jobs))):
        schedule.begin_next()
    while schedule.ends_phase():
        pass
    return ListSchedule(schedule.now, schedule.work, schedule.filled, schedule.work_filled)


class _Schedule:
    """The state of a schedule at one moment.

    `given` is the work that a phase would have got that was with the servers from the beginning. All phases there get the
    same, so one that comes at `given` and needs w ends when `given` has grown by w.
    """

    def __init__(self, jobs: Sequence[Job], servers: int) -> None:
        self.now = self.work = self.filled = self.work_filled = 0.0
        self._jobs, self._servers, self._given = jobs, servers, 0.0
        self._begun, self._phase = 0, [0] * len(jobs)
        self._outside: list[tuple[float, int]] = []  # (when the phase ends, job)
        self._served: list[tuple[float, int]] = []  # (`given` when the phase ends, job)

    def begin_next(self) -> None:
        """Begin the next job of the list, if there is one."""
        if self._begun < len(self._jobs):
            self._begun += 1
            self.filled, self.work_filled = self.now, self.work
            self._enter(self._begun - 1)

    def ends_phase(self) -> bool:
        """Go on to the next end of a phase. Returns False when all jobs have ended."""
        if not self._outside and not self._served:
            return False
        rate = min(1.0, self._servers / max(len(self._served), 1))
        until = self._outside[0][0] if self._outside else inf
        served = self.now + (self._served[0][0] - self._given) / rate if self._served else inf
        now = min(until, served)
        self.work += (now - self.now) * rate * len(self._served)
        if served <= until:
            self._given, job = heapq.heappop(self._served)
        else:
            self._given += (now - self.now) * rate
            _, job = heapq.heappop(self._outside)
        self.now = now
        self._phase[job] += 1
        self._enter(job)
        return True

    def _enter(self, job: int) -> None:
        """Enter the present phase of a job, or the next job where it has ended."""
        phase = self._phase[job]
        if phase == len(self._jobs[job]):
            self.begin_next()
        elif phase % 2:
            heapq.heappush(self._served, (self._given + self._jobs[job][phase], job))
        else:
            heapq.heappush(self._outside, (self.now + self._jobs[job][phase], job))
