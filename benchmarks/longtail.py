"""Replies of very different lengths: 512 sequences through 128 slots.

    python benchmarks/longtail.py [--size S] [--dtypes float32 bfloat16] [--repeats 2] [--without vllm]

Lengths are log-normal, median 64, 99 % below 1,024. `generate` runs batches of 128 to their longest, and of the four only
the first, for each takes minutes; the engine gives a slot away as soon as a sequence ends. Beside the speed: its steps, over
those that list scheduling of the same lengths needs. Prints a table and writes `results/longtail.json`.

    python benchmarks/longtail.py --speculation [--size S] [--repeats 3]

Our engine alone, with and without drafts, on models that repeat themselves more or less: batches of 128 replies, 8 for
each prompt. The tail begins when 8 sequences are left. Writes `results/speculation.json`.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import System, generators, in_turns, ratio, save, spread, table, wait_until_quiet
from workloads import SIZES, prompts, write_habitual_model, write_model

from tidemill.observability.list_schedule import list_schedule

SEQUENCES, SLOTS, PROMPT, MEDIAN, P99, MOST = 512, 128, 64, 64, 1024, 1900
TARGETS = {"transformers": 3.0}
TARGET_STEPS = 1.05
STRENGTHS = (0.02, 0.5, 0.6)  # of habits: none, and as in text


def lengths(seed: int) -> list[int]:
    sigma = math.log(P99 / MEDIAN) / 2.3263  # the normal distribution's 99th percentile
    drawn = np.random.default_rng(seed).lognormal(math.log(MEDIAN), sigma, SEQUENCES)
    return np.clip(drawn, 1, MOST).astype(int).tolist()


def request(size: str, seed: int) -> dict[str, Any]:
    """The first, which warms up, is short: `generate` takes minutes for the others."""
    tokens = lengths(seed) if seed else [32] * SLOTS
    return {"prompts": prompts(size, len(tokens), PROMPT, seed), "samples": 1, "tokens": tokens, "seed": seed}


def measure(dtype: str, args: argparse.Namespace, about: dict[str, Any]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        write_model(Path(place) / "model", args.size, getattr(torch, dtype), context=2048)
        every = generators(Path(place) / "model", dtype, args.threads, context=2048, sequences=SLOTS, most=1)
        systems = [stack.enter_context(system) for system in every if system.name not in args.without]
        about |= {system.name: system.about for system in systems}
        wait_until_quiet()
        answers = in_turns(systems, [request(args.size, seed) for seed in range(args.repeats + 1)])
    speeds = {name: [each["tokens"] / each["seconds"] for each in found] for name, found in answers.items()}
    fewest = [list_schedule([[n] for n in lengths(seed)], SLOTS).makespan for seed in range(1, args.repeats + 1)]
    rows = []
    for name, values in speeds.items():
        row: dict[str, Any] = {"dtype": dtype, "system": name} | {f"tok/s {k}": v for k, v in spread(values).items()}
        row |= {"we are x": ratio(speeds["tidemill"], values), "target": TARGETS.get(name, "")}
        ours = [each["steps"] for each in answers[name]] if name == "tidemill" else []
        row |= {"steps / list schedule": ratio(ours, fewest) if ours else "", "at most": TARGET_STEPS if ours else ""}
        rows.append(row)
    print(table(rows), flush=True)
    return rows


def speculation(dtype: str, args: argparse.Namespace, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the engine with each kind of drafts, beside itself without."""
    rows = []
    for strength in STRENGTHS:
        with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
            folder = Path(place) / "model"
            likeliest = write_habitual_model(folder, args.size, getattr(torch, dtype), strength)
            systems = []
            for method in ("none", "ngram", "rollouts"):
                engine = {"max_sequences": SLOTS, "context": 2048, "speculation": {"method": method}}
                given = {"model": str(folder), "dtype": dtype, "threads": args.threads, "engine": engine}
                environment = {"OMP_NUM_THREADS": str(args.threads)}
                made = System(method, "generate_tidemill.py", given, environment=environment)
                systems.append(stack.enter_context(made))
            about |= {system.name: system.about for system in systems}
            wait_until_quiet()
            asked = [attempts(args.size, seed) for seed in range(args.repeats + 1)]
            answers = in_turns(systems, asked)
        for method, found in answers.items():
            plain = answers["none"]
            row: dict[str, Any] = {"dtype": dtype, "likeliest token": likeliest, "drafts": method}
            row |= {f"whole s {k}": v for k, v in spread([each["seconds"] for each in found]).items()}
            row["whole: without / with"] = ratio([a["seconds"] for a in plain], [b["seconds"] for b in found])
            row["tail tok/s"] = statistics.median(each["tail_tokens"] / each["tail_seconds"] for each in found)
            row["tail: without / with"] = ratio([a["tail_seconds"] for a in plain], [b["tail_seconds"] for b in found])
            for part in ("", "tail_"):  # beside other work, a processor's time says more than the clock
                times = [[each[f"{part}cpu_seconds"] for each in of] for of in (plain, found)]
                row[f"{part}CPU: without / with"] = ratio(*times)
            row["accepted a step"] = statistics.median(each["accepted_tokens"] / each["steps"] for each in found)
            drafted = sum(each["drafted_tokens"] for each in found)
            row["accepted share"] = sum(each["accepted_tokens"] for each in found) / max(drafted, 1)
            row["load"] = os.getloadavg()[0]
            rows.append(row)
    print(table(rows), flush=True)
    return rows


def attempts(size: str, seed: int) -> dict[str, Any]:
    """One batch: 16 prompts with 8 replies each."""
    tokens = lengths(seed)[:SLOTS] if seed else [64] * SLOTS
    return {"prompts": prompts(size, SLOTS // 8, PROMPT, seed), "samples": 8, "tokens": tokens, "seed": seed}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="S", choices=SIZES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--without", nargs="+", default=[], choices=["vllm", "transformers"])
    parser.add_argument("--speculation", action="store_true")
    args = parser.parse_args()
    about: dict[str, Any] = {}
    if args.speculation:
        rows = [row for dtype in args.dtypes for row in speculation(dtype, args, about)]
        print(f"written to {save('speculation', rows, about)}")
        return
    rows = [row for dtype in args.dtypes for row in measure(dtype, args, about)]
    print(f"written to {save('longtail', rows, about)}")


if __name__ == "__main__":
    main()
