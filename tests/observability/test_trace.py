"""Spans: one clock, merged busy time, overlap, shares, a bounded file that covers the whole run, tracks without overlaps."""

from __future__ import annotations

import itertools
import json
import resource
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.core.types import Span
from tidemill.observability.trace import Trace, common, length, merged

TENTHS = st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda p: (p[0], p[0] + p[1]))
INTERVALS = st.lists(TENTHS, max_size=12)


def spans(*intervals, name: str = "generate") -> list[Span]:
    return [Span(name, float(a), float(b)) for a, b in intervals]


def busy_seconds(of: list[Span], names: Collection[str] | None = None, start: float = 0, end: float = 1e9) -> float:
    return length(common(merged(of, names), [(start, end)]))


def painted(intervals, low: int = 0, high: int = 100) -> np.ndarray:
    """The same thing done the slow way: a cell for each unit of time."""
    cells = np.zeros(100, bool)
    for a, b in intervals:
        cells[a:b] = True
    cells[:low] = cells[high:] = False
    return cells


@settings(derandomize=True)
@given(INTERVALS, INTERVALS, st.integers(0, 50), st.integers(0, 50))
def test_busy_and_overlap_are_those_of_the_painted_line(a, b, start, width) -> None:
    end = start + width
    assert busy_seconds(spans(*a)) == painted(a).sum()
    assert busy_seconds(spans(*a), start=start, end=end) == painted(a, start, end).sum()
    both = common(merged(spans(*a)), merged(spans(*b)))
    assert length(both) == (painted(a) & painted(b)).sum()
    assert length(common(both, [(start, end)])) == (painted(a, start, end) & painted(b, start, end)).sum()


def test_busy_by_name() -> None:
    mixed = spans((0, 2), (1, 3)) + spans((2, 9), name="commit")
    assert busy_seconds(mixed, {"generate"}) == 3 and busy_seconds(mixed) == 9 and busy_seconds(mixed, ()) == 0
    assert busy_seconds(mixed, start=4, end=2) == 0  # an empty window


def test_the_file_is_chromes_format(tmp_path: Path) -> None:
    trace = Trace()
    trace.add("trainer", 11, [Span("train", 100.5, 101.0, {"step": 3})])
    trace.add("engine-0", 12, [Span("generate", 100.0, 102.0)])
    trace.add("engine-0", 13, [Span("generate", 103.0, 104.0)])  # restarted: a track of its own
    trace.write(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    names = {e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert sorted(names.values()) == ["engine-0 (pid 12)", "engine-0 (pid 13)", "trainer (pid 11)"]
    events = {names[e["pid"]]: e for e in document["traceEvents"] if e["ph"] == "X"}
    trained = events["trainer (pid 11)"]
    assert (trained["name"], trained["ts"], trained["dur"], trained["args"]) == ("train", 0.5e6, 0.5e6, {"step": 3})
    assert events["engine-0 (pid 13)"]["ts"] == 3e6
    assert document["otherData"]["origin_s"] == 100.0 and document["otherData"]["coarsened_s"] == 0
    assert len(trace.spans("engine-0")) == 2


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    """A limit on the size of files cuts it off, as a full disk does."""
    trace = Trace()
    trace.add("a", 0, [Span("x", 0, 1)])
    trace.write(tmp_path / "trace.json")
    before = (tmp_path / "trace.json").read_bytes()

    trace.add("a", 0, [Span("y", 2, 3)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before), hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            trace.write(tmp_path / "trace.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "trace.json").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


@settings(derandomize=True)
@given(INTERVALS)
def test_spans_of_one_lane_follow_or_nest(tmp_path_factory: pytest.TempPathFactory, intervals) -> None:
    trace = Trace()
    trace.add("controller", 0, spans(*intervals, name="reward"))
    path = tmp_path_factory.mktemp("lanes") / "t.json"
    trace.write(path)
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(intervals)
    for i, a in enumerate(events):
        for b in events[i + 1 :]:
            if a["tid"] == b["tid"]:
                a_end, b_end = a["ts"] + a["dur"], b["ts"] + b["dur"]
                assert b["ts"] >= a_end or b_end <= a_end, (a, b)


@pytest.mark.runs
def test_a_long_run_is_drawn_coarsely_and_whole() -> None:
    """A decode step each 10 ms, 1 ms apart, for 1,000 s, with a pause of 5 s in the middle; and a trainer."""
    trace = Trace(limit=1000)
    for i in range(100_000):
        begin = i * 0.01 + (5.0 if i >= 50_000 else 0)
        trace.add("engine", 1, [Span("generate", begin, begin + 0.009)])
        if i % 100 == 0:
            trace.add("trainer", 2, [Span("train", begin, begin + 0.5)])
        assert len(trace) <= 1000
    engine, trainer = trace.spans("engine"), trace.spans("trainer")
    assert engine[0].start == 0 and engine[-1].end == pytest.approx(1005, abs=0.01)
    assert busy_seconds(engine, start=500.1, end=504.9) == 0  # the pause is still seen
    assert sum(s.args.get("spans", 1) for s in engine) == 100_000 and sum(s.args.get("spans", 1) for s in trainer) == 1000
    assert sum(s.args.get("busy_s", s.end - s.start) for s in engine) == pytest.approx(900, abs=0.01)
    assert 0.001 <= trace.coarse < 4


def test_joined_spans_that_overlapped_are_busy_once() -> None:
    trace = Trace(limit=4)
    trace.add("a", 0, spans((0, 4), (1, 3), (2, 6), (8, 9), (9, 10)))
    assert [(s.start, s.end, s.args) for s in trace.spans("a")] == [
        (0, 6, {"spans": 3, "busy_s": 6}),
        (8, 10, {"spans": 2, "busy_s": 2}),
    ]


def test_more_names_than_the_limit_still_end() -> None:
    trace = Trace(limit=10)
    for i in range(200):
        trace.add("a", 0, [Span(f"name-{i}", i, i + 1)])
    assert len(trace) <= 10 and trace.spans("a")[-1].name == "name-199"


def test_the_clock_is_one_for_all_processes() -> None:
    for name in ("monotonic", "perf_counter"):
        info = time.get_clock_info(name)
        assert info.monotonic and info.implementation in ("clock_gettime(CLOCK_MONOTONIC)", "mach_absolute_time()")
    before = time.monotonic()
    code = "import time; print(time.monotonic(), time.perf_counter())"
    out = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=20, check=True).stdout
    after = time.monotonic()
    for reading in map(float, out.split()):
        assert before < reading < after


@pytest.mark.slow
def test_a_span_takes_little_memory_and_comes_back_as_it_was() -> None:
    """A run keeps a hundred thousand of them in its controller, and what joins them is no larger than they are."""
    tracemalloc.start()
    try:
        trace, before = Trace(limit=5_000), tracemalloc.get_traced_memory()[0]
        for k in range(5_000):
            trace.add("controller", 1, [Span(f"kind-{k % 10}", k, k + 0.5, {"group": k} if k % 2 else {})])
        taken = tracemalloc.get_traced_memory()[0] - before
        seventh, eighth = itertools.islice(trace.spans("controller"), 7, 9)
        tracemalloc.reset_peak()
        trace.add("controller", 1, [Span("kind-0", 5_000, 5_001)])
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert taken < 60 * 5_000, taken
    assert len(trace) < 5_000 and peak < 4 * taken, (len(trace), peak)
    assert seventh == Span("kind-7", 7.0, 7.5, {"group": 7})
    assert eighth == Span("kind-8", 8.0, 8.5)
