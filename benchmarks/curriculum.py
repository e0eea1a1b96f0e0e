"""How many samples each order of tasks, retirement and replay need where three tasks in four are out of reach.

    python benchmarks/curriculum.py [--seeds 0 1 2 3 4] [--steps 60] [--only NAME ...]

The task is `systems/graded.py`, with a 0.1 M-parameter model that knows nothing; everything in one process with one
thread. A run has arrived when greedy accuracy on held-out tasks, looked at every `EVERY` steps, reaches `GOAL`; one
that does not within its steps is censored, its samples are "over" what it had. Prints a table and writes
`results/curriculum.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import HERE, save, table

import tidemill
from tidemill.models.new_model import SIZES, fresh_model

sys.path.append(str(HERE / "systems"))
from graded import ALPHABET

GOAL, EVERY, LR = 0.8, 5, 1e-3
GROUPS, SAMPLES = 8, 8
WAYS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "shuffled, retire": {"retire": 0.9},
    "frontier": {"order": "frontier"},
    "frontier, retire": {"order": "frontier", "retire": 0.9},
    "easy_first, retire": {"order": "easy_first", "retire": 0.9},
    "mixed": {"order": "mixed"},
    "shuffled, replay a quarter": {"replay": {"share": 0.25}},
    "shuffled, replay as many": {"replay": {"share": 1.0}},
}


def train(place: Path, data: dict[str, Any], seed: int, model: Path, steps: int) -> dict[str, Any]:
    begin = time.monotonic()
    retired = ""
    try:
        tidemill.train(
            f"{HERE / 'systems' / 'graded.py'}:score",
            model,
            run_dir=place,
            quiet=True,
            steps=steps,
            max_lag=1,
            seed=seed,
            data=data,
            algorithm={"name": "dr_grpo", "entropy": 0.02, "zero_variance": "drop"},
            placement={"kind": "inline", "environment": {"workers": 0}},
            scoring={"workers": 0, "accept": ["gold", "garbage"]},
            trainer={"lr": LR},
            rollout={"groups": GROUPS, "group_size": SAMPLES, "max_tokens": 1},
            engine={"max_sequences": 256},
            eval={"every": EVERY, "tasks": 18, "final_tasks": 18},
            record={"checkpoint_every": 0, "trace": False, "probe_every": 0},
        )
    except RuntimeError as error:  # every task is retired before the steps are over
        retired = str(error).partition(":")[0]
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    held_out = {line["step"]: line["eval/accuracy"] for line in lines if "eval/n" in line}
    arrived = next((step for step, accuracy in sorted(held_out.items()) if accuracy >= GOAL), None)
    last = [line for line in lines if "data/seen" in line][-1]
    dropped = {line["step"]: line.get("dropped/zero-variance") or 0.0 for line in lines if "lag/mean" in line}
    sampled = {s: (s * GROUPS + sum(n for at, n in dropped.items() if at <= s)) * SAMPLES for s in held_out}
    return {
        "samples": None if arrived is None else int(sampled[arrived]),
        "steps": arrived,
        "dropped": sum(dropped.values()) / (sum(dropped.values()) + len(dropped) * GROUPS),
        "held_out": held_out,
        "retired": last["data/retired"],
        "ended": retired,
        "seconds": time.monotonic() - begin,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as place:
        model = Path(place) / "model"
        fresh_model(model, alphabet=ALPHABET, context=32, **SIZES["0.1m"])
        for name in given.only:
            found[name] = [
                train(Path(place) / f"{name}-{seed}".replace(", ", "-"), WAYS[name], seed, model, given.steps)
                for seed in given.seeds
            ]
            print(table([_row(name, found[name])]), flush=True)
    print(table([_row(name, runs) for name, runs in found.items()]))
    print(save("curriculum", found, {"tidemill": tidemill.__name__}))


def _row(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    there = [run for run in runs if run["samples"] is not None]
    samples = sorted(run["samples"] for run in there)
    return {
        "order": name,
        "arrived": f"{len(there)} of {len(runs)}",
        **{"samples": _shown(samples, statistics.median), "least": _shown(samples, min), "most": _shown(samples, max)},
        "steps": _shown([run["steps"] for run in there], statistics.median),
        "dropped": f"{statistics.median(run['dropped'] for run in runs):.0%}",
        "retired": f"{statistics.median(run['retired'] for run in runs):.0%}",
        "seconds": statistics.median(run["seconds"] for run in runs),
    }


def _shown(numbers: list[int], one: Callable[[list[int]], float]) -> str:
    """Of those that arrived."""
    return f"{one(numbers):,.0f}" if numbers else "-"


if __name__ == "__main__":
    main()
