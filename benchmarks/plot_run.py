"""Draw a run: reward and held-out accuracy over time, lag, and when each process was busy.

    python benchmarks/plot_run.py runs/demo docs/demo.png

Everything comes from the run's own files: metrics.jsonl, report.json, trace.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

GENERATE, TRAIN, SYNC = "#3b7dd8", "#d8743b", "#7a7a7a"
COLOURS = {"generate": GENERATE, "train": TRAIN, "apply": TRAIN, "publish": SYNC, "stage": SYNC, "commit": SYNC}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    lines = [json.loads(line) for line in (given.run / "metrics.jsonl").read_text().splitlines()]
    report = json.loads((given.run / "report.json").read_text())
    figure, (curve, busy) = plt.subplots(2, 1, figsize=(8, 5.2), height_ratios=[3, 1], constrained_layout=True)
    draw_curve(curve, lines, report)
    draw_busy(busy, given.run / "trace.json")
    figure.savefig(given.out, dpi=110)
    print(f"{given.out}: {report['steps']} steps, {report['accuracy_before']:.3f} -> {report['accuracy_after']:.3f}")


def draw_curve(axes, lines: list[dict], report: dict) -> None:
    steps = [line for line in lines if line.get("reward/mean") is not None]
    begin = min(line["time"] for line in lines)
    seconds = np.array([line["time"] - begin for line in steps])
    rewards = np.array([line["reward/mean"] for line in steps])
    width = max(1, len(rewards) // 30)
    kernel = np.ones(width) / width
    axes.plot(seconds, rewards, color=GENERATE, alpha=0.25, lw=1)
    smooth = np.convolve(rewards, kernel, "valid")
    axes.plot(seconds[width - 1 :], smooth, color=GENERATE, lw=2, label="reward of what was sampled (T = 1)")
    evaluations = [line for line in lines if "eval/n" in line]
    at = [line["time"] - begin for line in evaluations]
    axes.plot(
        at, [line["eval/accuracy"] for line in evaluations], "o-", color=TRAIN, ms=4, label="held-out accuracy (greedy)"
    )
    axes.set(xlabel="seconds of reinforcement learning", ylim=(0, 1), xlim=(0, None))
    axes.set_title(title(report), fontsize=11)
    axes.legend(loc="lower right", frameon=False)
    axes.grid(alpha=0.2)


def title(report: dict) -> str:
    before, after, seen = (report[key] for key in ("accuracy_before", "accuracy_after", "max_lag_seen"))
    old = f"{seen} version{'' if seen == 1 else 's'} old"
    return (
        f"held-out accuracy {before:.3f} → {after:.3f} in {report['steps']} steps\n"
        f"what was trained on was sampled by weights at most {old} (max_lag allows {report['max_lag_allowed']})"
    )


def draw_busy(axes, path: Path) -> None:
    """Four seconds from the middle of the run, a bar a process."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"].split(" ")[0] for e in events if e["name"] == "process_name"}
    spans = [e for e in events if e["ph"] == "X" and names[e["pid"]] != "controller"]
    middle = np.median([e["ts"] for e in spans]) / 1e6
    rows = sorted({names[e["pid"]] for e in spans})
    for e in spans:
        start, length = e["ts"] / 1e6 - middle, e["dur"] / 1e6
        if -2 < start < 2 and e["name"] in COLOURS:
            axes.broken_barh([(start, length)], (rows.index(names[e["pid"]]) - 0.35, 0.7), color=COLOURS[e["name"]])
    axes.set(yticks=range(len(rows)), yticklabels=rows, xlim=(-2, 2), xlabel="seconds, in the middle of the run")
    axes.set_title("blue: generating   orange: training   grey: weights in motion", fontsize=9)


if __name__ == "__main__":
    main()
