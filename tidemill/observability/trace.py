"""Trace of all processes on one clock (trace.json), and arithmetic on time intervals.

The file opens in https://ui.perfetto.dev. Spans are stamped with `time.monotonic()` or `time.perf_counter()`. On Linux
and macOS both read one clock for the whole machine, so spans of different processes need no alignment; across machines
they would.

The file is bounded and still covers the whole run. When there are too many spans, neighbours of one name that lie within
a gap become one span, whose `args` hold their number and their busy time; the gap is doubled until they fit.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from tidemill.core.types import Span

_FIRST_GAP_S = 0.001


_JOINED = ("spans", "busy_s")  # the args of a span that stands for several


class _Track:
    """The spans of one process, packed into arrays.

    A run keeps a hundred thousand spans; as objects they would be most of the controller's memory. Nothing here makes an
    object for every span at once, or joining spans would leave the process as large as before.
    """

    def __init__(self) -> None:
        self._kinds: list[tuple[str, tuple[str, ...]]] = []  # name, and the names of its args
        self._numbers: dict[tuple[str, tuple[str, ...]], int] = {}  # kind -> its index in `_kinds`
        self._kind, self._at = array("L"), array("L")  # per span: its kind; where its args begin in `_values`
        self._start, self._end, self._values = array("d"), array("d"), array("d")

    def add(self, name: str, start: float, end: float, args: Mapping[str, float]) -> None:
        self._kind.append(self._number(name, tuple(args)))
        self._at.append(len(self._values))
        self._start.append(start)
        self._end.append(end)
        self._values.extend(args.values())

    def __len__(self) -> int:
        return len(self._kind)

    def __iter__(self) -> Iterator[Span]:
        return self._chosen(range(len(self)))

    @property
    def extent(self) -> tuple[float, float]:
        """The first start and the last end."""
        return min(self._start, default=math.inf), max(self._end, default=-math.inf)

    def latest(self, count: int) -> _Track:
        track = _Track()
        for span in self._chosen(range(len(self) - count, len(self))):
            track.add(span.name, span.start, span.end, span.args)
        return track

    def joined(self, gap: float) -> _Track:
        """A track in which neighbours of one name at most `gap` seconds apart are one span."""
        track, latest = _Track(), dict[str, int]()  # name -> where its latest span is in `track`
        for span in self._chosen(np.argsort(np.frombuffer(self._start), kind="stable")):
            at = latest.get(span.name)
            if at is None or span.start - track._end[at] > gap:
                latest[span.name] = len(track)
                track.add(span.name, span.start, span.end, span.args)
            else:
                track._extend(at, span)
        return track

    def _extend(self, at: int, span: Span) -> None:
        """Extend the span at `at` by one that begins later."""
        into = next(self._chosen([at]))
        fresh = max(0.0, min(_busy(span), span.end - max(into.end, span.start)))  # an overlap counts once
        joined = into.args.get("spans", 1) + span.args.get("spans", 1), round(_busy(into) + fresh, 6)
        self._kind[at] = self._number(span.name, _JOINED)
        if tuple(into.args) != _JOINED:
            self._at[at] = len(self._values)
            self._values.extend(joined)
        else:
            self._values[self._at[at] : self._at[at] + len(_JOINED)] = array("d", joined)
        self._end[at] = max(into.end, span.end)

    def _number(self, name: str, keys: tuple[str, ...]) -> int:
        kind = name, keys
        number = self._numbers.setdefault(kind, len(self._kinds))
        if number == len(self._kinds):
            self._kinds.append(kind)
        return number

    def _chosen(self, places: Iterable[SupportsIndex]) -> Iterator[Span]:
        for i in places:
            name, keys = self._kinds[self._kind[i]]
            values = self._values[self._at[i] : self._at[i] + len(keys)]
            whole = (int(value) if value.is_integer() else value for value in values)
            yield Span(name, self._start[i], self._end[i], dict(zip(keys, whole, strict=True)))


class Trace:
    """Collects the spans of all processes, one track each, and writes them."""

    def __init__(self, limit: int = 100_000) -> None:
        """limit: greatest number of spans kept."""
        if limit < 2:
            raise ValueError(f"limit={limit}: expected at least 2 spans")
        self._limit, self._gap, self._coarsened = limit, _FIRST_GAP_S, False
        self._tracks: dict[tuple[str, int], _Track] = {}
        self._offset = time.time() - time.monotonic()

    def __len__(self) -> int:
        return sum(map(len, self._tracks.values()))

    def add(self, process: str, pid: int, spans: Sequence[Span]) -> None:
        """Add spans. pid tells a restarted process from its predecessor; 0 if it is never restarted."""
        if not spans:
            return
        track = self._tracks.setdefault((process, pid), _Track())
        for span in spans:
            track.add(span.name, span.start, span.end, span.args)
        if len(self) > self._limit:
            self._coarsen()

    def spans(self, process: str) -> list[Span]:
        """All spans of a process, under all its pids, by start."""
        return sorted(
            (s for (name, _), track in self._tracks.items() if name == process for s in track), key=lambda s: s.start
        )

    def document(self) -> dict[str, Any]:
        """The trace in Chrome's trace format."""
        origin = min((track.extent[0] for track in self._tracks.values()), default=0.0)
        events = [e for i, (key, track) in enumerate(self._tracks.items(), 1) for e in _track_events(i, key, track, origin)]
        other = {
            "clock": "time.monotonic",
            "origin_s": origin,
            "origin_unix_s": self._offset + origin,
            "coarsened_s": self.coarse,
        }
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}

    def write(self, path: str | Path) -> None:
        """Write the document to a file, which appears whole or not at all."""
        path, document = Path(path), self.document()
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".trace-", suffix=".json")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(json.dumps(document, separators=(",", ":")))  # several times as fast as json.dump
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    @property
    def coarse(self) -> float:
        """The gap in seconds below which neighbouring spans were joined; 0 if none were."""
        return self._gap if self._coarsened else 0.0

    def _coarsen(self) -> None:
        """Join spans until at most half the limit is left; in the end one for each process and name."""
        self._coarsened = True
        self._join_all()
        starts, ends = zip(*(track.extent for track in self._tracks.values()), strict=True)
        extent = max(ends) - min(starts)
        while len(self) > self._limit // 2:
            if self._gap > extent:  # more names than the limit holds: each process keeps its latest spans
                most = self._limit // (2 * len(self._tracks))
                self._tracks = {key: track.latest(min(most, len(track))) for key, track in self._tracks.items()}
                return
            self._gap *= 2
            self._join_all()

    def _join_all(self) -> None:
        for key, track in self._tracks.items():
            self._tracks[key] = track.joined(self._gap)


