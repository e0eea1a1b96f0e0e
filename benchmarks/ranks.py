"""Two ranks of one thread beside one rank of two threads: gradient and update of one GRPO batch, in turns.

    python benchmarks/ranks.py [--sizes S M] [--repeats 5] [--steps 3] [--shards none zero2 zero3]

16 prompts x 8 replies, 64 + 128 tokens, float32. Tokens are trained ones, per second. Bytes are those that a rank sends in a
step, counted at the collective operations; theory is what they are by the parameters P and the micro-batches m of a rank:
none 2 (n - 1) / n 4P; zero2 the same, a gather and a reduction; zero3 up to (2 m + m) (n - 1) / n 4P, less what stays
gathered between forward and backward (embedding, head, last norm). Prints a table and writes `results/ranks.json`.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from harness import System, save, spread, table, turns, wait_until_quiet
from workloads import SIZES, VOCAB, write_model

GROUPS, SAMPLES, PROMPT, TOKENS, MICRO_BATCH = 16, 8, 64, 128, 1152


def systems_for(model: Path, size: str, shards: list[str]) -> list[System]:
    common = {"model": str(model), "vocab": VOCAB[size], "dtype": "float32", "groups": GROUPS, "samples": SAMPLES}
    common |= {"prompt": PROMPT, "tokens": TOKENS, "micro_batch": MICRO_BATCH}
    one = System("one rank", "rank_step.py", common | {"ranks": 1, "shard": "none", "threads": 2})
    return [one, *(System(s, "rank_step.py", common | {"ranks": 2, "shard": s, "threads": 1}) for s in shards)]


def measure(size: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        parameters = write_model(Path(place) / "model", size, torch.float32)
        systems = [stack.enter_context(system) for system in systems_for(Path(place) / "model", size, args.shards)]
        for system in systems:
            system.ask(steps=1)  # what is prepared once
        answers: dict[str, list[dict[str, float]]] = {system.name: [] for system in systems}
        wait_until_quiet()
        for number in range(args.repeats):
            for system in turns(systems, number):
                answers[system.name].append(system.ask(steps=args.steps))
    rows = []
    for name, found in answers.items():
        rates = spread([each["tokens"] / each["seconds"] for each in found])
        rows.append(
            {
                "size": size,
                "system": name,
                "parameters": parameters,
                "tokens_per_s": rates["median"],
                "least": rates["least"],
                "most": rates["most"],
                "sent_bytes": found[0]["sent"],
                "of_weights": found[0]["sent"] / (4 * parameters),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["S", "M"], choices=list(SIZES))
    parser.add_argument("--shards", nargs="+", default=["none", "zero2", "zero3"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    rows = [row for size in args.sizes for row in measure(size, args)]
    print(table(rows))
    print(f"written to {save('ranks', rows, {})}")


if __name__ == "__main__":
    main()
