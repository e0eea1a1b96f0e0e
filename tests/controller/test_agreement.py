"""Engines and trainer that disagree on lag-0 tokens end the run before the update, with figure, limit and likely cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_controller import World, controller
from virtual_time import run_virtually

from tidemill.controller.policy_check import Agreement
from tidemill.core.errors import PolicyMismatch
from tidemill.core.types import Array, Finish, Group, Sample, Score, Task, Trajectory, Version
from tidemill.observability.diagnosis.mismatch import LogprobGap

NOW, BEFORE = Version(3, fingerprint="f3"), Version(2, fingerprint="f2")
RNG = np.random.default_rng(1)
LOGITS = RNG.normal(0, 2, (6, 40, 20))  # of each row and position
TOKENS = RNG.integers(0, 20, (6, 40)).astype(np.int32)
MASK = np.arange(40) >= 12


class Model:
    """The `forward` of a trainer."""

    async def forward(self, samples: list[Sample]) -> list[Array]:
        return [true_logprobs(s.attempt, s.temperature) for s in samples]


def true_logprobs(row: int, temperature: float) -> Array:
    scaled = LOGITS[row] / temperature
    values = (scaled - np.log(np.exp(scaled).sum(-1, keepdims=True)))[np.arange(40), TOKENS[row]]
    return np.where(MASK, values, 0).astype(np.float32)


def step(recorded: Any, *, temperature: float = 1.0, old_rows: int = 0) -> tuple[list[Group], list[Sample], list[Array]]:
    """A step's groups and samples; recorded(row) is what the engine wrote down. The last `old_rows` are of v2."""
    rows, samples = [], []
    for i in range(len(TOKENS)):
        source = BEFORE if i >= len(TOKENS) - old_rows else NOW
        logprobs = np.where(MASK, recorded(i), 0).astype(np.float32)
        versions = np.where(MASK, source.step, -1).astype(np.int32)
        rows.append(Trajectory(TOKENS[i], MASK, logprobs, versions, Finish.STOP, Score(1.0), (source,), i))
        zero = np.zeros(40, np.float32)
        samples.append(Sample(TOKENS[i], MASK, logprobs, versions, zero, zero, temperature=temperature, group=5, attempt=i))
    return [Group(5, Task("t", "?"), rows)], samples, [true_logprobs(i, temperature) for i in range(len(TOKENS))]


def agreement(dtype: str = "float32") -> Agreement:
    return Agreement(Model(), dtype)  # type: ignore[arg-type]


async def test_rounding_is_agreement():
    await agreement()(NOW, *step(lambda i: true_logprobs(i, 1.0) + 1e-6 * RNG.normal(size=40)))
    await agreement("bfloat16")(NOW, *step(lambda i: true_logprobs(i, 1.0) + 4e-3 * RNG.normal(size=40)))


@pytest.mark.parametrize(
    ("recorded", "cause"),
    [
        (lambda i: true_logprobs(i, 0.7), r"temperature \(the engines sampled at temperature 0.7\)"),
        (lambda i: np.roll(true_logprobs(i, 1.0), -1), "shift by one"),
        (lambda i: np.where(np.arange(40) < 20, 0, true_logprobs(i, 1.0)), "mask"),
        (lambda i: true_logprobs((i + 1) % 6, 1.0), "unknown"),
    ],
)
async def test_a_gross_disagreement_is_refused_and_its_cause_named(recorded, cause):
    with pytest.raises(PolicyMismatch, match=rf"policy@v3: .*mean \|difference\| .* at most 3e-04.*168 tokens.*{cause}"):
        await agreement()(NOW, *step(recorded))


async def test_old_rows_do_not_count():
    wrong = step(lambda i: true_logprobs(i, 0.7 if i >= 3 else 1.0), old_rows=3)
    await agreement()(NOW, *wrong)
    with pytest.raises(PolicyMismatch):
        await agreement()(NOW, *step(lambda i: true_logprobs(i, 0.7 if i >= 2 else 1.0), old_rows=3))
    await agreement()(replace(NOW, incarnation=1), *step(lambda i: true_logprobs(i, 0.7)))  # of an earlier life: lagged


def test_a_probe_that_is_far_off_is_refused():
    gap = LogprobGap()
    gap.add(np.zeros(9), np.full(9, 1e-6))
    agreement().check_probe(NOW, gap)
    gap.add(np.zeros(1), np.ones(1))
    with pytest.raises(PolicyMismatch, match="rows they were asked to score"):
        agreement().check_probe(NOW, gap)


def test_a_disagreement_comes_before_the_update():
    world = World()
    run = controller(world, steps=5, batch=2, max_lag=1)

    async def refuse(served, groups, samples, logprobs):
        if served.step == 2:
            raise PolicyMismatch("they disagree")

    run.hooks.agree = refuse
    with pytest.raises(PolicyMismatch, match="they disagree"):
        run_virtually(run.run())
    assert world.weights == 2 and "end 2" not in world.log and "gradient 2" in world.log