def _busy(span: Span) -> float:
    return span.args.get("busy_s", span.end - span.start)


def _track_events(track: int, key: tuple[str, int], spans: Iterable[Span], origin: float) -> Iterable[dict[str, Any]]:
    name, pid = key
    title = f"{name} (pid {pid})" if pid else name
    yield {"ph": "M", "name": "process_name", "pid": track, "tid": 1, "args": {"name": title}}
    yield {"ph": "M", "name": "process_sort_index", "pid": track, "tid": 1, "args": {"sort_index": track}}
    lanes: list[list[float]] = []  # for each lane, the ends of its open spans
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        lane = _lane(lanes, span)
        event = {"ph": "X", "name": span.name, "pid": track, "tid": lane + 1, "ts": round((span.start - origin) * 1e6, 1)}
        event["dur"] = round((span.end - span.start) * 1e6, 1)
        yield {**event, "args": span.args} if span.args else event


def _lane(lanes: list[list[float]], span: Span) -> int:
    """The index of the first lane where the span follows, or lies within, all others: viewers draw no partial overlap."""
    for i, ends in enumerate(lanes):
        while ends and ends[-1] <= span.start:
            ends.pop()
        if not ends or span.end <= ends[-1]:
            ends.append(span.end)
            return i
    lanes.append([span.end])
    return len(lanes) - 1


Intervals = list[tuple[float, float]]


def merged(spans: Iterable[Span], names: Collection[str] | None = None) -> Intervals:
    """Intervals in which at least one span (of these names) was open: disjoint and ordered."""
    result: Intervals = []
    for start, end in sorted((s.start, s.end) for s in spans if names is None or s.name in names):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def common(a: Intervals, b: Intervals) -> Intervals:
    """The intersection of two lists of disjoint, ordered intervals."""
    result, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if low < high:
            result.append((low, high))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return result


def length(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals)
