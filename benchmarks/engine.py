"""Sampling: Tidemill's engine beside vLLM and Hugging Face `generate`, on the same weights and prompts, in turns.

    python benchmarks/engine.py [--sizes S M L] [--dtypes float32 bfloat16] [--repeats 5] [--without vllm]

16 prompts x 8 samples, 64 + 128 tokens, temperature 1, logprobs of what was sampled, all sequences at once. The peers need
`make peers`. Prints a table and writes `results/engine.json`.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from harness import Missing, generators, in_turns, python_of, ratio, save, spread, table, wait_until_quiet
from workloads import SIZES, kv_mb, prompts, write_model

PROMPTS, SAMPLES, PROMPT, TOKENS = 16, 8, 64, 128
TARGETS = {  # (size, dtype, peer) -> how many times as fast
    ("S", "bfloat16", "vllm"): 2.0,
    ("M", "bfloat16", "vllm"): 2.0,
    ("L", "bfloat16", "vllm"): 1.2,
    ("S", "float32", "vllm"): 1.3,
    ("M", "float32", "vllm"): 1.3,
    ("M", "bfloat16", "transformers"): 4.0,
    ("S", "bfloat16", "transformers"): 3.0,
}


def measure(size: str, dtype: str, args: argparse.Namespace, about: dict[str, Any]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        write_model(Path(place) / "model", size, getattr(torch, dtype), context=1024)
        sequences, model = PROMPTS * SAMPLES, Path(place) / "model"
        kv = kv_mb(size, dtype, sequences * (PROMPT + TOKENS))  # touched by the warm-up, as in a run by versions before
        every = generators(model, dtype, args.threads, context=1024, sequences=sequences, kv_mb=kv)
        systems = [system for system in every if system.name not in args.without]
        for system in systems:
            stack.enter_context(system)
            about[system.name] = system.about
        wait_until_quiet()
        requests = (
            {"prompts": prompts(size, PROMPTS, PROMPT, seed), "samples": SAMPLES, "tokens": TOKENS, "seed": seed}
            for seed in range(args.repeats + 1)
        )
        answers = in_turns(systems, requests)
    speeds = {name: [each["tokens"] / each["seconds"] for each in found] for name, found in answers.items()}
    rows = []
    for name, values in speeds.items():
        times, target = ratio(speeds["tidemill"], values), TARGETS.get((size, dtype, name))
        row: dict[str, Any] = {"model": size, "dtype": dtype, "system": name}
        row |= {f"tok/s {key}": value for key, value in spread(values).items()}
        rows.append(row | {"we are x": times, "target": target or ""})
    print(table(rows), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", default=["S", "M", "L"], choices=SIZES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--without", nargs="+", default=[], choices=["vllm", "transformers"])
    args = parser.parse_args()
    try:
        python_of("" if "vllm" in args.without else "vllm")
    except Missing as missing:
        parser.error(f"{missing} (or leave it out: --without vllm)")
    about: dict[str, Any] = {}
    rows = [row for size in args.sizes for dtype in args.dtypes for row in measure(size, dtype, args, about)]
    print()
    print(table(rows))
    print(f"written to {save('engine', rows, about)}")


if __name__ == "__main__":
    main()
