"""What safety costs: ledger, fingerprints, heartbeats, tracing and status, in CPU time of the demo's run.

    python benchmarks/safety.py [--steps 40]

The run is the demo's, in one process (`placement=inline`), so that all of it can be accounted where it is spent: each of the
functions below adds the CPU time of its thread to its component, nested calls once. Heartbeats exist only between processes;
they are measured against a real child, per beat, and reckoned for the processes and the rate of the demo. The checkpoint's
stall is the time for which the trainer copies its state, from the run's own spans.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tidemill import health
from tidemill.commands.training import DEMO
from tidemill.ledger.ledger import SqliteLedger
from tidemill.models import fingerprint, served
from tidemill.observability.display import ProgressDisplay
from tidemill.observability.trace import Trace
from tidemill.orchestration.local import Local
from tidemill.orchestration.placement import Liveness
from tidemill.protocols import Engine
from tidemill.recipe import load_recipe
from tidemill.session import run

TARGET, TARGET_STALL = 0.03, 0.05
LEDGER = ("admit", "finish", "drop", "begin_step", "end_step", "publish", "evaluation", "event", "retain")


class Account:
    """CPU seconds by component."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = threading.local()

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

        return timed


def account_for(account: Account) -> None:
    for name in LEDGER:
        account.wrap(SqliteLedger, name, "ledger")
    account.wrap(fingerprint.Fingerprint, "add", "fingerprints")
    account.wrap(fingerprint.Fingerprint, "sums", "fingerprints")
    account.wrap(served, "word_sum", "fingerprints")
    account.wrap(Trace, "collect", "tracing")
    account.wrap(Trace, "add", "tracing")
    account.wrap(Trace, "write", "tracing")
    account.wrap(health, "write_json", "status")


def cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


async def beat_cost(folder: Path, model: Path, beats: int = 300) -> float:
    """CPU seconds of one heartbeat, on both sides together."""
    import psutil

    spec = {"model": str(model), "engine": {}, "carrier": None}
    placement = Local(folder, liveness=Liveness(every_s=1e9))
    handle = await placement.start(Engine, "engine", "engine-0", spec, 1)
    child = psutil.Process(handle.pid)
    own, theirs = time.process_time(), sum(child.cpu_times()[:2])
    for _ in range(beats):
        await handle._connection.ping(10.0)
    spent = time.process_time() - own + sum(child.cpu_times()[:2]) - theirs
    await handle.stop()
    await placement.close()
    return spent / beats


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    steps = parser.parse_args().steps
    out = parser.parse_args().out
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        overrides = [f"run_dir={folder}", f"steps={steps}", "placement.kind=inline", "record.checkpoint_every=10"]
        config = load_recipe([DEMO], [*overrides, "eval.final_tasks=128", "warmup.seconds=40"])
        begin_cpu = [0.0]
        account = Account()

        def first(step: int, metrics: dict[str, float]) -> None:
            if step == 1 and "lag/mean" in metrics:  # from here on: neither imports nor the warm-up count
                account.seconds.clear()
                begin_cpu[0] = cpu()

        account_for(account)
        asyncio.run(run(config, ProgressDisplay(steps, mode="quiet"), [first]))
        total = cpu() - begin_cpu[0]
        spans = json.loads((folder / "trace.json").read_text())["traceEvents"]
        beat = asyncio.run(beat_cost(Path(place), folder / "final"))
        shutil.rmtree(folder)
    spent = {
        name: [e["dur"] / 1e6 for e in spans if e.get("name") == name] for name in ("snapshot", "save", "train", "apply")
    }
    step_s = (sum(spent["train"]) + sum(spent["apply"])) / max(len(spent["apply"]), 1)
    processes, wall = 2, total / 2  # trainer and engine, on two busy cores
    account.seconds["heartbeats"] = beat * processes * wall / config.supervise.heartbeat_s
    rows = {name: seconds / total for name, seconds in sorted(account.seconds.items())}
    share, stall = sum(rows.values()), max(spent["snapshot"]) / step_s
    print(
        f"{steps} steps, {total:.1f} s of CPU time; one heartbeat {1e6 * beat:.0f} us; torch {torch.__version__}, 1 thread"
    )
    for name, part in rows.items():
        print(f"  {name:14} {account.seconds[name]:8.3f} s   {100 * part:6.2f} %")
    print(f"  {'together':14} {share * total:8.3f} s   {100 * share:6.2f} %   target <= {100 * TARGET:g} %")
    copying = 1e3 * max(spent["snapshot"])
    print(
        f"  checkpoint: copying takes {copying:.1f} ms (largest of {len(spent['snapshot'])}), a step {1e3 * step_s:.0f} ms:"
    )
    print(f"  {'stall':14} {'':8}     {100 * stall:6.2f} %   target <= {100 * TARGET_STALL:g} %")
    if out is not None:
        figures = {"total_cpu_s": total, "shares": rows, "together": share, "stall": stall, "beat_s": beat, "steps": steps}
        out.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if share <= TARGET and stall <= TARGET_STALL else 1


if __name__ == "__main__":
    sys.exit(main())
