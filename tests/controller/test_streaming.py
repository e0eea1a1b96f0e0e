"""A trainer that waits for the rest of a step begins with what has finished: the same gradient, the same record, sooner."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from test_controller import World, controller
from virtual_time import run_virtually

from tidemill.algorithms.advantages import ADVANTAGES, NEEDS
from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.corrections import CORRECTIONS
from tidemill.algorithms.mixture import Mixture
from tidemill.algorithms.prepare_step import ConfiguredAlgorithm
from tidemill.algorithms.presets import PRESETS
from tidemill.controller.train_step import Begun, computed_tokens, train_on
from tidemill.core.errors import PolicyMismatch, RunFailed
from tidemill.core.types import (
    GREEDY,
    Finish,
    Group,
    LossSpec,
    PreparedStep,
    Sample,
    Score,
    Task,
    TrainResult,
    Trajectory,
    Update,
    Version,
)

TOKENS = 8  # of a group of `World`
STEP = 6


@dataclass
class Streaming(World):
    """Its trainer takes its time for each group."""

    batch: int = 1
    asks: tuple[str, ...] = ()
    parts: list[tuple[int, int]] = field(default_factory=list)  # (weights, groups) of each pass
    steps: list[list[int]] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=lambda: [[]])  # the groups of each update
    applied: list[float] = field(default_factory=list)
    wrong: int = -1  # the group that comes out otherwise among the whole step

    async def forward_backward(self, samples, losses) -> TrainResult:
        self.parts.append((self.weights, len(samples)))
        self.log.append(f"gradient {self.weights}")
        self.seen[-1] += [sample.group for sample in samples]
        before = self.weights
        await asyncio.sleep(self.train_s * len(samples) / self.batch)
        assert before == self.weights
        return TrainResult({"tokens": float(TOKENS * len(samples))}, [np.full(TOKENS, float(s.group)) for s in samples])

    async def apply(self, scale: float) -> dict[str, float]:
        self.log.append(f"apply {self.weights}")
        self.applied.append(scale)
        self.seen.append([])
        return await super().apply(scale)

    async def publish_to_engines(self, version: Version) -> Version:
        self.log.append(f"publishing {version.step}")
        return await super().publish_to_engines(version)

    def begin_step(self, step: int, incarnation: int, group_ids, again=()) -> None:
        super().begin_step(step, incarnation, group_ids, again)
        self.steps.append([*group_ids, *again])

    def rows(self, groups, step):
        return [sample_of(group.trajectories[0], group.id) for group in groups]

    def prepare(self, groups, step, rows, logprobs):
        self.lags += [self.weights - (g.oldest or 0) for g in groups]
        whole = len(groups) == self.batch
        samples = [replace(row, weights=row.weights * (2 if whole and row.group == self.wrong else 1)) for row in rows]
        return PreparedStep(samples, {}, [Update(samples, 1.0 / len(groups))], {})


def sample_of(trajectory: Trajectory, group: int) -> Sample:
    zeros, ones = np.zeros(len(trajectory.tokens), np.float32), np.ones(len(trajectory.tokens), np.float32)
    return Sample(trajectory.tokens, trajectory.mask, trajectory.logprobs, trajectory.versions, zeros, ones, group=group)


def run(world: Streaming, stream: int, *, steps: int, max_lag: int, window: int = 1):
    """Seconds that it took, of the run's own clock."""
    loop = controller(world, steps=steps, batch=world.batch, max_lag=max_lag, window=window, stream=stream)

    async def timed() -> float:
        assert await loop.run() == steps
        return asyncio.get_running_loop().time()

    return run_virtually(timed())


