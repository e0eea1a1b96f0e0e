"""Memory of several policies: what trainer and engine hold once, and what they hold for each adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_memory import FAMILIES, SHAPE, of, size

from tidemill.cli.commands.plan_sections import figures
from tidemill.models.adapter_config import AdapterConfig
from tidemill.models.architecture import Architecture, parameters
from tidemill.models.hf_weights import empty_decoder
from tidemill.models.lora import attach
from tidemill.run.planner.memory_model import Models, engine_memory, processes, served_adapters
from tidemill.run.planner.trainer_memory import trainer_memory
from tidemill.run.recipe import RunConfig, load_recipe

ARCH = Architecture.from_dict(SHAPE | FAMILIES["qwen3"])
ENV = [{"kind": "guess", "name": "words", "policy": "speller"}, {"kind": "guess", "name": "sums", "policy": "adder"}]
RANKS = {"speller": 8, "adder": 4}


def recipe(*overrides: str, frozen: Path | None = None, ranks: dict[str, int] = RANKS) -> RunConfig:
    policies: dict[str, Any] = {
        name: {"lora": {"rank": rank, "targets": ["q_proj", "up_proj"]}} for name, rank in ranks.items()
    }
    if frozen is not None:
        policies["judge"] = {"frozen": str(frozen)}
    env = ENV if len(ranks) > 1 else "guess"
    base = {"run_dir": "runs/x", "model": "new:0.1m", "env": env, "policies": policies, "trainer": {"lora": {}}}
    return load_recipe([], ["trainer.device=cpu", "engine.device=cpu", *overrides], base)


def adapter(rank: int) -> int:
    """The bytes of one adapter."""
    decoder = empty_decoder(ARCH)
    attach(decoder, AdapterConfig(rank=rank, targets=("q_proj", "up_proj")))
    return size(p for p in decoder.parameters() if p.requires_grad)


def test_a_trainer_holds_the_model_once_and_each_adapter_with_its_gradients_moments_and_copies():
    both, model = adapter(8) + adapter(4), 4 * parameters(ARCH)
    said = of(trainer_memory(recipe("steps=2"), ARCH, None))
    assert said["weights"] == model + both and said["gradients"] == both and said["two moments"] == 2 * both
    assert said["copy while a checkpoint is written"] == 3 * both
    assert said["two versions on their way to engines"] == 2 * both
    alone = of(trainer_memory(recipe(ranks={"speller": 8}), ARCH, None))
    assert alone["gradients"] == adapter(8) and alone["weights"] == model + adapter(8)


def test_of_several_adapters_one_pass_follows_the_other():
    small, large = (
        next(each.bytes for each in trainer_memory(recipe(ranks={"a": rank}), ARCH, None) if each.what.startswith("act"))
        for rank in (2, 64)
    )
    env = [each | {"policy": name} for each, name in zip(ENV, "ab", strict=True)]
    config = recipe(ranks={"a": 2}).model_dump(mode="json")
    config |= {"env": env, "policies": {"a": {"lora": {"rank": 2}}, "b": {"lora": {"rank": 64}}}}
    for name in "ab":
        config["policies"][name]["lora"]["targets"] = ["q_proj", "up_proj"]
    both = trainer_memory(load_recipe([], (), config), ARCH, None)
    assert small < large == next(each.bytes for each in both if each.what.startswith("activations"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_holds_the_model_once_and_no_spare(dtype: str, tmp_path: Path):
    AdapterConfig(rank=2, targets=("q_proj", "up_proj")).write(tmp_path)
    config = recipe(f"engine.dtype={dtype}", frozen=tmp_path)
    adapters = served_adapters(config)
    assert [each.rank for each in adapters] == [8, 4, 2]
    item = torch.empty((), dtype=getattr(torch, dtype)).element_size()
    several = of(engine_memory(config.engine, ARCH, adapted=True, beside=adapters))
    one = of(engine_memory(config.engine, ARCH, adapted=True))
    assert several["weights"] == one["weights"] == item * parameters(ARCH)
    assert "spare for the next version" in one and "frozen base" in one
    assert "spare for the next version" not in several and "frozen base" not in several
    served = sum(adapter(rank) for rank in (8, 4, 2)) // 4 * item
    assert several["adapters of 3 policies"] == served
    assert several["next version of an adapter"] == adapter(8) + adapter(8) // 4 * item
    packed = [sum(size for what, size in each.items() if what.startswith("packed")) for each in (several, one)]
    assert 2 * packed[0] == packed[1]


def test_check_counts_the_adapters_of_all_policies(tmp_path: Path):
    found = {each.name: of(each.held) for each in processes(recipe(), Models(ARCH))}
    assert "adapters of 2 policies" in found["engine"] and "frozen base" not in found["engine"]
    said = figures(recipe("run_dir=runs/none"))
    assert "adapters of 2 policies" in said["memory"]["processes"]["engine"]["bytes"]
    assert said["reduction"]["denominator"] == "each policy's own, of its groups, as if it were trained alone"
