"""The numbers that follow from a recipe: by hand, and as the parts that use them count."""

from __future__ import annotations

import pytest

from tidemill.cli.commands.plan_sections import figures
from tidemill.controller.admission_buffer import Buffer
from tidemill.models.architecture import Architecture
from tidemill.models.new_model import SIZES, architecture
from tidemill.run.planner import plan as plan_module
from tidemill.run.planner.plan import RunPlan, plan_of, warm_up_plan
from tidemill.run.recipe import RunConfig, load_recipe

BASE = {"run_dir": "runs/x", "model": "new:0.1m", "env": "guess"}


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "usable_cores", lambda: 2)


def recipe(*overrides: str) -> RunConfig:
    return load_recipe([], overrides, BASE)


def policy(context: int) -> Architecture:
    return architecture(SIZES["0.1m"], vocab=9, context=context, ends={})


CUT = "engine.context = 1,024, but the model has 48 positions (max_position_embeddings): 48 are used"
GROUPS = ("rollout.groups=6", "rollout.group_size=4")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (GROUPS, {"slots": 12, "samples": 24, "replayed": 0, "step_rows": 24, "most_rows": 24, "updates": 1}),
        ((*GROUPS, "max_lag=3", "rollout.window=5"), {"slots": 20}),
        ((*GROUPS, "max_lag=0"), {"slots": 6}),
        ((*GROUPS, "data.replay.share=0.4"), {"replayed": 2, "step_rows": 32, "samples": 24}),
        ((*GROUPS, "warmup.accuracy=0.5"), {"step_rows": 24, "most_rows": 64}),
        (("algorithm=kto", "rollout.groups=6"), {"samples": 6, "step_rows": 12, "most_rows": 256}),
        (('algorithm={name="dapo", updates={minibatches=2}, old_logprobs="recompute"}',), {"updates": 2}),
        (("steps=30",), {"eval_every": 20, "saves_beside": False}),
        (("steps=30", "eval.every=0", "record.checkpoint_every=10"), {"eval_every": 30, "saves_beside": True}),
        (("engine.dtype=bfloat16",), {"coarsest": "bfloat16"}),
        ((), {"coarsest": "float32", "context": 48, "context_cut": ""}),
        (("engine.context=32",), {"context": 32, "context_cut": ""}),
        (("engine.context=1024",), {"context": 48, "context_cut": CUT}),
        (("placement.trainer_threads=2",), {"lanes": 2, "shares_cores": True, "streams": False}),
        (("placement.trainer_threads=2", "deterministic=true"), {"lanes": 1, "shares_cores": False, "streams": False}),
        (("placement.trainer_threads=2", "engine.batch_invariant=true"), {"lanes": 1, "shares_cores": False}),
        (("placement.trainer_threads=2", "placement.kind=inline"), {"lanes": 1, "shares_cores": False}),
    ],
)
def test_numbers_follow_from_the_recipe(overrides: tuple[str, ...], expected: dict[str, object]) -> None:
    found = plan_of(recipe(*overrides), policy(48))
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize("overrides", [(), ("max_lag=4", "rollout.window=7"), ("max_lag=0", "rollout.groups=3")])
def test_the_buffer_and_the_commands_count_the_same_slots(overrides: tuple[str, ...]) -> None:
    config = recipe(*overrides)
    buffer = Buffer(batch=config.rollout.groups, max_lag=config.max_lag, window=config.rollout.window)
    found: RunPlan = plan_of(config)
    assert found.slots == buffer.slots == figures(config)["slots"]
    assert found.samples == figures(config)["step"]["sequences"]


def test_a_warm_up_has_all_cores_in_turn_and_a_constant_rate() -> None:
    config = recipe("warmup.accuracy=0.5", "warmup.lr=0.02", "placement.engines=3", "trainer.schedule=linear", "steps=9")
    found = warm_up_plan(config)
    placement, trainer = found.config.placement, found.config.trainer
    assert found.warm_up and (placement.engines, placement.engine_threads, placement.trainer_threads) == (1, 2, 2)
    assert trainer.lr == 0.02 and trainer.model_dump()["schedule"] == "constant" and found.saves_beside
    exact = warm_up_plan(recipe("warmup.accuracy=0.5", "deterministic=true")).config.placement
    assert (exact.engines, exact.engine_threads, exact.trainer_threads) == (1, 1, 1)
