"""Every preset learns; and what lag does without and with each correction.

    python benchmarks/algorithms.py [presets lag] [--quick] [--only NAME ...]

    presets   held-out accuracy and reward before and after `STEPS` steps, three seeds at max_lag 4 and one at 0, wall time
    lag       the same for losses and corrections at max_lag 0, 4, 16 and 64, until it breaks: `docs/lag.png`

The task is `systems/first_letter.py`, with a 0.1 M-parameter model that knows nothing; everything in one process with one
thread. A teacher, for distillation, is the model that one run of GRPO ended with. Prints tables, writes
`results/algorithms.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from harness import HERE, save, table

import tidemill
from tidemill.algorithms.presets import PRESETS
from tidemill.models.fresh import SIZES, fresh_model

sys.path.append(str(HERE / "systems"))
from first_letter import ALPHABET

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STEPS, LR = 120, 3e-3
LAGS = (0, 4, 16, 64)
ON_OLD = {"old_logprobs": "recompute"}
WAYS: dict[str, dict[str, Any]] = {
    "no correction": {"name": "dr_grpo", "loss": "reinforce", "reduction": "token"},
    "PPO clip on mu": {"name": "dr_grpo", "loss": "ppo_clip", "reduction": "token"},
    "TIS (token)": {"name": "dr_grpo", "loss": "reinforce", "reduction": "token", **ON_OLD, "corrections": ["tis"]},
    "TIS (sequence)": {
        "name": "dr_grpo",
        "loss": "reinforce",
        "reduction": "token",
        **ON_OLD,
        "corrections": ["tis_sequence"],
    },
    "IcePop": {"name": "dr_grpo", "loss": "reinforce", "reduction": "token", **ON_OLD, "corrections": ["icepop"]},
    "AIPO": {"name": "aipo"},
    "decoupled PPO": {"name": "decoupled_ppo", "advantage": "dr_grpo"},
    "M2PO": {"name": "m2po", "advantage": "dr_grpo"},
}


def train(place: Path, algorithm: dict[str, Any], seed: int, max_lag: int, model: Path, steps: int) -> dict[str, Any]:
    begin = time.monotonic()
    run = tidemill.train(
        f"{HERE / 'systems' / 'first_letter.py'}:first_letter",
        model,
        run_dir=place,
        quiet=True,
        steps=steps,
        max_lag=max_lag,
        seed=seed,
        algorithm=algorithm,
        placement={"kind": "inline", "environment": {"workers": 0}},
        trainer={"lr": LR},
        rollout={"groups": 8, "group_size": 8, "max_tokens": 3},
        engine={"max_sequences": 256},
        eval={"every": 0, "tasks": 9, "final_tasks": 9},
        record={"checkpoint_every": 0, "trace": False, "probe_every": 0},
    )
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/mean"] for line in lines if line.get("reward/mean") is not None and "lag/mean" in line]
    held_out = [line["eval/reward"] for line in lines if line.get("eval/reward") is not None]
    lags = [line["lag/mean"] for line in lines if "lag/mean" in line]
    return {
        "before": held_out[0],
        "after": held_out[-1],
        "rewards": rewards,
        "lag": float(np.mean(lags)),
        "seconds": time.monotonic() - begin,
        "lost": run.report["groups"]["lost"],
    }


def trained(place: Path, name: str, algorithm: dict[str, Any], max_lag: int, steps: int, seeds: int) -> list[dict[str, Any]]:
    """One run for each seed, from that seed's model."""
    found = []
    for seed in range(seeds):
        model = place / f"model-{seed}"
        if not model.exists():
            fresh_model(model, alphabet=ALPHABET, context=32, seed=seed, **SIZES["0.1m"])
        found.append(train(place / f"{name}-{seed}", algorithm, seed, max_lag, model, steps))
    return found


def teacher(place: Path, steps: int) -> Path:
    """A folder with a model that has learnt the task, of another seed than the pupils."""
    fresh_model(place / "young", alphabet=ALPHABET, context=32, seed=99, **SIZES["0.1m"])
    train(place / "teacher", {"name": "grpo"}, 99, 0, place / "young", 2 * steps)
    return place / "teacher" / "final"


def presets(place: Path, steps: int, seeds: int, only: list[str]) -> list[dict[str, Any]]:
    taught, rows = teacher(place, steps), []
    sampling = [name for name, values in PRESETS.items() if "given" not in values]
    for name in [name for name in sampling if not only or name in only]:
        algorithm = {"name": name, **({"reference": {"model": str(taught)}} if name == "opd" else {})}
        for max_lag, runs in ((4, seeds), (0, 1)):
            found = trained(place, f"{name}-{max_lag}", algorithm, max_lag, steps, runs)
            after = np.array([each["after"] for each in found])
            row = {
                "preset": name,
                "max_lag": max_lag,
                "held-out before": float(np.mean([each["before"] for each in found])),
                "after": float(after.mean()),
                "sd": float(after.std(ddof=1)) if runs > 1 else None,
                "lag": float(np.mean([each["lag"] for each in found])),
                "s a run": float(np.mean([each["seconds"] for each in found])),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def lag(place: Path, steps: int, seeds: int, only: list[str]) -> list[dict[str, Any]]:
    rows = []
    for name in [name for name in WAYS if not only or name in only]:
        for max_lag in LAGS:
            found = trained(place, f"lag-{name.replace(' ', '-')}-{max_lag}", WAYS[name], max_lag, steps, seeds)
            last = np.array([np.mean(each["rewards"][-10:]) for each in found])
            row = {
                "way": name,
                "max_lag": max_lag,
                "lag": float(np.mean([each["lag"] for each in found])),
                "reward": float(last.mean()),
                "sd": float(last.std(ddof=1)) if seeds > 1 else None,
                "held-out": float(np.mean([each["after"] for each in found])),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(6.4, 3.8))
    for way in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == way]
        y, spread = [row["reward"] for row in own], [row["sd"] or 0.0 for row in own]
        axis.errorbar(range(len(own)), y, spread, marker="o", capsize=2, label=way)
    axis.set_xticks(range(len(LAGS)), [str(each) for each in LAGS])
    axis.set_xlabel("max_lag (steps)")
    axis.set_ylabel("reward of the last ten steps")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, ncol=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="presets, lag; default: both")
    parser.add_argument("--quick", action="store_true", help="one seed, a quarter of the steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    torch.set_num_threads(1)
    steps, seeds = (STEPS // 4, 1) if given.quick else (STEPS, given.seeds)
    found: dict[str, Any] = {"steps": steps, "seeds": seeds}
    with tempfile.TemporaryDirectory() as name:
        if not given.what or "presets" in given.what:
            found["presets"] = presets(Path(name), steps, seeds, given.only)
        if not given.what or "lag" in given.what:
            found["lag"] = lag(Path(name), steps, seeds, given.only)
            plot(found["lag"], HERE.parent / "docs" / "lag.png")
    for kind in ("presets", "lag"):
        if kind in found:
            print(f"\n{table(found[kind])}")
    save("algorithms", found, {})


if __name__ == "__main__":
    main()
