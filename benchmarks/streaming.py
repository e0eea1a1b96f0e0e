"""What `placement.stream` gains where trainer and engines share nothing: steps with it and without, under virtual time.

    python benchmarks/streaming.py [--groups 32] [--steps 100]

The real controller and buffer; groups take log-normal times, whatever else is sampled, in units of what the longest of a
step's takes on average, and a step's gradient so much as the column says, a group the same share of it. Computes nothing and
is the same everywhere. Prints seconds a step and writes `results/streaming.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from harness import save, table

from tidemill.controller.admission_buffer import Buffer
from tidemill.controller.controller import Controller, Schedule
from tidemill.core.types import Finish, Group, PreparedStep, Sample, Score, Task, TrainResult, Trajectory, Update, Version

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from virtual_time import run_virtually

SIGMAS, SHARES, LAGS = (0.3, 0.8, 1.3), (0.25, 0.5, 1.0), (0, 1, 2, 4)
FILLING, PUBLISH_S = 5, 0.01


@dataclass
class World:
    """Rollouts, trainer, publisher, algorithm, ledger and observer, which take their time and do nothing."""

    seconds: np.ndarray
    train_s: float  # of a group
    serving: Version = field(default_factory=lambda: Version(0, fingerprint="f0"))
    ends: list[float] = field(default_factory=list)
    asks, by_group = (), True

    async def rollout(self, group_id: int, task: Task) -> Group:
        version = self.serving
        await asyncio.sleep(self.seconds[group_id])
        zeros, mask, steps = np.zeros(2, np.float32), np.array([False, True]), np.full(2, version.step, np.int32)
        row = Trajectory(np.zeros(2, np.int32), mask, zeros, steps, Finish.STOP, Score(0.0), (version,))
        return Group(group_id, task, [row])

    def rows(self, groups: list[Group], step: int) -> list[Sample]:
        every = [(group.id, group.trajectories[0]) for group in groups]
        return [Sample(t.tokens, t.mask, t.logprobs, t.versions, t.logprobs, t.logprobs, group=i) for i, t in every]

    def prepare(self, groups: Any, step: int, rows: list[Sample], logprobs: Any) -> PreparedStep:
        return PreparedStep(rows, {}, [Update(rows, 1.0)], {})

    async def forward_backward(self, samples: list[Sample], losses: Any) -> TrainResult:
        await asyncio.sleep(self.train_s * len(samples))
        return TrainResult({}, [])

    async def apply(self, scale: float) -> dict[str, float]:
        return {}

    async def publish(self, version: Version) -> Version:
        await asyncio.sleep(PUBLISH_S)
        self.serving = Version(version.step, fingerprint=f"f{version.step}")
        return self.serving

    async def trained(self, *_: Any) -> None:
        self.ends.append(asyncio.get_running_loop().time())

    def drop_reason(self, group: Group) -> None:
        return None


class Deaf:
    """A ledger and an observer that are told everything."""

    def __init__(self, world: World) -> None:
        self.trained = world.trained

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def seconds_a_step(groups: int, steps: int, lag: int, sigma: float, share: float, stream: int) -> float:
    drawn = np.random.default_rng(0).lognormal(0, sigma, (FILLING + steps + lag + 1, groups))
    world = World((drawn / drawn.max(1).mean()).ravel(), share / groups)
    parts: Any = (world, world, world, Deaf(world), world, Deaf(world))
    buffer = Buffer(batch=groups, max_lag=lag, total=(FILLING + steps) * groups)
    schedule = Schedule(FILLING + steps, stream=stream)
    run_virtually(Controller(schedule, buffer, lambda i: Task(str(i), ""), *parts).run())
    return (world.ends[-1] - world.ends[FILLING - 1]) / steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for sigma in SIGMAS:
        for share in SHARES:
            for lag in LAGS:
                given = (args.groups, args.steps, lag, sigma, share)
                without, streamed = (seconds_a_step(*given, stream) for stream in (0, 1))
                row: dict[str, Any] = {"sigma of rollouts": sigma, "a gradient": share, "max_lag": lag}
                rows.append(row | {"waiting": without, "streaming": streamed, "x": without / streamed})
    print(table(rows))
    print(f"written to {save('streaming', rows, vars(args))}")


if __name__ == "__main__":
    main()
