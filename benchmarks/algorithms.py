"""Every preset learns; and what lag does without and with each correction.

    python benchmarks/algorithms.py [presets given lag] [--quick] [--seeds N] [--only NAME ...] [--resume]

    presets   held-out reward before and after `STEPS` steps, three seeds at max_lag 4 and one at 0, wall time
    given     the same for what learns from given replies: answers, and what a verifier judged of a run's own attempts;
              and for a policy that a reward model made of these judges
    lag       losses and corrections at max_lag 0, 4, 16 and 64, until it breaks, at the presets' learning rate and at
              three times that: `docs/lag.png`

The task is `systems/first_letter.py`, with a 0.1 M-parameter model that knows nothing; everything in one process with one
thread. A teacher, for distillation, is the model that one run of GRPO ended with. Prints tables, writes
`results/algorithms.json` after every row. A row takes the place of the one there is of the same; with `--resume` only
rows that are missing are measured, so that a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from harness import HERE, RESULTS, save, table

import tidemill
from tidemill.algorithms.presets import PRESETS
from tidemill.cli.commands.pairs import pairs
from tidemill.models.new_model import SIZES, fresh_model

sys.path.append(str(HERE / "systems"))
from first_letter import ALPHABET, HELD_OUT, PAIRS

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STEPS, LR = 160, 1e-3
SAMPLED = {"groups": 8, "group_size": 8, "max_tokens": 3}
LAGS = (0, 4, 16, 64)
RATES = {1e-3: 160, 3e-3: 120}  # learning rate -> steps: the presets', and one that lag breaks at once
Row = dict[str, Any]
Wanted = Callable[..., bool]  # of what tells a row apart
ENV = f"{HERE / 'systems' / 'first_letter.py'}:first_letter"
JUDGE = f"{HERE / 'systems' / 'first_letter.py'}:judge"
YOUNG = 20  # steps of supervised training: a policy that says good replies and bad ones of every kind, for pairs to learn of
TAUGHT = 60  # ... that says nothing but one letter or the other, for a reward model to tell these apart
PREFERENCES: dict[str, dict[str, Any]] = {  # with their papers' constants, at LR / 10
    "dpo": {},  # beta 0.1
    "ipo": {},  # tau (here beta) 0.1: a margin of 5 nats a token
    "orpo": {},  # weight 0.1
    "simpo": {},  # beta 2.5, gamma 0.55 beta
    "kto": {"constants": {"desirable_weight": 4 / 3}},  # beta 0.1; as many are good as bad, and w_d n_d / w_u n_u up to 4/3
}
OF_PAIRS, JUDGED = "reward_model", "grpo, judged by it"
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


def train(
    place: Path,
    algorithm: dict[str, Any],
    seed: int,
    max_lag: int,
    model: Path,
    steps: int,
    lr: float = LR,
    env: Any = ENV,
    groups: int = 16,
    **more: Any,
) -> dict[str, Any]:
    begin = time.monotonic()
    run = tidemill.train(
        env,
        model,
        run_dir=place,
        quiet=True,
        steps=steps,
        max_lag=max_lag,
        seed=seed,
        algorithm=algorithm,
        placement={"kind": "inline", "environment": {"workers": 0}},
        trainer={"lr": lr},
        rollout={"groups": groups} if "given" in PRESETS[algorithm["name"]] else SAMPLED,
        engine={"max_sequences": 256},
        eval={"every": 0, "tasks": 9, "final_tasks": 9},
        record={"checkpoint_every": 0, "trace": False, "probe_every": 0},
        **more,
    )
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/mean"] for line in lines if line.get("reward/mean") is not None and "lag/mean" in line]
    held_out = [line["eval/reward"] for line in lines if line.get("eval/reward") is not None]
    lags = [line["lag/mean"] for line in lines if "lag/mean" in line]
    return {
        "before": held_out[0] if held_out else None,
        "after": held_out[-1] if held_out else None,
        "rewards": rewards,
        "lag": float(np.mean(lags)) if lags else 0.0,
        "given": run.report.get("held_out_given"),
        "seconds": time.monotonic() - begin,
        "lost": run.report["groups"]["lost"],
    }


def model_of(place: Path, seed: int) -> Path:
    """A model that knows nothing."""
    model = place / f"model-{seed}"
    if not model.exists():
        fresh_model(model, alphabet=ALPHABET, context=32, seed=seed, **SIZES["0.1m"])
    return model


def trained(
    place: Path, name: str, algorithm: dict[str, Any], max_lag: int, steps: int, seeds: int, lr: float = LR
) -> list[dict[str, Any]]:
    """One run for each seed, from that seed's model."""
    return [
        train(place / f"{name}-{seed}", algorithm, seed, max_lag, model_of(place, seed), steps, lr) for seed in range(seeds)
    ]


def teacher(place: Path, steps: int) -> Path:
    """A folder with a model that has learnt the task, of another seed than the pupils."""
    fresh_model(place / "young", alphabet=ALPHABET, context=32, seed=99, **SIZES["0.1m"])
    train(place / "teacher", {"name": "grpo"}, 99, 0, place / "young", 2 * steps)
    return place / "teacher" / "final"


