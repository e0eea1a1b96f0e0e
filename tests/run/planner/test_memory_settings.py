"""Predicted and counted memory for twelve settings, and what is proposed where a run does not fit."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_memory import Alive
from torch import Tensor

from tidemill.core.config import load
from tidemill.core.errors import ConfigError
from tidemill.core.types import LossSpec, Sample, Version
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.models.architecture import Architecture
from tidemill.models.hf_weights import load_folder
from tidemill.models.new_model import ModelSize, fresh_model
from tidemill.models.value_model import ValueModel
from tidemill.run.planner import memory_check, memory_model, trainer_memory
from tidemill.run.planner.memory_check import advised
from tidemill.run.planner.memory_model import Models, processes
from tidemill.run.planner.plan import plan_of
from tidemill.run.recipe import RunConfig
from tidemill.run.roles import build_engine
from tidemill.trainer.companions import Critic, Reference
from tidemill.trainer.moments import made_for
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.optimizer import Optimizer
from tidemill.weight_sync.shared_memory_transport import SharedMemorySender

SETTINGS: dict[str, list[str]] = {
    "as it comes": [],
    "8-bit moments": ["trainer.moments=int8"],
    "served in bfloat16": ["trainer.serving_dtype=bfloat16", "engine.dtype=bfloat16"],
    "all of bfloat16, 8 bits": ["trainer.serving_dtype=bfloat16", "engine.dtype=bfloat16", "trainer.moments=int8"],
    "a cache for all": ["engine.kv_memory_mb=none"],
    "turns": ["placement.share=sleep", "placement.stream=false"],
    "turns, 8 bits": ["placement.share=sleep", "trainer.moments=int8"],
    "no packed copies": ["engine.batch_invariant=true"],
    "a reference": ["algorithm.reference.kl=0.1"],
    "a reference that moves, 8 bits": ["algorithm.reference.kl=0.1", "algorithm.reference.every=2", "trainer.moments=int8"],
    "a critic": ["algorithm=ppo", "algorithm.critic.model=initial"],
    "a critic, 8 bits": ["algorithm=ppo", "algorithm.critic.model=initial", "trainer.moments=int8"],
}
LOSSES = {"policy": LossSpec("ppo_clip", {"clip_low": 0.2, "clip_high": 0.28})}
BOUNDS = ("activations", "a step of")  # of one moment, and not exact: `test_memory` holds them against that


def recipe(*overrides: str, model: str = "new:0.1m") -> RunConfig:
    base = {"run_dir": "runs/x", "model": model, "env": "guess", "algorithm": "grpo"}
    usual = ["trainer.device=cpu", "engine.device=cpu", "engine.kv_memory_mb=1"]
    return load(RunConfig, [], [*usual, *overrides], base)


def size(tensors: Iterable[Tensor | None]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    sizes = ModelSize(layers=3, hidden=96, heads=3, kv_heads=3, intermediate=256)
    fresh_model(folder, alphabet="".join(map(chr, range(256, 500))), **sizes)
    return folder


def sample() -> Sample:
    n = 24
    mask, zeros = np.arange(n) >= 8, np.zeros(n, np.float32)
    ones = mask.astype(np.float32)
    versions = np.where(mask, 0, -1).astype(np.int32)
    return Sample(np.arange(n, dtype=np.int32) + 5, mask, zeros - ones, versions, ones, ones, group=0)


def optimizers(trainer: NativeTrainer) -> list[Any]:
    return [each if each is trainer._optimizer else each._optimizer for each in trainer._optimized]


async def counted(config: RunConfig, model: Path, folder: Path) -> dict[str, int]:
    """Bytes of the tensors of one trainer, before its update and after it, and of one engine."""
    settings, decoder = config.trainer, load_folder(model)
    asked, critic = config.reference, None
    if config.critic is not None:
        critic = Critic(ValueModel(load_folder(model)), settings, 9)
    reference = None if asked is None else Reference(load_folder(model), asked.every, asked.decay)
    sender = SharedMemorySender(folder)
    trainer = NativeTrainer(decoder, settings, steps=9, reference=reference, critic=critic, sender=sender)
    for step in (0, 1):  # the second version takes the second slot
        await trainer.publish(Version(step))
        await trainer.forward_backward([sample()], LOSSES)
        trained = [p for each in optimizers(trainer) for p in each.named.values()]
        for p in trained:
            if p.grad is None:  # this loss does not reach a critic
                p.grad = torch.zeros_like(p)
        gradients = size(p.grad for p in trained)
        await trainer.apply(1.0)
    weights = [*decoder.parameters(), *(reference.decoder.parameters() if reference else ())]
    weights += critic.model.trained.parameters() if critic else ()
    moments = [t for each in optimizers(trainer) for held in each._moments.values() for t in held.held]
    assert trainer._room is not None
    room = sum(block.tensor.nbytes for block in [*trainer._room.weights, *trainer._room.optimizer])
    slots = sum(os.fstat(slot.fd).st_size for slot in sender._slots)
    of_trainer = size(weights) + gradients + size(moments) + room + slots
    await trainer.close()
    engine = build_engine(
        EngineSpec(model=model, engine=config.engine, transport="shared_memory", sleeps=plan_of(config).takes_turns)
    )
    assert isinstance(engine, NativeEngine) and engine._cache is not None and engine._updates._staging is not None
    decoders = [d for d in (engine._updates.weights.decoder, engine._updates._staging._spare) if d is not None]
    own = [t for d in decoders for t in (*d.parameters(), *(packed.numbers for _, _, packed in d.packed()))]
    of_engine = size([*own, engine._updates.weights.head, engine._cache.kv])
    await engine.close()
    return {"trainer": of_trainer, "engine": of_engine}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.runs
async def test_what_is_predicted_is_what_is_held(name: str, model: Path, tmp_path: Path):
    config, arch = recipe(*SETTINGS[name], model=str(model)), Architecture.from_folder(model)
    found, turns = await counted(config, model, tmp_path), plan_of(config).takes_turns
    trainer = trainer_memory.trainer_memory(
        config, arch, arch if config.reference else None, arch if config.critic else None, turns=turns
    )
    said = {"trainer": trainer, "engine": memory_model.engine_memory(config.engine, arch, turns=turns)}
    for role, held in said.items():
        predicted = sum(each.bytes for each in held if not each.what.startswith(BOUNDS))
        assert 0.9 <= predicted / found[role] <= 1.1, (role, predicted, found[role], held)


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_moments_on_the_host_are_counted_there(kind: str, model: Path):
    arch, config = Architecture.from_folder(model), recipe("trainer.device=cuda", f"trainer.moments={kind}")
    on_device, host = (
        {h.what: h.bytes for h in trainer_memory.trainer_memory(recipe(*more), arch, None) if h.host is there}
        for more, there in (
            (["trainer.device=cuda", f"trainer.moments={kind}"], False),
            (["trainer.device=cuda", f"trainer.moments={kind}", "trainer.moments_on=host"], True),
        )
    )
    held = made_for(dict(load_folder(model).named_parameters()), config.trainer)
    assert on_device["two moments"] == host["two moments"] == size(t for each in held.values() for t in each.held)


def test_a_part_of_8_bit_moments_takes_what_is_counted():
    model = torch.nn.Linear(1000, 1024, bias=False)
    optimizer = Optimizer(model, recipe("trainer.moments=int8").trainer, updates=3)
    for _ in range(2):
        model.weight.grad = torch.randn_like(model.weight)
        with Alive() as alive:
            optimizer.apply(1.0)  # the first one makes the moments
    assert 0.5 * trainer_memory.DECODED <= alive.most / model.weight.numel() <= trainer_memory.DECODED


# -- turns, and what would make a run fit ------------------------------------------------------------------------------


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Free bytes by device, as they are believed to be."""
    found = {"cpu": 1 << 40, "cuda": 1 << 40}
    monkeypatch.setattr(memory_model, "free_memory", lambda device: found[device.partition(":")[0]])
    return found


