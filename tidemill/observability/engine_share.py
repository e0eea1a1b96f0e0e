"""Share of the time in which engines compute, and the share that list scheduling of the same episodes allows.

    busy    = W / (M T)     W: seconds in which the M engines computed, in the T seconds until the last episode began
    allowed = V / (M S)     V, S: the same two of the list schedule of these episodes on P places: see `list_schedule`

P is the number of episodes that may be in flight by the settings, not of those that were. The schedule runs the same
episodes in the same order. It keeps the engines' seconds: at every moment an engine's time is divided equally among the
turns that it has begun, and each turn takes what it got so. Between turns an episode is outside for as long as it was.
Both leave out the tail, in which places run empty because no episode follows: a long one would hide what was lost before.
Of a short run, whose places were not taken twice, both count all of it. Times of evaluations are cut out on both sides.

`allowed` is at most 1 and no low bar. In the schedule a place takes the next episode at once: nothing waits for siblings,
for judgements, for the trainer or for new weights, and a turn may have a whole engine for itself, though sampling a reply
alone costs more than its part of a shared step. What it does not know: if engines computed in larger batches, W would be
less. Delays of the controller and of the environment's workers between turns count as outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from tidemill.core.types import Array, Span
from tidemill.observability.episode_times import EpisodeTime, EpisodeTimes
from tidemill.observability.list_schedule import Job, list_schedule
from tidemill.observability.trace import Intervals, common, merged

NOTICED = 0.1  # share of the episodes' time outside of engines below which nothing is said


@dataclass(frozen=True, slots=True)
class EngineShare:
    """The engines' share of the time, beside what is allowed: see the module. Shares are of 1."""

    engines: int
    places: int  # episodes that may be in flight
    episodes: int
    seconds: float  # T
    busy: float
    allowed: float
    in_flight: float  # episodes, on average
    allowed_in_flight: float  # what that many places would allow
    outside: float  # of the episodes' time
    outside_s: float  # of an episode, on average
    queued: float  # of the episodes' time
    outside_median_s: float  # between two turns
    outside_p99_s: float

    @property
    def of_allowed(self) -> float:
        return self.busy / max(self.allowed, 1e-12)


class EngineUse:
    """Collects what an `EngineShare` is computed from, of the latest episodes."""

    def __init__(self, times: EpisodeTimes | None = None) -> None:
        self.times = times or EpisodeTimes()
        self._since, self._now = -inf, -inf
        self._found: tuple[float, EngineShare | None] = (-inf, None)  # the latest one, and of which report
        self._computed: dict[str, Intervals] = {}  # by engine
        self._cut: Intervals = []  # evaluations

    def report(self, now: float, computed: Mapping[str, Intervals], evaluations: Intervals) -> None:
        """Add what processes told until `now`: when each engine computed, and when an evaluation went on."""
        self._now = now
        if (since := self.times.trim()) is not None:
            self._since = since
        kept = [(max(self._since, -1e18), inf)]
        before = {name: self._computed.get(name, []) for name in {**self._computed, **computed}}
        self._computed = {name: common([*old, *computed.get(name, [])], kept) for name, old in before.items()}
        self._cut = common(_joined([*self._cut, *evaluations]), kept)

    def share(self, places: int, older_s: float = 0.0) -> EngineShare | None:
        """The share, or None where it says nothing: engines told nothing, too few episodes, hardly any time outside.

        older_s: how much older than the latest report the answer may be. To compute it takes up to 0.2 s.
        """
        if self._now > self._found[0] + older_s:
            self._found = self._now, self._share(places)
        return self._found[1]

    def _share(self, places: int) -> EngineShare | None:
        begun = [episode for episode in self.times.episodes if episode.begin < self._now]
        goes_on, enough = any(episode.end > self._now for episode in begun), len(begun) >= 2 * places
        if not begun or not self._computed or (goes_on and not enough):
            return None
        first, end = max(self._since, begun[0].begin), self._now if goes_on else max(episode.end for episode in begun)
        axis = _Axis((first, end), self._cut)
        work = sum(axis.length(times) for times in self._computed.values())
        found = _Episodes(begun, axis, work)
        if found.outside < NOTICED or work <= 0:
            return None
        until = begun[-1].begin if enough else end
        spent = _Axis((first, until), self._cut)
        engines, in_flight = len(self._computed), _seconds(begun, spent) / spent.end
        waits = np.array([wait for job in found.jobs for wait in (job[2:-1:2] or [job[0] + job[-1]])])
        return EngineShare(
            engines=engines,
            places=places,
            episodes=len(begun),
            seconds=spent.end,
            busy=sum(spent.length(times) for times in self._computed.values()) / (engines * spent.end),
            allowed=allowed_share(found.jobs, places, engines, enough),
            in_flight=in_flight,
            allowed_in_flight=allowed_share(found.jobs, max(1, round(in_flight)), engines, enough),
            outside=found.outside,
            outside_s=found.outside * found.seconds / len(begun),
            queued=found.queued,
            outside_median_s=float(np.median(waits)),
            outside_p99_s=float(np.quantile(waits, 0.99)),
        )


