"""The control plane alone: the real controller, buffer and ledger, between engines and a trainer that compute nothing.

    python benchmarks/controlplane.py [--trajectories 100000] [--engines 1000] [--tokens 2000]

Each virtual engine rolls out one group of 8 at a time, of records that are ready-made; the ledger writes every token and
survives a power cut, as in a run. Prints trajectories a second and the memory on the way, and writes
`results/controlplane.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from harness import save

from tidemill.controller.admission_buffer import Buffer
from tidemill.controller.controller import Controller, Schedule
from tidemill.core.types import Finish, Group, Metrics, PreparedStep, Score, Task, TrainResult, Trajectory, Update, Version
from tidemill.ledger import SqliteLedger

GROUP, BATCH = 8, 125  # trajectories of a group, groups of a step
TARGET = 2000.0  # trajectories a second


class World:
    """Engines, trainer, algorithm and observer in one: they take no time."""

    asks, by_group = (), True

    def __init__(self, tokens: int) -> None:
        rng = np.random.default_rng(0)
        mask = np.arange(tokens) >= tokens // 10
        self.serving = Version(0, fingerprint="f0")
        self.memory: list[int] = []
        self._mask = mask
        self._made = [
            Trajectory(
                tokens=rng.integers(0, 150_000, tokens).astype(np.int32),
                mask=mask,
                logprobs=np.where(mask, -rng.random(tokens), 0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                finish=Finish.STOP,
                outcome=Score(float(i % 2)),
                sample=i,
                text="some words " * 20,
            )
            for i in range(GROUP)
        ]

    async def rollout(self, group_id: int, task: Task) -> Group:
        await asyncio.sleep(0)
        version = self.serving
        versions = np.where(self._mask, version.step, -1).astype(np.int32)
        return Group(group_id, task, [replace(each, versions=versions, sources=(version,)) for each in self._made])

    async def forward_backward(self, samples: Any, losses: Any) -> TrainResult:
        await asyncio.sleep(0)
        return TrainResult({}, [])

    async def apply(self, scale: float) -> Metrics:
        return {"loss": 0.0}

    async def publish(self, version: Version) -> Version:
        self.serving = replace(version, fingerprint=f"f{version.step}")
        return self.serving

    def drop_reason(self, group: Group) -> str | None:
        return None

    def rows(self, *_: Any) -> Any:
        return []

    def prepare(self, *_: Any) -> Any:
        return PreparedStep([], {}, [Update([], 1.0)], {})

    def admitted(self, group_id: int) -> None: ...
    def rolled_out(self, group: Group, dropped: str | None) -> None: ...
    def published(self, version: Version) -> None: ...
    def evaluated(self, step: int, results: Metrics) -> None: ...
    def saving(self, step: int) -> None: ...

    async def trained(self, *_: Any) -> None:
        self.memory.append(psutil.Process().memory_info().rss)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--folder", type=Path, help="where the ledger is written; a temporary folder here")
    args = parser.parse_args()
    steps = -(-args.trajectories // (GROUP * BATCH))
    with tempfile.TemporaryDirectory(dir=args.folder or Path.cwd(), prefix=".controlplane-") as place:
        with SqliteLedger(place) as ledger:
            world = World(args.tokens)
            buffer = Buffer(batch=BATCH, max_lag=max(0, args.engines // BATCH - 1), total=steps * BATCH)

            def task_at(group_id: int) -> Task:
                return Task(f"task-{group_id % 5000}", f"a question, number {group_id % 5000}", {"answer": "yes"}, "virtual")

            controller = Controller(
                Schedule(steps),
                buffer,
                task_at,
                world,
                world,
                world,
                ledger,
                world,
                world,  # pyright: ignore
            )
            begin, used = time.perf_counter(), time.process_time()
            asyncio.run(controller.run())
            seconds, cpu = time.perf_counter() - begin, time.process_time() - used
            counts = ledger.counts()
            assert counts.conserved and counts.trained == steps * BATCH, counts
        size = sum(path.stat().st_size for path in Path(place).rglob("*") if path.is_file())
    done = steps * BATCH * GROUP
    tenth, end = world.memory[len(world.memory) // 10], world.memory[-1]
    print(f"{done:,} trajectories of {args.tokens:,} tokens, {buffer.slots:,} engines, {steps} steps: {seconds:.1f} s")
    print(f"  {done / seconds:,.0f} trajectories/s durable; target {TARGET:,.0f}")
    print(f"  {1e6 * cpu / done:.0f} us of CPU time and {size / done / 1e3:.1f} kB a trajectory")
    most = max(world.memory)
    print(f"  memory {tenth / 1e6:.0f} MB after a tenth, {end / 1e6:.0f} MB at the end, {most / 1e6:.0f} MB at most")
    found = {"trajectories": done, "seconds": seconds, "per_second": done / seconds, "cpu_s": cpu, "bytes": size}
    print(f"written to {save('controlplane', found | {'memory': world.memory}, {})}")


if __name__ == "__main__":
    main()