def presets(place: Path, steps: int, seeds: int, wanted: Wanted) -> Iterator[Row]:
    for name in [name for name, values in PRESETS.items() if "given" not in values]:
        runs_at = {max_lag: runs for max_lag, runs in ((4, seeds), (0, 1)) if wanted(name, max_lag)}
        algorithm: dict[str, Any] = {"name": name}
        if name == "opd" and runs_at:
            algorithm["reference"] = {"model": str(teacher(place, steps))}
        for max_lag, runs in runs_at.items():
            found = trained(place, f"{name}-{max_lag}", algorithm, max_lag, steps, runs)
            after = np.array([each["after"] for each in found])
            yield {
                "preset": name,
                "max_lag": max_lag,
                "held-out before": float(np.mean([each["before"] for each in found])),
                "after": float(after.mean()),
                "sd": float(after.std(ddof=1)) if runs > 1 else None,
                "lag": float(np.mean([each["lag"] for each in found])),
                "s a run": float(np.mean([each["seconds"] for each in found])),
                "seeds": runs,
            }


def given(place: Path, steps: int, seeds: int, wanted: Wanted) -> Iterator[Row]:
    """A chain for each seed: a model that has learnt to say either letter samples, a verifier judges, and pairs of that, for
    KTO each reply by itself, teach it on: 32 replies a step."""
    found: dict[str, list[Row]] = {name: [] for name in ("sft", *PREFERENCES, OF_PAIRS, JUDGED) if wanted(name)}
    for seed in range(seeds if found else 0):
        own = functools.partial(train, seed=seed, max_lag=4)
        if "sft" in found:
            found["sft"].append(own(place / f"sft-{seed}", {"name": "sft"}, model=model_of(place, seed), steps=steps))
        _, began, env = preferred(place, seed, steps, YOUNG)
        of_labels = {**env, "data": str(labels(Path(env["data"])))}
        for name, constants in [item for item in PREFERENCES.items() if item[0] in found]:
            learnt = {"env": of_labels, "groups": 32} if name == "kto" else {"env": env}
            algorithm = {"name": name, **constants}
            run = own(place / f"{name}-{seed}", algorithm, model=began, steps=3 * steps // 4, lr=LR / 10, **learnt)
            found[name].append(run)
        if not {OF_PAIRS, JUDGED} & found.keys():
            continue
        before, began, env = preferred(place, seed, steps, TAUGHT)
        unjudged = {**env, "reward": ""}
        judge = own(place / f"rm-{seed}", {"name": OF_PAIRS}, model=began, steps=steps, env=unjudged, lr=0.3 * LR)
        judged = {**env, "reward": "model", "reward_options": {"folder": str(place / f"rm-{seed}" / "final")}}
        scoring = {"workers": 1, "limit_s": 60, "accept": ["garbage"]}
        policy = place / f"policy-{seed}"
        held = {"name": "grpo", "reference": {"kl": 1.0}}  # or it learns to please so small a judge
        last = own(policy, held, model=began, steps=steps, env=judged, lr=LR / 3, scoring=scoring)
        known = own(place / f"told-{seed}", {"name": "sft"}, model=policy / "final", steps=1)["before"]
        for name, run in ((OF_PAIRS, judge), (JUDGED, {**last, "before": before, "after": known})):
            found.setdefault(name, []).append(run)
    yield from (told(name, runs) for name, runs in found.items())


def preferred(place: Path, seed: int, steps: int, taught: int) -> tuple[float, Path, dict[str, Any]]:
    """A model of `taught` steps of supervised training on either letter: its held-out reward, its folder, and an environment
    of what a verifier preferred among its attempts."""
    own, rows = functools.partial(train, seed=seed, max_lag=4), place / f"pairs-{taught}-{seed}.jsonl"
    env = {"kind": "rows", "data": str(either(place)), "eval_data": str(held_out(place)), "reward": JUDGE}
    learnt = own(place / f"taught-{taught}-{seed}", {"name": "sft"}, model=model_of(place, seed), steps=taught, env=env)
    began = place / f"taught-{taught}-{seed}" / "final"
    own(place / f"judged-{taught}-{seed}", {"name": "grpo"}, model=began, steps=steps // 4, lr=LR / 100)
    pairs(place / f"judged-{taught}-{seed}", rows, as_json=True)
    return learnt["after"], began, {**env, "data": str(rows)}


def told(name: str, runs: list[Row]) -> Row:
    """Held-out reward by the verifier; of a reward model the share of held-out pairs that it orders rightly."""

    def figure(run: dict[str, Any], when: str) -> float:
        return run["given"][when]["preference_accuracy"] if name == OF_PAIRS else run[when]

    before, after = ([figure(run, when) for run in runs] for when in ("before", "after"))
    row = {"way": name, "before": float(np.mean(before)), "after": float(np.mean(after))}
    row["sd"] = float(np.std(after, ddof=1)) if len(after) > 1 else None
    row["s a run"] = float(np.mean([run["seconds"] for run in runs]))
    row["seeds"] = len(runs)
    return row


def either(place: Path) -> Path:
    """The training tasks, each answered with its first and with its second letter."""
    path, tasks = place / "either.jsonl", [pair for pair in PAIRS if pair not in HELD_OUT]
    rows = [{"prompt": f"{pair}=", "answer": letter} for pair in tasks for letter in pair]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def held_out(place: Path) -> Path:
    """The held-out tasks with their answers, as pairs and as labels: the letter, and the other one."""
    path, tasks = place / "held_out.jsonl", sorted(HELD_OUT)
    rows = [{"prompt": f"{a}{b}=", "chosen": a, "rejected": b if b != a else b + b} for a, b in tasks]
    rows = [{**row, "answer": row["chosen"], "completion": row["chosen"], "label": True} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def labels(pairs: Path) -> Path:
    """Each reply of the pairs by itself."""
    path, rows = pairs.with_suffix(".labels.jsonl"), [json.loads(line) for line in pairs.read_text().splitlines()]
    both = [(row["prompt"], row[column], column == "chosen") for row in rows for column in ("chosen", "rejected")]
    lines = [{"prompt": prompt, "completion": reply, "label": good} for prompt, reply, good in both]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def lag(place: Path, steps: int, seeds: int, wanted: Wanted) -> Iterator[Row]:
    cells = itertools.product(WAYS, LAGS, RATES.items())
    for name, max_lag, (lr, own) in [cell for cell in cells if wanted(cell[0], cell[1], cell[2][0])]:
        where = f"lag-{lr}-{name.replace(' ', '-')}-{max_lag}"
        found = trained(place, where, WAYS[name], max_lag, own * steps // STEPS, seeds, lr)
        last = np.array([np.mean(each["rewards"][-10:]) for each in found])
        yield {
            "way": name,
            "max_lag": max_lag,
            "lr": lr,
            "lag": float(np.mean([each["lag"] for each in found])),
            "reward": float(last.mean()),
            "sd": float(last.std(ddof=1)) if seeds > 1 else None,
            "held-out": float(np.mean([each["after"] for each in found])),
            "seeds": seeds,
        }


def plot(rows: list[Row], path: Path) -> None:
    figure, axes = plt.subplots(1, len(RATES), figsize=(9.6, 4.8), sharey=True, squeeze=False)
    ways = [way for way in WAYS if any(row["way"] == way for row in rows)]
    for axis, (lr, steps) in zip(axes[0], RATES.items(), strict=True):
        for number, way in enumerate(ways):
            own = sorted((row for row in rows if (row["way"], row["lr"]) == (way, lr)), key=lambda row: row["max_lag"])
            at = [LAGS.index(row["max_lag"]) + 0.08 * (number - len(ways) / 2) for row in own]  # beside one another
            y, spread = [row["reward"] for row in own], [row["sd"] or 0.0 for row in own]
            colour = "black" if way == "no correction" else f"C{number}"
            axis.errorbar(at, y, spread, marker="o", markersize=4, linewidth=1, elinewidth=0.7, color=colour, label=way)
        axis.set_xticks(range(len(LAGS)), [str(each) for each in LAGS])
        axis.set_xlabel("max_lag (steps)")
        axis.set_title(f"learning rate {lr:g}, {steps} steps", fontsize=9)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylim(0, 1.1)
    axes[0][0].set_ylabel("reward of the last ten steps")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=4, fontsize=8)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, dpi=110)


KINDS: dict[str, tuple[Callable[..., Iterator[Row]], tuple[str, ...]]] = {  # and what tells its rows apart, the name first
    "presets": (presets, ("preset", "max_lag")),
    "given": (given, ("way",)),
    "lag": (lag, ("way", "max_lag", "lr")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="presets, given, lag; default: all")
    parser.add_argument("--quick", action="store_true", help="one seed, a quarter of the steps; no plot")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--resume", action="store_true", help="measure the rows only that are not there yet")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    steps, seeds = (STEPS // 4, 1) if asked.quick else (STEPS, asked.seeds)
    name = "algorithms_quick" if asked.quick else "algorithms"
    path = RESULTS / f"{name}.json"
    figures: dict[str, list[Row]] = json.loads(path.read_text())["figures"] if path.exists() else {}
    for kind, (measure, columns) in KINDS.items():
        if asked.what and kind not in asked.what:
            continue
        rows = {tuple(row[column] for column in columns): row for row in figures.get(kind, [])}
        known = set(rows) if asked.resume else set()

        def wanted(*cell: Any, known: set[Any] = known) -> bool:
            return (not asked.only or cell[0] in asked.only) and cell not in known

        with tempfile.TemporaryDirectory() as place:
            for row in measure(Path(place), steps, seeds, wanted):
                print(json.dumps(row), flush=True)
                rows[tuple(row[column] for column in columns)] = row
                figures[kind] = list(rows.values())
                save(name, figures, {})
        if rows:
            print(f"\n{table(list(rows.values()))}")
        if kind == "lag" and not asked.quick:
            plot(list(rows.values()), HERE.parent / "docs" / "lag.png")


if __name__ == "__main__":
    main()
