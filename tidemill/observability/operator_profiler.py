"""Operator profile of two steps (`profile = true`), on one time axis with the spans.

    from publication FIRST to LAST that a process sees: torch's profiler -> profile/NAME-PID.jsonl.gz
    at the end of the run, with the spans of `Trace`: profile.json.gz, for https://ui.perfetto.dev

torch stamps events with the system's clock, spans use the monotonic one; the two agree to about a millisecond.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tidemill.observability.trace import Trace

FIRST, LAST = 2, 4  # in the first steps everything is cold
_OWN = 1_000_000  # operators have tracks of their own: a process's spans are under a smaller number
_recording = False  # torch has one profiler per process, which sees all threads; the first role takes it


class _Event(msgspec.Struct):
    """An event as torch writes it, in microseconds since torch's own base."""

    ph: str
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0
    pid: int | str = 0


class _Recorded(msgspec.Struct):
    baseTimeNanoseconds: int
    traceEvents: list[_Event]


def attach(role: Any, method: str, name: str, folder: Path, per_step: int = 1) -> None:
    """Profile `role`'s process between publications FIRST and LAST, if it lasts so long.

    method: called `per_step` times in a publication.
    """
    inner, close, calls = getattr(role, method), role.close, 0
    profiler: Any = None

    async def counted(*given: Any) -> Any:
        nonlocal calls, profiler
        result = await inner(*given)
        calls += 1
        if calls == FIRST * per_step:
            profiler = _started()
        elif calls == LAST * per_step and profiler is not None:
            _stop(profiler)
            _write(profiler, name, folder)
            profiler = None
        return result

    async def closed() -> None:
        nonlocal profiler
        if profiler is not None:
            _stop(profiler)
            profiler = None
        await close()

    setattr(role, method, counted)
    role.close = closed


def _started() -> Any:
    """A running profiler; None if this process already has one."""
    global _recording
    if _recording:
        return None
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import profile

    _recording = True
    profiler = profile(experimental_config=_ExperimentalConfig(profile_all_threads=True))
    profiler.start()
    return profiler


def _stop(profiler: Any) -> None:
    global _recording
    profiler.stop()
    _recording = False


def _write(profiler: Any, name: str, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        profiler.export_chrome_trace(f"{place}/trace.json")
        recorded = msgspec.json.decode(Path(place, "trace.json").read_bytes(), type=_Recorded)
        own = Path(place, "own")
        with gzip.open(own, "wb", compresslevel=1) as file:
            file.write(msgspec.json.encode({"base_us": recorded.baseTimeNanoseconds // 1000, "name": name}) + b"\n")
            for event in recorded.traceEvents:
                if event.ph == "X" and event.cat != "Trace" and isinstance(event.tid, int):
                    file.write(msgspec.json.encode(event) + b"\n")
        os.replace(own, folder / f"{name}-{os.getpid()}.jsonl.gz")


def merge(folder: Path, trace: Trace, path: Path) -> bool:
    """Write the profiles in `folder` and the trace's spans to `path`; False if there are no profiles."""
    parts = sorted(folder.glob("*.jsonl.gz"))
    if not parts:
        return False
    document = trace.document()
    events, origin_us = document.pop("traceEvents"), round(document["otherData"]["origin_unix_s"] * 1e6)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with gzip.open(partial, "wt", compresslevel=4) as file:
            file.write(json.dumps(document, separators=(",", ":"))[:-1] + ',"traceEvents":[\n')
            file.write(",\n".join(json.dumps(event, separators=(",", ":")) for event in events))
            for number, part in enumerate(parts):
                for event in _shifted(part, _OWN + number, origin_us):
                    file.write(",\n" + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    shutil.rmtree(folder)
    return True


def _shifted(part: Path, track: int, origin_us: int) -> Iterator[dict[str, Any]]:
    """The events of one process, with times counted from the trace's origin."""
    with gzip.open(part, "rb") as lines:
        head = json.loads(next(lines))
        pid = part.name.removesuffix(".jsonl.gz").rpartition("-")[2]
        yield {"ph": "M", "name": "process_name", "pid": track, "args": {"name": f"{head['name']} (pid {pid}): operators"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": track, "args": {"sort_index": track}}
        for line in lines:
            event = msgspec.json.decode(line, type=_Event)
            event.pid, event.ts = track, round(event.ts + (head["base_us"] - origin_us), 3)
            yield msgspec.to_builtins(event)