@pytest.mark.parametrize("seed", range(40))
def test_what_holds_of_a_run_holds_of_one_that_streams(seed):
    rng = random.Random(seed)
    batch, lag, steps = rng.randint(2, 6), rng.randint(0, 3), rng.randint(3, 20)
    world = Streaming(
        rng,
        gen_s=rng.choice([5, 20, 100]),
        sigma=rng.choice([0.1, 0.8, 1.5]),
        train_s=rng.choice([1, 10, 60]),
        sync_s=rng.choice([0, 1, 15]),
        drop_share=rng.choice([0, 0.3]),
        staggered_s=rng.choice([0, 3, 40]),
        batch=batch,
    )
    run(world, rng.choice([1, 2 * TOKENS]), steps=steps, max_lag=lag, window=rng.randint(1, lag * batch + 1))
    assert max(world.lags) <= lag and min(world.lags) >= 0 and world.torn == 0
    assert all(len(fate) == 1 for fate in world.fates.values()), "a group without a fate, or with two"
    assert sum(fate == ["trained"] for fate in world.fates.values()) == steps * batch
    assert [groups for groups in world.seen if groups] == world.steps, "each group's gradient once, in its own step"
    assert world.applied == [1 / batch] * steps, "the scale of the whole step"
    for step in range(steps):  # a step is on record before its last gradient, and before any weight changes
        last = max(i for i, line in enumerate(world.log) if line == f"gradient {step}")
        assert world.log.index(f"begin {step}") < last < world.log.index(f"apply {step}")
        assert world.log.index(f"publishing {step}") < world.log.index(f"gradient {step}"), "engines wait for it"


def test_it_is_sooner_and_says_what_it_did():
    took, passes = {}, {}
    for stream in (0, 1):
        world = Streaming(gen_s=20, sigma=0.8, train_s=20, sync_s=0, batch=8)
        took[stream] = run(world, stream, steps=20, max_lag=0)
        passes[stream] = len(world.parts)
    assert passes[0] == 20 < 40 < passes[1]
    assert took[1] < 0.9 * took[0]


def test_a_part_is_as_large_as_was_asked_for():
    world = Streaming(gen_s=20, sigma=0.8, train_s=1, batch=8)
    run(world, 3 * TOKENS, steps=10, max_lag=1)
    of_step: dict[int, list[int]] = {}
    for weights, groups in world.parts:
        of_step.setdefault(weights, []).append(groups)
    assert all(sum(parts) == 8 and min(parts[:-1], default=3) >= 3 for parts in of_step.values())
    assert any(len(parts) > 1 for parts in of_step.values())


def test_a_stop_leaves_what_was_begun_pending():
    world = Streaming(gen_s=20, sigma=0.8, train_s=1, batch=4)
    loop = controller(world, steps=10, batch=4, max_lag=0, stream=1)
    begun = world.forward_backward

    async def stopping(samples, losses):
        if world.weights == 2 and len(world.parts) and world.parts[-1][0] == 2:
            loop.stop()
        return await begun(samples, losses)

    world.forward_backward = stopping
    assert run_virtually(loop.run()) == 2 == world.weights
    assert world.seen[-1] and all(world.fates[group] == [] for group in world.seen[-1]), "begun, and not trained"
    assert world.saved[-1] == 2


def test_a_part_that_comes_out_otherwise_ends_the_run_before_its_update():
    world = Streaming(gen_s=20, sigma=0.8, train_s=1, batch=4, wrong=5)
    with pytest.raises(AssertionError, match="trained with other numbers"):
        run(world, 1, steps=5, max_lag=0)
    assert world.weights == 1 and "apply 1" not in world.log


async def test_parts_of_different_losses_are_no_step():
    world = Streaming(batch=4, train_s=0)
    groups = [
        Group(i, Task("t", "?"), [(await World(gen_s=0).rollout(i, Task("t", "?"))).trajectories[0]]) for i in range(2)
    ]
    prepare, begun = world.prepare, Begun()

    def weighed(groups, *more):
        return replace(prepare(groups, *more), losses={"policy": LossSpec("ppo_clip", weight=1.0 + groups[0].id)})

    world.prepare = weighed
    await begun.add(world, world, groups[:1], 0)
    with pytest.raises(AssertionError, match="trained with other numbers"):
        await begun.add(world, world, groups[1:], 0)