def needs(config: RunConfig, arch: Architecture, device: str) -> int:
    return memory_model.demands(processes(config, Models(arch)))[device].needed


BOTH = ["trainer.device=cuda", "engine.device=cuda", "engine.kv_memory_mb=100", "placement.stream=false"]


def test_in_turns_a_device_has_to_hold_one_of_both_at_a_time(model: Path, free: dict[str, int]):
    arch = Architecture.from_folder(model)
    beside, turns = (recipe(*BOTH, f"placement.share={share}") for share in ("beside", "sleep"))
    sizes = {(p.name, h.what): h.bytes for p in processes(turns, Models(arch)) for h in p.held if "cuda" in p.devices}
    weights = sizes["trainer", "weights"]
    engine = sum(size for (name, _), size in sizes.items() if name == "engine")
    trainer = sum(size for (name, _), size in sizes.items() if name == "trainer") - weights
    assert needs(turns, arch, "cuda") == weights + max(engine, trainer) < needs(beside, arch, "cuda")
    waiting = {h.what: h.bytes for p in processes(turns, Models(arch)) for h in p.held if p.name == "trainer's host"}
    assert waiting["moments in the engines' turn"] == sizes["trainer", "two moments"], "they wait in the host's memory"
    assert not any(what.startswith("spare") for _, what in sizes)


