"""Memory of several policies that are whole models: a trainer's part for each, and engines of each."""

from __future__ import annotations

from pathlib import Path

from test_memory import FAMILIES, SHAPE, of

from tidemill.models.architecture import Architecture, parameters
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.run.planner.memory_model import Models, processes
from tidemill.run.planner.trainer_memory import trainer_memory
from tidemill.run.recipe import RunConfig, load_recipe

ARCH = Architecture.from_dict(SHAPE | FAMILIES["qwen3"])
MODEL = 4 * parameters(ARCH)


def recipe(*names: str, frozen: dict[str, Path] | None = None) -> RunConfig:
    env = [{"kind": "guess", "name": f"env-{name}", "policy": name} for name in names]
    policies = {name: {} for name in names} | {name: {"frozen": str(each)} for name, each in (frozen or {}).items()}
    base = {"run_dir": "runs/x", "model": "new:0.1m", "env": env or "guess", "policies": policies}
    return load_recipe([], ["trainer.device=cpu", "engine.device=cpu", "placement.engines=2", "steps=2"], base)


def test_a_trainer_holds_each_whole_model_with_its_gradients_moments_and_copies():
    said = of(trainer_memory(recipe("a", "b"), ARCH, None))
    assert said["weights"] == said["gradients"] == 2 * MODEL and said["two moments"] == 4 * MODEL
    assert said["copy while a checkpoint is written"] == 6 * MODEL
    assert said["two versions on their way to engines"] == 4 * MODEL
    alone = of(trainer_memory(recipe(), ARCH, None))
    assert alone["weights"] == MODEL and alone["two moments"] == 2 * MODEL


def test_each_whole_model_has_engines_of_its_own(tmp_path: Path):
    fresh_model(tmp_path / "judge", alphabet="ab\n", context=64, **SIZES["2m"])
    config = recipe("a", "b", frozen={"judge": tmp_path / "judge"})
    assert config.engine_pools == 3 and config.whole_policies == ("a", "b", "judge") and not config.side_by_side
    found = {each.name: each for each in processes(config, Models(ARCH))}
    assert "engine" not in found
    for name in ("a", "b"):
        held = of(found[f"engine of {name}"].held)
        assert found[f"engine of {name}"].count == 2
        assert held["weights"] == held["spare for the next version"] == MODEL
    judge = of(found["engine of judge"].held)
    assert judge["weights"] == 4 * parameters(Architecture.from_folder(tmp_path / "judge"))
    assert "spare for the next version" not in judge, "nothing is published to it"