def test_a_stop_is_heard_while_everything_is_ready():
    world = Streaming(gen_s=0.1, sigma=0.1, train_s=50, batch=4)
    loop = controller(world, steps=100, batch=4, max_lag=2, stream=1)

    async def main() -> int:
        asyncio.get_running_loop().call_later(220, loop.stop)
        return await loop.run()

    assert run_virtually(main()) == 5, "after the step it was in"


def test_a_policy_that_nobody_published_is_refused_before_its_part():
    world = Streaming(gen_s=20, sigma=0.8, train_s=1, batch=4)
    real = world.rollout

    async def stranger(group_id, task):
        group = await real(group_id, task)
        if group_id == 4:
            group.trajectories[0].sources = (Version(1, 7, fingerprint="of another run"),)
        return group

    loop = controller(
        world, steps=5, batch=4, max_lag=0, stream=1, roller=type("Roller", (), {"rollout": staticmethod(stranger)})
    )
    with pytest.raises((PolicyMismatch, RunFailed), match="never published"):
        run_virtually(loop.run())
    assert 4 not in [group for step in world.seen for group in step]


# -- which algorithms ----------------------------------------------------------------------------------------------------

RECOMPUTED = {"old_logprobs": "recompute"}
CASES = {
    **{
        name: AlgorithmSettings.preset(name)
        for name in PRESETS
        if "reference" not in PRESETS[name] and not PRESETS[name].get("given")
    },
    "opd": AlgorithmSettings.preset("opd", reference={"model": "teacher", "distil": 1.0}),
    **{
        f"advantage {name}": AlgorithmSettings.preset("grpo", advantage=name, reduction="token")
        for name in ADVANTAGES
        if NEEDS.get(name) not in ("values", "of_seats") and name not in ("pkpo", "remax")
    },
    **{f"correction {name}": AlgorithmSettings.preset("grpo", corrections=[name], **RECOMPUTED) for name in CORRECTIONS},
    **{
        f"reduction {name}": AlgorithmSettings.preset("grpo", reduction=name)
        for name in ("token", "sequence", "prompt", "attempt", "fixed")
    },
    "two updates": AlgorithmSettings.preset("grpo", updates={"epochs": 2}, **RECOMPUTED),
    "a target": AlgorithmSettings.preset("grpo", entropy={"target": 0.52, "coefficient": 0.1}),
    "overlong": AlgorithmSettings.preset("grpo", overlong={"treat": "penalty", "cache": 4}),
    "kl in the reward": AlgorithmSettings.preset("grpo", reference={"kl": 0.1, "into": "reward"}),
}


def groups_of(settings: AlgorithmSettings, rng: np.random.Generator) -> list[Group]:
    found = []
    for number in range(7):
        rows = []
        for sample in range(4 + settings.wants_greedy):
            sampled, n = int(rng.integers(1, 9)), 3 + number % 3
            mask = np.arange(n + sampled) >= n
            turns = tuple(rng.random(1)) if settings.advantage == "turn_level" else ()
            parts = {"a": float(rng.integers(2)), "b": float(rng.random())}
            rows.append(
                Trajectory(
                    rng.integers(0, 9, n + sampled).astype(np.int32),
                    mask,
                    np.where(mask, -rng.random(n + sampled), 0).astype(np.float32),
                    np.where(mask, rng.integers(STEP - 3, STEP, n + sampled), -1).astype(np.int32),
                    Finish.LENGTH if rng.random() < 0.2 else Finish.STOP,
                    Score(float(rng.integers(3)) / 2, parts=parts, turns=turns),
                    sample=GREEDY if sample == 4 else sample,
                )
            )
        found.append(Group(number, Task(f"t{number}", "p"), rows))
    return found