def allowed_share(jobs: Sequence[Job], places: int, engines: int, filled: bool = True) -> float:
    """The share of the engines' time that the list schedule of these episodes works.

    filled: of the time until the last one begins, in which every place is taken, unless all of them begin at once.
    """
    found = list_schedule(jobs, places, engines)
    work, seconds = (found.work_filled, found.filled) if filled and found.filled > 0 else (found.work, found.makespan)
    return min(1.0, work / max(engines * seconds, 1e-12))


class _Axis:
    """A window of time without some intervals, as an axis that begins at 0."""

    def __init__(self, window: tuple[float, float], cut: Intervals) -> None:
        begin, end = window
        gone, self._at, self._to = 0.0, [begin], [0.0]
        for a, b in common(cut, [window]):
            self._at += [a, b]
            self._to += [a - begin - gone] * 2
            gone += b - a
        self._at.append(end)
        self._to.append(end - begin - gone)
        self.end = self._to[-1]

    def of(self, times: Sequence[float] | Array) -> Array:
        """Places on the axis of these times; those outside of the window are put at its ends."""
        return np.asarray(np.interp(times, self._at, self._to))

    def length(self, times: Intervals) -> float:
        """Seconds of the axis that disjoint intervals cover."""
        begins, ends = zip(*times, strict=True) if times else ((), ())
        return float((self.of(ends) - self.of(begins)).sum())


class _Episodes:
    """Episodes as jobs for a list schedule, with the work of all turns adding up to `work`."""

    def __init__(self, episodes: Sequence[EpisodeTime], axis: _Axis, work: float) -> None:
        turns = [turn for episode in episodes for turn in episode.turns]
        asked, begun, answered = (axis.of([getattr(t, name) for t in turns]) for name in ("asked", "begun", "answered"))
        own = _equal_parts([turn.engine for turn in turns], begun, answered)
        own *= work / max(own.sum(), 1e-12)
        ends = axis.of([min(episode.end, 1e18) for episode in episodes])
        begins = axis.of([episode.begin for episode in episodes])
        self.jobs, at = list[list[float]](), 0
        for episode, begin, end in zip(episodes, begins.tolist(), ends.tolist(), strict=True):
            upto = at + len(episode.turns)
            rows = zip(asked[at:upto].tolist(), answered[at:upto].tolist(), own[at:upto].tolist(), strict=True)
            self.jobs.append(_job(begin, end, sorted(rows)))
            at = upto
        self.seconds = float((ends - begins).sum())
        self.outside = sum(sum(job[::2]) for job in self.jobs) / max(self.seconds, 1e-12)
        self.queued = float((begun - asked).sum()) / max(self.seconds, 1e-12)


def _seconds(episodes: Sequence[EpisodeTime], axis: _Axis) -> float:
    """Seconds of all episodes together."""
    return float((axis.of([min(each.end, 1e18) for each in episodes]) - axis.of([each.begin for each in episodes])).sum())


def _job(begin: float, end: float, turns: Sequence[tuple[float, float, float]]) -> list[float]:
    """The phases of one episode. turns: (asked, answered, work); those under way at one time are one phase."""
    phases, since = list[float](), begin
    for asked, answered, work in turns:
        if phases and asked < since:
            phases[-1] += work
        elif answered > begin or work > 0:  # else it was over before the window
            phases += [max(0.0, asked - since), work]
        since = max(since, answered)
    return [*phases, max(0.0, end - since)]


def _equal_parts(engines: Sequence[str], begun: Array, answered: Array) -> Array:
    """Each turn's part of its engine's time: at every moment, the same for all turns that it has begun."""
    parts, names = np.zeros(len(begun)), np.array(engines, dtype=np.str_)
    for name in set(engines):
        own = names == name
        times = np.unique(np.concatenate([begun[own], answered[own]]))
        first, last = np.searchsorted(times, begun[own]), np.searchsorted(times, answered[own])
        under_way = np.cumsum(np.bincount(first, minlength=len(times)) - np.bincount(last, minlength=len(times)))
        each = np.diff(times) / np.maximum(under_way[:-1], 1)  # what each gets of the time until the next change
        got = np.concatenate([[0.0], np.cumsum(each)])
        parts[own] = got[last] - got[first]
    return parts


def _joined(times: Intervals) -> Intervals:
    return merged([Span("", *each) for each in times])
