"""The bound on lag for attempts with branches: of every row's tokens, under commits at any time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import numpy as np
import pytest
from envs.random_agents import TOKENIZERS, Agent
from test_controller import World, controller
from virtual_time import run_virtually

from tidemill.core.types import Completion, Finish, GenerateRequest, Group, Score, Task, Trajectory


@dataclass
class TreeEngine:
    """Samples one token after another, each by the version that is served then."""

    world: World
    rng: random.Random
    end: int

    async def generate(self, request: GenerateRequest) -> Completion:
        n, stamps = self.rng.randint(1, 6), []
        for _ in range(n):
            await asyncio.sleep(self.rng.expovariate(1 / self.world.gen_s))
            stamps.append(self.world.serving)
        tokens = np.array([*(self.rng.randint(50, 300) for _ in range(n - 1)), self.end], np.int32)
        steps = np.array([each.step for each in stamps], np.int32)
        return Completion(tokens, np.zeros(n, np.float32), steps, tuple(sorted(set(stamps))), Finish.STOP)

    async def score(self, tokens, policy, temperature, top_k):
        raise AssertionError("nothing is scored here")

    async def abort(self, key: str) -> None:
        raise AssertionError("nothing is aborted here")


class TreeWorld(World):
    """A world whose attempts are trees."""

    branches: int = 0

    async def rollout(self, group_id: int, task: Task) -> Group:
        tokenizer = TOKENIZERS["strips thinking" if group_id % 2 else "appends"]

        async def attempt(sample: int) -> list[Trajectory]:
            agent = Agent(tokenizer, self.rng, TreeEngine(self, self.rng, tokenizer.eos_token_id))
            rows = await agent.play()
            for row in rows:
                row.sample = sample
            return rows

        rows = [row for each in await asyncio.gather(attempt(0), attempt(1)) for row in each]
        self.branches += sum(row.parent is not None for row in rows)
        assert all(row.outcome in (None, Score(1.0)) for row in rows)
        return Group(group_id, task, rows)

    def drop_reason(self, group: Group) -> str | None:
        return None

    def prepare(self, groups, step, rows, logprobs):
        every = [int(version) for g in groups for row in g.trajectories for version in row.versions[row.mask]]
        assert min(every) == min(group.oldest for group in groups), "an attempt is as old as its oldest token"
        self.lags += [self.weights - version for version in every]
        return super().prepare(groups, step, rows, logprobs)


@pytest.mark.parametrize("seed", range(30))
def test_no_token_of_any_branch_is_older_than_max_lag(seed: int) -> None:
    rng = random.Random(seed)
    batch, lag, steps = rng.randint(1, 3), rng.randint(0, 3), rng.randint(3, 8)
    world = TreeWorld(
        rng,
        gen_s=rng.choice([0.1, 1, 5]),
        train_s=rng.choice([0, 1, 10, 60]),
        sync_s=rng.choice([0, 1, 15]),
        staggered_s=rng.choice([0, 3, 40]),
    )
    run = controller(world, steps=steps, batch=batch, max_lag=lag, window=rng.randint(1, lag * batch + 1))
    assert run_virtually(run.run()) == steps
    assert max(world.lags) <= lag and min(world.lags) >= 0 and world.branches > 0