class Asked:
    """A trainer that answers by the row alone."""

    def __init__(self) -> None:
        self.trained: list[Sample] = []
        self.scales: list[float] = []

    async def forward(self, samples, policy):
        return [
            np.where(s.mask, s.logprobs + 0.1 * len(policy) * np.sin(np.arange(len(s.tokens))), 0).astype(np.float32)
            for s in samples
        ]

    async def forward_backward(self, samples, losses):
        self.trained += samples
        return TrainResult({"tokens": float(sum(s.mask.sum() for s in samples))}, [s.logprobs for s in samples])

    async def apply(self, scale):
        self.scales.append(scale)
        return {}


@pytest.mark.parametrize("name", CASES)
async def test_who_is_by_group_makes_the_same_of_parts(name):
    settings, rng = CASES[name], np.random.default_rng(3)
    groups = groups_of(settings, rng)
    whole, parts = Asked(), Asked()
    expected, result, _ = await train_on(whole, ConfiguredAlgorithm(settings, 9), groups[:6], groups[6:], STEP)
    algorithm, begun = ConfiguredAlgorithm(settings, 9), Begun()
    differ = False
    try:
        for first, last in ((0, 1), (1, 3), (3, 5)):
            await begun.add(parts, algorithm, groups[first:last], STEP)
        prepared, again, _ = await train_on(parts, algorithm, groups[:6], groups[6:], STEP, begun=begun)
    except (AssertionError, ValueError):
        differ = True
    assert differ is not algorithm.by_group, "by_group says whether parts may be trained alone"
    if not differ:
        assert parts.scales == whole.scales and len(parts.trained) == len(whole.trained)
        for one, other in zip(parts.trained, whole.trained, strict=True):
            for of in ("tokens", "advantages", "weights", "old_logprobs", "ref_logprobs"):
                np.testing.assert_array_equal(getattr(one, of), getattr(other, of))
        assert prepared.metrics == expected.metrics and again.metrics == result.metrics
        assert len(again.logprobs) == len(result.logprobs)


def test_functions_of_a_users_own_and_mixtures_are_not_by_group(tmp_path):
    (tmp_path / "own.py").write_text(
        "import numpy as np\n"
        "def advantage(x):\n    return x.spread(x.rewards)\n"
        "def factor(x):\n    return np.ones(len(x.behaviour))\n"
    )
    own = [{"advantage": f"{tmp_path}/own.py:advantage"}, {"corrections": [f"{tmp_path}/own.py:factor"]}]
    for changes in own:
        assert not ConfiguredAlgorithm(AlgorithmSettings.preset("grpo", **changes), 9).by_group
    grpo = AlgorithmSettings.preset("grpo")
    assert (
        ConfiguredAlgorithm(grpo, 9).by_group
        and not Mixture({"": grpo, "other": AlgorithmSettings.preset("rloo")}, 9).by_group
    )


def test_tokens_that_siblings_share_are_counted_once():
    def attempt(prompt: int, sampled: int) -> Trajectory:
        mask = np.arange(prompt + sampled) >= prompt
        zeros, steps = np.zeros(len(mask), np.float32), np.where(mask, 0, -1).astype(np.int32)
        return Trajectory(np.zeros(len(mask), np.int32), mask, zeros, steps, Finish.STOP, Score(0.0))

    rows = [attempt(10, 3), replace(attempt(10, 4), sample=1)]
    assert computed_tokens(Group(0, Task("t", "?"), rows)) == 10 + 3 + 4
    assert computed_tokens(Group(0, Task("t", "?"), [*rows, replace(attempt(13, 2), sample=1)])) == 10 + 3 + 4 + 15


def test_an_algorithm_that_looks_at_the_whole_step_is_not_streamed():
    world = Streaming(gen_s=20, sigma=0.8, train_s=1, batch=4)
    world.by_group = False
    run(world, 1, steps=5, max_lag=0)
    assert [groups for _, groups in world.parts] == [4] * 5
