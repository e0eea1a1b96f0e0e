"""What asynchrony gains when environments are slow and replies differ in length: one engine, one trainer, `max_lag` 0 to 4.

    python benchmarks/async_gain.py [--lags 0 1 2 4] [--steps 16]

Each attempt waits (log-normal, median 0.5 s, 99 % below 10 s), then replies (log-normal, median 24 tokens, 99 % below 200).
Beside the measured steps a second stands what the same controller predicts under virtual time for the same attempts, from
the rates of the `max_lag=0` run: seconds of a token, of a step's training, of a publication. Prints a table and writes
`results/async_gain.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import save, table, wait_until_quiet

import tidemill
from tidemill.controller.admission_buffer import Buffer
from tidemill.controller.controller import Controller, Schedule
from tidemill.core.types import (
    Finish,
    GenerateRequest,
    Group,
    PreparedStep,
    SamplingParams,
    Score,
    Task,
    TrainResult,
    Trajectory,
    Update,
    Version,
)
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.envs.curriculum import task_order
from tidemill.models.hf_weights import load_folder
from tidemill.models.new_model import SIZES, fresh_model

HERE = Path(__file__).parent
sys.path += [str(HERE / "systems"), str(HERE.parent / "tests")]
from slow_task import MOST, draw, tasks  # noqa: E402
from virtual_time import run_virtually  # noqa: E402

GROUPS, SAMPLES, FILLING, SEED = 8, 4, 4, 0
TARGET, TARGET_PREDICTED = 2.5, 0.9


def measure(model: Path, lag: int, steps: int) -> dict[str, Any]:
    ends: list[float] = []

    def ended(step: int, metrics: dict[str, float]) -> None:
        if "lag/mean" in metrics:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as place:
        both = lag == 0  # the phases take turns: each may have both cores
        tidemill.train(
            f"{HERE / 'systems' / 'slow_task.py'}:slow",
            str(model),
            run_dir=Path(place) / "run",
            callbacks=[ended],
            quiet=True,
            seed=SEED,
            steps=FILLING + steps,
            max_lag=lag,
            rollout={"groups": GROUPS, "group_size": SAMPLES, "max_tokens": MOST},
            trainer={"lr": 1e-5},
            engine={"device": "cpu", "max_sequences": 256},
            placement={
                "engine_threads": 2 if both else 1,
                "trainer_threads": 2 if both else 1,
                "environment": {"workers": 1},  # which counts a task's attempts
            },
            algorithm={"name": "grpo", "zero_variance": "keep"},
            eval={"every": 0, "tasks": 1, "final_tasks": 1},
            record={"checkpoint_every": 0, "probe_every": 0},
        )
        spans = json.loads((Path(place) / "run" / "trace.json").read_text())["traceEvents"]
    lasted: dict[str, list[float]] = {}
    for span in spans:
        lasted.setdefault(span.get("name", ""), []).append(span.get("dur", 0) / 1e6)
    train = float(np.median(lasted["train"]) + np.median(lasted["apply"]))
    rates = {"train_s": train, "publish_s": float(np.median(lasted["publish"]) + np.median(lasted["stage"]))}
    return {"steps_per_s": steps / (ends[-1] - ends[FILLING - 1]), **rates}


async def token_seconds(model: Path) -> float:
    """Of one token of each of a step's sequences, decoded together on one thread."""
    torch.set_num_threads(1)
    settings = EngineSettings(device="cpu", max_sequences=256)
    engine = NativeEngine(load_folder(model), settings, receiver=None, version=Version(0), name="engine-0", eos_ids=())
    params, prompt = SamplingParams(max_tokens=100, ignore_eos=True), np.arange(1, 9, dtype=np.int32)
    begin = time.perf_counter()
    calls = (engine.generate(GenerateRequest(prompt, replace(params, seed=i), key=str(i))) for i in range(GROUPS * SAMPLES))
    await asyncio.gather(*calls)
    seconds = time.perf_counter() - begin
    await engine.close()
    return seconds / params.max_tokens


