"""A reference that engines serve: the same logprobs as in the trainer, the same learning; and what cannot be served."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tidemill
from tidemill.core.config import build
from tidemill.core.errors import ConfigError
from tidemill.core.types import Sample, Support
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.run.cluster import Cluster, start_cluster
from tidemill.run.planner.plan import plan_of
from tidemill.run.recipe import RunConfig
from tidemill.run.recipe_files import check_same_run
from tidemill.run.roles import placed
from tidemill.run.storage.run_folder import RunFolder

LETTERS = "abcd"
TOLERANCE = 1e-5  # nats, in float32: engine and trainer sum in another order
IN_PLACE = {"kind": "inline", "environment": {"workers": 0}}


def models(folder: Path) -> tuple[Path, Path]:
    """A policy, and a larger teacher that speaks its language."""
    for name, size, seed in (("policy", "0.1m", 0), ("teacher", "0.1m", 9)):
        sizes = SIZES[size] | ({"layers": 3} if name == "teacher" else {})
        fresh_model(folder / name, alphabet=LETTERS + "=:\n", context=64, seed=seed, **sizes)
    return folder / "policy", folder / "teacher"


def recipe(folder: Path, engines: int, **tables: Any) -> RunConfig:
    policy, teacher = models(folder)
    placement = IN_PLACE | {"reference_engines": engines}
    base = {"run_dir": folder / "run", "model": str(policy), "env": "guess", "placement": placement}
    return build(RunConfig, base | {"algorithm": {"name": "opd", "reference": str(teacher)}} | tables)


async def parts_of(config: RunConfig, folder: Path, stack: AsyncExitStack) -> Cluster:
    placement = await stack.enter_async_context(placed(config.placement, folder, config.supervise))
    starting = start_cluster(plan_of(config), Path(config.model), RunFolder(folder), placement, lambda kind, detail: None)
    return await stack.enter_async_context(starting)


def rows(seed: int = 0) -> list[Sample]:
    """Ragged, with tokens between that nobody sampled, two temperatures, a row of weights only and one of nothing."""
    rng, made = np.random.default_rng(seed), []
    for i, length in enumerate((7, 30, 2, 51, 12, 9)):
        mask = np.arange(length) >= max(1, length // 3)
        mask[length // 2 : length // 2 + i] = False
        mask &= i < 4
        weights = np.where((np.arange(length) > 3) & (i == 4), 1, 0).astype(np.float32)
        nothing, tokens = np.zeros(length, np.float32), rng.integers(0, 10, length).astype(np.int32)
        versions = np.where(mask, 0, -1).astype(np.int32)
        made.append(Sample(tokens, mask, nothing, versions, nothing, weights, temperature=(1.0, 0.6)[i % 2]))
    return made


@pytest.mark.parametrize("engines", [1, 2])
async def test_engines_say_what_the_trainer_would(tmp_path, engines):
    async with AsyncExitStack() as stack:
        own = await parts_of(recipe(tmp_path / "own", 0), tmp_path, stack)
        served = await parts_of(recipe(tmp_path / "served", engines), tmp_path, stack)
        assert len(own.pools) == 1 and len(served.pools) == 2 and len(served.handles()) == 2 + engines
        for policy in ("reference", "policy"):
            expected, found = [await parts.trainer.forward(rows(), policy) for parts in (own, served)]
            for a, b, row in zip(found, expected, rows(), strict=True):
                assert a.dtype == np.float32
                np.testing.assert_allclose(a, b, atol=TOLERANCE)
                assert not a[~row.mask & (row.weights == 0)].any()
            assert sum(np.abs(b).sum() for b in expected) > 100
        a, b = [await served.trainer.forward(rows(), who) for who in ("reference", "policy")]
        assert max(np.abs(x - y).max() for x, y in zip(a, b, strict=True)) > 0.1, "another policy, or nothing was compared"
        with pytest.raises(ValueError, match="was built without a reference"):
            await served.handles()[0].proxy.forward(rows(), "reference")


async def test_to_the_last_bit_where_the_engine_has_one_answer(tmp_path):
    """What a deterministic run relies on: neither a row's company nor which engine scores it shows in its bits."""
    config = recipe(tmp_path, 2, deterministic=True)
    assert config.engine.batch_invariant
    async with AsyncExitStack() as stack:
        trainer = (await parts_of(config, tmp_path, stack)).trainer
        together = await trainer.forward([*rows(1), *rows()], "reference")
        alone = [(await trainer.forward([row], "reference"))[0] for row in rows()]
        for a, b in zip(together[-len(alone) :], alone, strict=True):
            np.testing.assert_array_equal(a, b)


