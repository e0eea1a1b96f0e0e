"""How soon reward rises: the demo's task, model and hyper-parameters in TRL and in Tidemill, until 0.85 is reached.

    python benchmarks/time_to_reward.py [--seeds 0 1 2] [--steps 400] [--times 6]

Both begin with the weights that the demo's warm-up ends in, on two threads altogether. Weights are kept every few steps, and
all are judged afterwards, greedily, by one engine on the same held-out tasks: judging takes no time of the runs. Accuracy is
smoothed over three of them. TRL has `--times` as long as Tidemill took to arrive. A run that does not arrive within its
steps or its time is censored. TRL needs `make peers`. Prints a table and writes `results/time_to_reward.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from harness import System, save, table, wait_until_quiet

import tidemill
from tidemill.core.types import GenerateRequest, SamplingParams, Task, Version
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.envs.build_environment import make_environment
from tidemill.envs.environment_settings import ReasoningGymSettings
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.models.conversations import prompt_tokens
from tidemill.models.hf_weights import load_folder
from tidemill.run.storage.model_folder import ModelFolder

sys.path.append(str(Path(__file__).with_name("systems")))
from reward_task import ROWS, score

GOAL, SMOOTHED, TARGET = 0.85, 3, 4.0
GROUPS, SAMPLES, TOKENS, LR = 16, 8, 12, 1e-4  # the demo's
HELD_OUT = 512
TASK: dict[str, Any] = {"dataset": "spell_backward", "args": {"max_word_len": 7}, "binary": True}


def warm_model(place: Path) -> Path:
    """The demo's model after its warm-up, and the file of its tasks' rows beside it."""
    run = tidemill.train(
        {"kind": "reasoning_gym", **TASK},
        "new:2m",
        run_dir=place / "warm",
        quiet=True,
        steps=1,
        rollout={"max_tokens": TOKENS},
        eval={"every": 0, "tasks": 1, "final_tasks": 1},
        warmup={"accuracy": 0.5},
    )
    return run.folder / "initial"


def write_rows(model: Path, file: Path) -> list[dict[str, str]]:
    """The demo's tasks; `text` is what a prompt's tokens say. Returns those held out."""
    environment = make_environment(ReasoningGymSettings(**TASK), RewardPool(workers=0))
    tokenizer = ModelFolder.open(model).tokenizer

    def row(task: Task) -> dict[str, str]:
        text = tokenizer.decode(prompt_tokens(tokenizer, task.prompt).tolist())
        return {"prompt": str(task.prompt), "text": text, "answer": task.data["answer"]}

    rows = {split: [row(task) for task in environment.tasks(split)] for split in ("train", "eval")}
    file.write_text(json.dumps(rows))
    return rows["eval"][:HELD_OUT]


def accuracy(model: Path, rows: list[dict[str, str]]) -> float:
    return asyncio.run(_accuracy(model, rows))


async def _accuracy(model: Path, rows: list[dict[str, str]]) -> float:
    folder = ModelFolder.open(model)
    settings = EngineSettings(device="cpu", max_sequences=256)
    engine = NativeEngine(
        load_folder(model), settings, receiver=None, version=Version(0), name="judge", eos_ids=folder.stop_ids
    )
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    prompts = [prompt_tokens(folder.tokenizer, row["prompt"]) for row in rows]
    done = await asyncio.gather(*(engine.generate(GenerateRequest(p, greedy, key=str(i))) for i, p in enumerate(prompts)))
    await engine.close()
    replies = [folder.tokenizer.decode(each.tokens.tolist(), skip_special_tokens=True) for each in done]
    return statistics.mean(score(reply, row["answer"]) for reply, row in zip(replies, rows, strict=True))


def arrival(curve: list[tuple[float, float]]) -> tuple[float | None, float]:
    """(seconds at which the smoothed accuracy first reaches the goal, or None; the best smoothed accuracy)."""
    last = [curve[max(0, i + 1 - SMOOTHED) : i + 1] for i in range(len(curve))]
    smoothed = [(some[-1][0], statistics.mean(value for _, value in some)) for some in last]
    arrived = next((seconds for seconds, value in smoothed[SMOOTHED - 1 :] if value >= GOAL), None)
    return arrived, max(value for _, value in smoothed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400, help="at most")
    parser.add_argument("--every", type=int, default=10, help="steps between kept weights")
    parser.add_argument("--times", type=float, default=6.0, help="as long as Tidemill took, for TRL to arrive")
    parser.add_argument("--limit", type=float, default=1100, help="seconds, of TRL at most")
    parser.add_argument("--max-lag", type=int, default=1)
    parser.add_argument("--cache", default="dynamic", choices=["static", "dynamic"], help="of TRL's generation")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of TRL's step")
    parser.add_argument("--without", nargs="+", default=[], choices=["trl"])
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    curves: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        place = Path(name)
        model = warm_model(place)
        os.environ[ROWS] = str(place / "rows.json")
        held_out = write_rows(model, place / "rows.json")
        first = accuracy(model, held_out)
        work = {"model": str(model), "groups": GROUPS, "samples": SAMPLES, "tokens": TOKENS, "lr": LR, "steps": args.steps}
        work["every"] = args.every
        threads = torch.get_num_threads()
        peer = {"cache": args.cache, "accumulate": args.accumulate}
        systems = [
            System("tidemill", "reward_tidemill.py", work | {"max_lag": args.max_lag}),
            System("trl", "reward_trl.py", work | {"threads": threads} | peer, "trl", {"HF_HUB_OFFLINE": "1"}),
        ]
        systems = [system for system in systems if system.name not in args.without]
        for system in systems:
            stack.enter_context(system)
            about[system.name] = system.about
        wait_until_quiet()
        for seed in args.seeds:
            limit = args.limit
            for system in systems:
                folder = place / f"{system.name}-{seed}"
                folder.mkdir()
                asked = {"limit_s": limit} if system.name == "trl" else {}
                answer = system.ask(seed=seed, folder=str(folder), **asked)
                kept = {int(step): seconds for step, seconds in answer["seconds"].items()}
                folders = answer.get("folders") or {str(step): str(folder / f"step-{step}") for step in kept}
                curve = [(0.0, first)]
                for step, seconds in sorted(kept.items()):
                    where = Path(folders[str(step)])
                    curve.append((seconds, accuracy(where / "trainer" if system.name == "tidemill" else where, held_out)))
                arrived, best = arrival(curve)
                limit = min(limit, args.times * (arrived or limit))
                steps = max(kept, default=0)
                row: dict[str, Any] = {"seed": seed, "system": system.name, "before": first, "steps": steps, "best": best}
                row |= {"s/step": curve[-1][0] / max(1, steps), "had s": curve[-1][0], "arrived": arrived}
                rows.append(row)
                curves[f"{system.name} {seed}"] = curve
                print(table([row]), flush=True)
    print(table(rows))
    by = {(row["seed"], row["system"]): row for row in rows}
    for seed in args.seeds:
        ours, theirs = (by.get((seed, name), {}) for name in ("tidemill", "trl"))
        if ours.get("arrived") and theirs:
            over, seconds = ("", theirs["arrived"]) if theirs["arrived"] else ("over ", theirs["had s"])
            print(f"seed {seed}: {over}{seconds / ours['arrived']:.1f} times sooner; target {TARGET:g}")
    print(f"written to {save('time_to_reward', {'rows': rows, 'curves': curves}, about)}")


if __name__ == "__main__":
    main()