class Deaf:
    """A ledger that is told everything."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class World:
    """Rollouts, trainer and publications that take the measured time and nothing else."""

    asks, by_group = (), True

    def __init__(self, rates: dict[str, float]) -> None:
        self.rates, self.serving, self.ends = rates, Version(0, fingerprint="f0"), []

    async def rollout(self, group_id: int, task: Task) -> Group:
        async def attempt(number: int) -> Trajectory:
            latency, tokens = draw(task.prompt, number)
            await asyncio.sleep(latency)
            version = self.serving
            await asyncio.sleep(tokens * self.rates["token_s"])
            steps = np.full(2, version.step, np.int32)
            zeros = np.zeros(2, np.float32)
            tokens, mask = np.zeros(2, np.int32), np.ones(2, bool)
            return Trajectory(tokens, mask, zeros, steps, Finish.STOP, Score(0.0), (version,), sample=number)

        return Group(group_id, task, list(await asyncio.gather(*map(attempt, range(SAMPLES)))))

    async def forward_backward(self, samples: Any, losses: Any) -> TrainResult:
        await asyncio.sleep(self.rates["train_s"])
        return TrainResult({}, [])

    async def apply(self, scale: float) -> dict[str, float]:
        return {}

    async def publish(self, version: Version) -> Version:
        await asyncio.sleep(self.rates["publish_s"])
        self.serving = Version(version.step, fingerprint=f"f{version.step}")
        return self.serving

    def drop_reason(self, group: Group) -> None:
        return None

    def rows(self, *_: Any) -> Any:
        return []

    def prepare(self, *_: Any) -> Any:
        return PreparedStep([], {}, [Update([], 1.0)], {})

    async def trained(self, *_: Any) -> None:
        self.ends.append(asyncio.get_running_loop().time())

    def __getattr__(self, name: str) -> Any:  # what an observer is told
        return lambda *_: None


def predict(lag: int, steps: int, rates: dict[str, float]) -> float:
    """Steps a second of the same controller and buffer on the same attempts, under virtual time."""
    world, rows = World(rates), tasks("train")
    parts: Any = [world, world, world, Deaf(), world]
    buffer = Buffer(batch=GROUPS, max_lag=lag, total=(FILLING + steps) * GROUPS)
    roller, trainer, publisher, ledger, algorithm = parts

    async def run() -> None:
        controller = Controller(
            Schedule(FILLING + steps),
            buffer,
            lambda group_id: Task(str(group_id), rows[task_order(len(rows), SEED, group_id)]["prompt"]),
            roller,
            trainer,
            publisher,
            ledger,
            algorithm,
            world,  # pyright: ignore
        )
        await controller.run()

    run_virtually(run())
    return steps / (world.ends[-1] - world.ends[FILLING - 1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lags", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        fresh_model(Path(place) / "model", alphabet="abcdefgh", context=512, **SIZES["2m"])
        wait_until_quiet()
        rates: dict[str, float] = {}
        for lag in args.lags:
            found = measure(Path(place) / "model", lag, args.steps)
            rates = rates or found | {"token_s": asyncio.run(token_seconds(Path(place) / "model"))}
            speed, expected = found["steps_per_s"], predict(lag, args.steps, rates)
            row: dict[str, Any] = {"max_lag": lag, "steps/s": speed, "x of the first": speed / rates["steps_per_s"]}
            row |= {"predicted": expected, "measured / predicted": speed / expected}
            rows.append(row | {k: v for k, v in found.items() if k != "steps_per_s"})
            print(table(rows[-1:]), flush=True)
    print(table(rows))
    print(f"targets: {TARGET} times the first, {TARGET_PREDICTED} of what is predicted")
    print(f"written to {save('async_gain', rows, {})}")


if __name__ == "__main__":
    main()