async def test_a_row_of_a_truncated_distribution_is_refused(tmp_path):
    async with AsyncExitStack() as stack:
        trainer = (await parts_of(recipe(tmp_path, 1), tmp_path, stack)).trainer
        row = rows()[0]
        row.support = Support(np.zeros(0, np.int32), np.zeros(1 + int(row.mask.sum()), np.int32))
        with pytest.raises(ExceptionGroup) as raised:
            await trainer.forward([row], "reference")
        assert raised.group_contains(ValueError, match="set placement.reference_engines = 0")


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"algorithm": "grpo"}, "there is no reference to serve"),
        ({"algorithm": {"name": "grpo", "reference": {"kl": 0.1, "every": 2}}}, "a reference that is served never moves"),
        ({"rollout": {"top_p": 0.9}}, "scores over the whole vocabulary"),
        ({"rollout": {"top_k": 5}}, "scores over the whole vocabulary"),
        ({"rollout": {"min_p": 0.1}}, "scores over the whole vocabulary"),
    ],
)
def test_what_cannot_be_served(tmp_path, tables, says):
    with pytest.raises(ConfigError, match=says):
        recipe(tmp_path, 1, **tables)
    recipe(tmp_path / "own", 0, **tables)


def test_a_deterministic_run_does_not_change_who_answers(tmp_path):
    for deterministic in (False, True):
        trees = [
            recipe(tmp_path / f"{deterministic}{n}", n, deterministic=deterministic, run_dir="r", model="m").model_dump()
            for n in (0, 1, 2)
        ]
        for tree in trees:
            tree["algorithm"]["reference"]["model"] = "teacher"
        check_same_run(trees[1], trees[2], tmp_path)
        if deterministic:
            with pytest.raises(ConfigError, match="is deterministic, and trainer and engines round differently"):
                check_same_run(trees[0], trees[1], tmp_path)
        else:
            check_same_run(trees[0], trees[1], tmp_path)


@tidemill.environment(
    tasks=lambda split: [{"prompt": f"{c}{x}"} for c in LETTERS for x in ("=" if split == "train" else ":")]
)
async def speak(task: tidemill.Task, chat: tidemill.Chat) -> tidemill.Score:
    """Anything: the teacher is all that is learnt from."""
    await chat.reply(task.prompt)
    return tidemill.Score(0.0)


def distances(folder: Path, engines: int, steps: int, env: Any = speak) -> list[float]:
    """The mean of log(policy / teacher) over each step's tokens."""
    policy, teacher = models(folder)
    tidemill.train(
        env,
        policy,
        run_dir=folder / "run",
        quiet=True,
        algorithm={"name": "opd", "reference": str(teacher)},
        placement=IN_PLACE | {"reference_engines": engines},
        rollout={"groups": 8, "group_size": 4, "max_tokens": 4, "temperature": 0.8},
        trainer={"lr": 3e-3},
        eval={"every": 0, "tasks": 4, "final_tasks": 4},
        record={"checkpoint_every": 0, "trace": False},
        scoring={"accept": ["gold", "garbage"]},
        steps=steps,
        max_lag=0,
    )
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line["train/log_reference_ratio"] for line in lines if "train/log_reference_ratio" in line]


@pytest.mark.parametrize("steps", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_a_policy_learns_from_a_teacher_that_is_served(tmp_path, steps):
    served = distances(tmp_path / "served", 1, steps=steps)
    assert served[:3] == pytest.approx(distances(tmp_path / "own", 0, steps=3), abs=1e-4)
    assert len(served) == steps
    assert steps < 30 or np.mean(served[-5:]) < 0.5 * np.mean(served[:3])
