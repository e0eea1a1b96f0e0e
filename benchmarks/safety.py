"""What safety costs: ledger, fingerprints, heartbeats, tracing and status, in CPU time of the demo's run.

    python benchmarks/safety.py [--steps 40]

The run is the demo's, in its processes. In each of them the functions below add the CPU time of their thread to their
component, nested calls once. The parts are counted from their process's start on, the whole from the first step on, so what
is shown errs to the high side. Heartbeats have no function of their own: one is measured against a real child, on both
sides, and reckoned for the processes and the rate of the demo. The checkpoint's stall is the time for which training waits
for the copy of its state, from the run's own spans: until it is begun, and before the next update, until it is whole.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

TARGET, TARGET_STALL = 0.03, 0.05
LEDGER = ("admit", "finish", "drop", "begin_step", "end_step", "publish", "evaluation", "event", "retain", "_record_waiting")
ACCOUNTS = "TIDEMILL_SAFETY_ACCOUNTS"  # the folder where processes write what they spent
WRITTEN_EVERY_S = 0.5


class Account:
    """CPU seconds by component, of one process; written to `path` now and then, for a process ends without notice."""

    def __init__(self, path: Path | None = None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._path, self._written, self._inside = path, 0.0, threading.local()

    def wrap(self, owner: Any, name: str, component: str) -> None:
        function = inspect.getattr_static(owner, name)
        assert callable(function), name
        setattr(owner, name, self._timed(function, component))

    def _timed(self, function: Callable[..., Any], component: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "on", False):
                return function(*args, **kwargs)
            self._inside.on, begin = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[component] += time.thread_time() - begin
                self._inside.on = False
                self._write()

        return timed

    def _write(self) -> None:
        if self._path is not None and time.monotonic() - self._written > WRITTEN_EVERY_S:
            self._written = time.monotonic()
            beside = self._path.with_suffix(".new")
            beside.write_text(json.dumps(self.seconds))
            os.replace(beside, self._path)


def account_for(account: Account) -> None:
    from tidemill.ledger.ledger import SqliteLedger
    from tidemill.models import fingerprint, served_weights
    from tidemill.observability.trace import Trace
    from tidemill.run import status_file

    for name in LEDGER:
        account.wrap(SqliteLedger, name, "ledger")
    account.wrap(fingerprint.Fingerprint, "add", "fingerprints")
    account.wrap(fingerprint.Fingerprint, "sums", "fingerprints")
    account.wrap(served_weights, "word_bits", "fingerprints")
    account.wrap(Trace, "collect", "tracing")
    account.wrap(Trace, "add", "tracing")
    account.wrap(Trace, "write", "tracing")
    account.wrap(status_file, "write_json", "status")


def serve() -> None:
    """As `tidemill.run.role_main`, accounted for."""
    from tidemill.run.roles import build_role, import_roles, use_threads
    from tidemill.runtime.role_host import host

    def build(spec: dict[str, Any]) -> Any:
        account_for(Account(Path(os.environ[ACCOUNTS]) / f"{spec['name']}-{os.getpid()}.json"))
        return build_role(spec, offload=True)

    host(build, import_roles, use_threads)


def used() -> float:
    """CPU seconds so far, of this process and of all that it has started: those that run, and those that were reaped."""
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:4]) for process in (me, *me.children(recursive=True)))


async def beat_cost(folder: Path, model: Path, beats: int = 300) -> float:
    """CPU seconds of one heartbeat, on both sides together."""
    from tidemill.core.interfaces import Engine
    from tidemill.runtime.local import Local
    from tidemill.runtime.placement import Liveness

    placement = Local(folder, liveness=Liveness(every_s=1e9))
    try:
        handle = await placement.start(
            Engine, "engine", "engine-0", {"model": str(model), "engine": {}, "transport": None}, 1
        )
        child = psutil.Process(handle.pid)
        own, theirs = time.process_time(), sum(child.cpu_times()[:2])
        for _ in range(beats):
            await handle._connection.ping(10.0)
        return (time.process_time() - own + sum(child.cpu_times()[:2]) - theirs) / beats
    finally:
        await placement.close()


def checkpointing(spans: list[dict[str, Any]]) -> tuple[list[float], float]:
    """Seconds for which each checkpoint held up training, and those of a step."""
    stalls, step_s, steps, before = list[float](), 0.0, 0, ""
    for span in sorted((e for e in spans if e.get("name") in ("snapshot", "train", "apply")), key=lambda e: e["ts"]):
        name, seconds = span["name"], span["dur"] / 1e6
        if name != "snapshot":
            step_s, steps, before = step_s + seconds, steps + (name == "apply"), name
        elif before == "apply":  # begun after an update
            stalls.append(seconds)
        elif stalls:  # awaited before the next one
            stalls[-1] += seconds
    return stalls, step_s / steps


def main(steps: int, out: Path | None) -> int:
    import torch

    from tidemill.cli.commands.training import DEMO
    from tidemill.observability.console import ProgressDisplay
    from tidemill.run import roles
    from tidemill.run.recipe import load_recipe
    from tidemill.run.session import run
    from tidemill.runtime.local import Local

    roles.Local = partial(Local, command=[sys.executable, __file__, "--serve"])  # pyright: ignore
    account, totals = Account(), dict[int, float]()
    account_for(account)

    def count(step: int, metrics: dict[str, float]) -> None:
        if "lag/mean" not in metrics:  # a row of an evaluation alone
            return
        if not totals:  # from here on: neither imports nor the warm-up count
            account.seconds.clear()
            for file in accounts.glob("*.json"):
                if not psutil.pid_exists(int(file.stem.rpartition("-")[2])):
                    file.unlink()
        totals[step] = used()

    with tempfile.TemporaryDirectory() as place:
        folder, accounts = Path(place) / "run", Path(place) / "accounts"
        accounts.mkdir()
        os.environ[ACCOUNTS] = str(accounts)
        overrides = [f"run_dir={folder}", f"steps={steps}", "record.checkpoint_every=10", "eval.every=0"]
        config = load_recipe([DEMO], [*overrides, "eval.final_tasks=128"])
        asyncio.run(run(config, ProgressDisplay(steps, mode="quiet"), [count]))
        spans = json.loads((folder / "trace.json").read_text())["traceEvents"]
        beat = asyncio.run(beat_cost(Path(place), folder / "final"))
        for file in accounts.glob("*.json"):
            for component, seconds in json.loads(file.read_text()).items():
                account.seconds[component] += seconds
    total = max(totals.values()) - min(totals.values())
    stalls, step_s = checkpointing(spans)
    beats = max(e["ts"] + e["dur"] for e in spans if "dur" in e) / 1e6 / config.supervise.heartbeat_s
    account.seconds["heartbeats"] = beat * beats * (1 + config.placement.engines)
    rows = {name: seconds / total for name, seconds in sorted(account.seconds.items())}
    share, stall = sum(rows.values()), max(stalls) / step_s
    print(f"{steps} steps, {total:.1f} s of CPU time; one heartbeat {1e6 * beat:.0f} us; torch {torch.__version__}")
    for name, part in rows.items():
        print(f"  {name:14} {account.seconds[name]:8.3f} s   {100 * part:6.2f} %")
    print(f"  {'together':14} {share * total:8.3f} s   {100 * share:6.2f} %   target <= {100 * TARGET:g} %")
    waited = f"{1e3 * max(stalls):.1f} ms (largest of {len(stalls)})"
    print(f"  checkpoint: training waits {waited} for the copy, a step takes {1e3 * step_s:.0f} ms:")
    print(f"  {'stall':14} {'':8}     {100 * stall:6.2f} %   target <= {100 * TARGET_STALL:g} %")
    if out is not None:
        figures = {"total_cpu_s": total, "shares": rows, "together": share, "stall": stall, "beat_s": beat, "steps": steps}
        out.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if share <= TARGET and stall <= TARGET_STALL else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true", help="for the run's own processes")
    given = parser.parse_args()
    if given.serve:
        serve()
    else:
        sys.exit(main(given.steps, given.out))
