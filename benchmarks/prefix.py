"""Prompts that share their beginning: siblings of a group, and conversations that grow.

    python benchmarks/prefix.py [--size S] [--dtype bfloat16] [--repeats 5] [--without vllm]

Groups: 8 prompts of 512 tokens x 8 samples, 64 new tokens. Turns: 32 conversations of 4 turns, each of which adds the reply
of 32 tokens and 64 more. Tools: 32 conversations that begin with 640 tokens, 8 turns, replies of 16 tokens and answers of 12
to them. Tidemill with and without its prefix cache, and vLLM with its own. Prints a table and writes `results/prefix.json`.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import System, generators, ratio, save, spread, table, turns, wait_until_quiet
from workloads import SIZES, prompts, write_model

GROUPS, SAMPLES, PROMPT, TOKENS = 8, 8, 512, 64
TALKS = 32
OFF = "tidemill, cache off"
TARGETS, TARGET_FEWER = {("groups", OFF): 2.5, ("groups", "vllm"): 1.5}, 8.0


@dataclass(frozen=True)
class Talk:
    """A conversation: tokens that it begins with, turns, tokens of a reply and of what is added to it."""

    begins: int
    turns: int
    reply: int
    more: int


TALK = {"turns": Talk(64, 4, 32, 64), "tools": Talk(640, 8, 16, 12)}


def siblings(system: System, size: str, seed: int) -> dict[str, float]:
    given = {"prompts": prompts(size, GROUPS, PROMPT, seed), "samples": SAMPLES, "tokens": TOKENS}
    return system.ask(**given, seed=seed)


def conversations(talk: Talk, system: System, size: str, seed: int) -> dict[str, float]:
    texts, sums = prompts(size, TALKS, talk.begins, 5000 + seed), dict[str, float]()
    for turn in range(talk.turns):
        done = system.ask(prompts=texts, samples=1, tokens=talk.reply, seed=seed * talk.turns + turn, replies=True)
        sums = {key: sums.get(key, 0.0) + value for key, value in done.items() if key != "replies"}
        added = prompts(size, TALKS, talk.more, 1000 * seed + turn)
        texts = [text + reply + more for text, reply, more in zip(texts, done["replies"], added, strict=True)]
    return sums


WORKS: dict[str, Callable[[System, str, int], dict[str, float]]] = {"groups": siblings} | {
    name: partial(conversations, talk) for name, talk in TALK.items()
}


def systems_for(model: Path, args: argparse.Namespace) -> list[System]:
    ours, vllm, _ = generators(model, args.dtype, args.threads, context=1024, sequences=64)
    off = copy.deepcopy(ours)
    off.name, off.given["engine"]["prefix_cache"] = OFF, False
    return [ours, off] if args.without else [ours, off, vllm]


def rows_of(work: str, answers: dict[str, Sequence[dict[str, float]]]) -> list[dict[str, Any]]:
    speeds = {name: [each["tokens"] / each["seconds"] for each in found] for name, found in answers.items()}
    rows = []
    for name, values in speeds.items():
        computed = answers[name][0].get("prompt_tokens_computed")
        row: dict[str, Any] = {"work": work, "system": name, **{f"tok/s {k}": v for k, v in spread(values).items()}}
        row |= {"we are x": ratio(speeds["tidemill"], values), "target": TARGETS.get((work, name), "")}
        row |= {"prompt tokens computed": "" if computed is None else int(computed)}
        less = computed / answers["tidemill"][0]["prompt_tokens_computed"] if name == OFF and computed else ""
        rows.append(
            row | {"we compute x fewer": less, "target of that": TARGET_FEWER if (work, name) == ("groups", OFF) else ""}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="S", choices=SIZES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--without", nargs="+", default=[], choices=["vllm"])
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        write_model(Path(place) / "model", args.size, getattr(torch, args.dtype), context=1024)
        systems = [stack.enter_context(system) for system in systems_for(Path(place) / "model", args)]
        wait_until_quiet()
        for work, run in WORKS.items():
            answers: dict[str, list[dict[str, float]]] = {system.name: [] for system in systems}
            for number in range(args.repeats + 1):
                for system in turns(systems, number):
                    found = run(system, args.size, 1 + number)
                    if number:
                        answers[system.name].append(found)
            rows += rows_of(work, answers)
        about = {system.name: system.about for system in systems}
    print(table(rows))
    print(f"written to {save('prefix', rows, about)}")


if __name__ == "__main__":
    main()