SLEEP, HOST = "placement.share=sleep", "trainer.moments_on=host"
LARGE_STEPS, LARGE_CACHE = "trainer.micro_batch_tokens=20000", "trainer.micro_batch_tokens=600"


@pytest.mark.parametrize(
    ("less", "overrides", "helps", "not_named"),
    [
        (0.999, [LARGE_STEPS, SLEEP], "trainer.moments_on = 'host'", "placement.share"),
        (0.98, [LARGE_CACHE], "placement.share = 'sleep'", "micro_batch"),
        (0.999, [LARGE_STEPS, SLEEP, HOST], "trainer.checkpointing = true", "moments"),
    ],
)
def test_what_would_make_it_fit_is_named_and_does(
    model: Path, free: dict[str, int], less: float, overrides: list[str], helps: str, not_named: str
):
    arch = Architecture.from_folder(model)
    config = recipe(*BOTH, *overrides, *(["engine.kv_memory_mb=1"] if LARGE_STEPS in overrides else []))
    free["cuda"] = int(less * needs(config, arch, "cuda"))
    why = advised(config, Models(arch))
    assert why is not None and helps in why.fits and not any(not_named in each for each in why.fits), why
    with pytest.raises(ConfigError, match=f"It would fit with .*{helps}"):
        memory_check.check_memory(config, arch)
    known = {change[0]: change for change in memory_check._changes(config, lambda found: False)}
    for each in {*why.fits} & known.keys():
        assert advised(memory_check.changed(config, [known[each]]), Models(arch)) is None
    assert {*known} - {*why.fits}, "not all that there is is proposed"


def test_several_changes_are_proposed_together_where_one_is_not_enough(model: Path, free: dict[str, int]):
    arch = Architecture.from_folder(model)
    config = recipe(*BOTH, "engine.kv_memory_mb=1", "trainer.micro_batch_tokens=2000")
    every = list(memory_check._changes(config, lambda found: False))
    free["cuda"] = needs(memory_check.changed(config, every), arch, "cuda")
    why = advised(config, Models(arch))
    assert why is not None and len(why.fits) == 1 and " and " in why.fits[0]
    free["cuda"] -= 1
    why = advised(config, Models(arch))
    assert why is not None and not why.fits and why.helps, "nothing is promised that would not be enough"


def test_moments_on_the_host_are_not_proposed_where_there_is_no_other_place(model: Path, free: dict[str, int]):
    arch = Architecture.from_folder(model)
    config = recipe("trainer.micro_batch_tokens=600", "placement.engines=1")
    free["cpu"] = int(0.95 * needs(config, arch, "cpu"))
    why = advised(config, Models(arch))
    assert why is not None and not any("moments_on" in each for each in (*why.fits, *why.helps))
