"""An attempt that failed before its first reply: whoever reads trajectories meets one without a sampled token, or any."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollout import FakeEnvironment, roll
from test_streaming import CASES, STEP, Asked, groups_of

from tidemill.algorithms.prepare_step import ConfiguredAlgorithm
from tidemill.cli.commands.pairs import _answers
from tidemill.controller.evaluation import summary
from tidemill.controller.run_monitor import count, describe
from tidemill.controller.train_step import computed_tokens, train_on
from tidemill.core import serialization
from tidemill.core.types import Finish, Group, InfraError, Score, Task, Trajectory, Version
from tidemill.observability.diagnosis.mismatch import lag_zero
from tidemill.observability.diagnosis.symptoms import _identical
from tidemill.observability.metrics import StepMetrics

FAILED = InfraError("ConnectionError: the sandbox did not start")


def attempt(prompt: int, sampled: int, outcome: Score | InfraError | None = None) -> Trajectory:
    mask = np.arange(prompt + sampled) >= prompt
    return Trajectory(
        tokens=np.arange(prompt + sampled, dtype=np.int32),
        mask=mask,
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.where(mask, 2, -1).astype(np.int32),
        finish=Finish.STOP if sampled else Finish.ENV_ERROR,
        outcome=outcome or (Score(1.0) if sampled else FAILED),
        sources=(Version(2),) if sampled else (),
        turns=int(sampled > 0),
    )


SHAPES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=6)


@settings(max_examples=100)
@given(SHAPES)
def test_what_is_counted_and_said_is_of_those_that_replied(shapes: list[tuple[int, int]]):
    group = Group(0, Task("t", "?", env="e"), [replace(attempt(*each), sample=i) for i, each in enumerate(shapes)])
    replied = [(p, n) for p, n in shapes if n]
    shared = max((p for p, _ in replied), default=0)
    assert computed_tokens(group) == shared + sum(n for _, n in replied)
    assert group.oldest == (2 if replied else None)

    window = StepMetrics()
    count(window, group, None)
    describe(window, [group])
    figures = window.take()
    assert figures["infra_errors"] == len(shapes) - len(replied) and figures["sampled_tokens"] == sum(n for _, n in replied)
    if replied:
        mean = sum(n for _, n in replied) / len(replied)
        assert (figures["length/mean"], figures["reward/mean"]) == (pytest.approx(mean), 1.0)
    else:
        assert not math.isfinite(figures.get("reward/mean", math.nan)) and not figures.get("length/mean")

    found = summary([group])
    assert found["accuracy"] == pytest.approx(len(replied) / len(shapes))
    assert found["length"] == (pytest.approx(sum(n for _, n in replied) / len(replied)) if replied else 0.0)
    assert all(map(math.isfinite, found.values()))
    wrong = replace(group, trajectories=[replace(t, outcome=Score(0.0)) for t in group.trajectories if t.mask.any()])
    assert _identical([group]) == 0.0  # all are right
    assert _identical([wrong]) == float(len({(p, n) for p, n in replied}) == 1 and len(replied) > 1)
    assert lag_zero([group], [], Version(2)) == []
    for each in group.trajectories:
        prompt = each.tokens[~each.mask]
        assert _answers(each, prompt) is bool(each.mask.any())


@pytest.mark.parametrize("name", CASES)
async def test_no_algorithm_trains_otherwise_beside_them(name: str):
    algorithm, rng = CASES[name], np.random.default_rng(5)
    groups, beside = groups_of(algorithm, rng), groups_of(algorithm, np.random.default_rng(5))
    for group in beside:
        for position, shape in enumerate([(0, 0), (3, 0), (0, 0)]):
            failed = attempt(*shape)
            failed.sample = 7 + position
            group.trajectories.insert(int(rng.integers(len(group.trajectories) + 1)) if position else 0, failed)
    one, other = Asked(), Asked()
    expected, _, _ = await train_on(one, ConfiguredAlgorithm(algorithm, 9), groups, (), STEP)
    found, _, _ = await train_on(other, ConfiguredAlgorithm(algorithm, 9), beside, (), STEP)
    assert other.scales == one.scales and len(other.trained) == len(one.trained) > 0
    for a, b in zip(one.trained, other.trained, strict=True):
        for of in ("tokens", "advantages", "weights"):
            np.testing.assert_array_equal(getattr(a, of), getattr(b, of))
    assert found.metrics.get("unscored", 21.0) == 21.0 + expected.metrics.get("unscored", 0.0)
    for mine, theirs in zip(groups, beside, strict=True):
        assert ConfiguredAlgorithm(algorithm, 9).drop_reason(theirs) == ConfiguredAlgorithm(algorithm, 9).drop_reason(mine)
    nothing = Group(9, Task("t", "?"), [attempt(0, 0), attempt(2, 0)])
    assert ConfiguredAlgorithm(algorithm, 9).drop_reason(nothing) == "unscored"


async def raises(task, chat):
    raise ConnectionError("the sandbox did not start")


async def surrogates(task, chat):
    raise FileNotFoundError("caf\udce9.txt")  # as os.listdir gives a name that is no UTF-8


async def scores(task, chat):
    return Score(1.0, {"part\udce9": 1.0})


async def numbers(task, chat):
    return 0


async def decides_nothing(task, chat):
    return None


async def asks_for_less_than_nothing(task, chat):
    return float(len(await chat.reply(task.prompt, max_tokens=-1)))


async def asks_for_nothing(task, chat):
    return float(len(await chat.reply(task.prompt, max_tokens=0)))


async def says_nothing(task, chat):
    return float(len(await chat.reply(None)))


async def says_without_content(task, chat):
    return float(len(await chat.reply([{"role": "user"}])))


async def says_too_much(task, chat):
    return float(len(await chat.reply("a" * 100)))


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (raises, "ConnectionError: the sandbox did not start"),
        (surrogates, r"caf\\udce9.txt"),
        (scores, r"returned Score\(1\) for an attempt without a reply"),
        (numbers, r"returned Score\(0\) for an attempt without a reply"),
        (decides_nothing, "returned nothing for an attempt without a reply"),
        (asks_for_less_than_nothing, "max_tokens=-1: expected a whole number >= 1"),
        (asks_for_nothing, "max_tokens=0: expected a whole number >= 1"),
        (says_nothing, "Error: "),
        (says_without_content, "Error: "),
        (says_too_much, "the prompt"),
    ],
)
async def test_it_is_an_infrastructure_error_of_that_attempt(run, reason: str, monkeypatch):
    """Also where `judge` would give it a score, had it been asked."""
    # pytest keeps what is logged, and cannot send half a surrogate pair from one of its processes to another
    monkeypatch.setattr(logging.getLogger("tidemill"), "propagate", False)

    async def judge(task, attempts):
        return [Score(1.0)] * len(attempts)

    for outcome in await roll(FakeEnvironment(run, judge)):
        assert isinstance(outcome, InfraError) and re.search(reason, outcome.reason), outcome
        assert serialization.encode(outcome)


async def test_an_environment_may_catch_a_limit_that_is_none():
    async def catches(task, chat):
        with pytest.raises(ValueError, match="expected a whole number >= 1"):
            await chat.reply(task.prompt, max_tokens=0)
        await chat.reply(task.prompt, max_tokens=2**70)
        return 1.0

    assert await roll(FakeEnvironment(catches)) == [Score(1.0)] * 2
