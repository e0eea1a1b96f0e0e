"""Many episodes whose tools are slow: how much of the time the engine computes, beside what list scheduling allows.

    python benchmarks/slow_tools.py [--groups 8] [--group-size 4] [--lag 32] [--window 80] [--steps 60] [--tokens 96]

Each episode replies four times and calls a tool between (log-normal, median 0.5 s, 99 % within 12 s), in a real run: one
engine and one trainer with a thread each, and two workers of the environment. The defaults keep some 200 episodes in flight.
The figures are those of `tidemill why`; the waits that the environment drew stand beside those that the controller saw.
Prints a table and writes `results/slow_tools.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import save, table, wait_until_quiet

import tidemill
from tidemill.models.new_model import SIZES, ModelSize, fresh_model

HERE = Path(__file__).parent
sys.path.append(str(HERE / "systems"))
from tools_task import ALPHABET, REPLIES  # noqa: E402

TARGET = 0.85
MODELS: dict[str, ModelSize] = {
    **SIZES,
    "0.7m": {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "intermediate": 384},
}


def measure(model: Path, place: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of one run."""
    begin = time.perf_counter()
    tidemill.train(
        f"{HERE / 'systems' / 'tools_task.py'}:slow_tools",
        str(model),
        run_dir=place,
        quiet=True,
        seed=0,
        steps=args.steps,
        max_lag=args.lag,
        rollout={
            "groups": args.groups,
            "group_size": args.group_size,
            "max_tokens": args.tokens,
            "window": args.window,
        },
        trainer={"lr": 1e-6},
        engine={"device": "cpu", "max_sequences": 256},
        placement={"engine_threads": 1, "trainer_threads": 1, "environment": {"workers": 2}},
        algorithm={"name": "grpo", "zero_variance": "keep"},
        eval={"every": 0, "tasks": 1, "final_tasks": 1},
        record={"checkpoint_every": 0, "probe_every": 0},
    )
    seconds = time.perf_counter() - begin
    report = json.loads((place / "report.json").read_text())
    found = report["engine_share"] or {}
    with sqlite3.connect(place / "ledger.sqlite") as ledger:
        drawn = [json.loads(parts)["tool_s"] for (parts,) in ledger.execute("SELECT parts FROM outcomes")]
    time_of = report["time_by_process"]
    print(json.dumps({"text": found.get("text"), "time": time_of, "tokens": report["engine_tokens"]}, indent=1))
    row = {name: found.get(name) for name in ("busy", "allowed", "of_allowed", "in_flight", "places", "allowed_in_flight")}
    row |= {"outside_s/episode": found.get("outside_s"), "drawn_s/episode": sum(drawn) / len(drawn)}
    return row | {"episodes": len(drawn), "run_s": seconds, "trains": time_of["trainer"].get("train", 0.0)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="0.7m", choices=MODELS)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--lag", type=int, default=32)
    parser.add_argument("--window", type=int, default=80)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        fresh_model(Path(place) / "model", alphabet=ALPHABET, context=1024, **MODELS[args.size])
        for number in range(args.repeats):
            wait_until_quiet()
            rows.append(measure(Path(place) / "model", Path(place) / f"run-{number}", args) | {"load": os.getloadavg()[0]})
    print(table(rows))
    print(f"target: of_allowed at least {TARGET}; {REPLIES} replies an episode")
    print(f"written to {save('slow_tools', rows, vars(args))}")


if __name__ == "__main__":
    main()
