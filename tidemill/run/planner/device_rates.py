"""Costs of trainer and engines on one device, estimated or measured, and the device plan that follows on this machine.

A run that goes on has measured both. Else the split rule needs to know how they compare. Speeds are then those of this
project's own trainer and engine on one H200 (docs/performance.md), which the estimates meet to within a fifth. A reply
counts as long as it may be. Prompts do not count: siblings share them, and tasks are not read for this.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tidemill.engine.native.cache_size import SHARE_OF_FREE_MEMORY, free_memory, page_bytes
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.models.architecture import Architecture, matrices
from tidemill.run.planner.device_plan import DevicePlan, Given, place
from tidemill.run.planner.held_memory import ITEM
from tidemill.run.planner.memory_model import Models, engine_memory
from tidemill.run.planner.plan import plan_of
from tidemill.run.planner.split import Role, Split, split
from tidemill.run.planner.trainer_memory import trainer_memory
from tidemill.run.recipe import RunConfig

FLOPS: Mapping[str, float] = {"float32": 4e13, "bfloat16": 4e14}  # a second
BYTES = 4e12  # that are read a second
LAYER_S = 6e-5  # seconds that a layer takes to pass however little it computes
RECENT, RECENT_BYTES = 50, 1 << 20  # the last steps that are measured, and the end of metrics.jsonl that is read for them
FORWARD, TRAINED = 2, 6  # operations for each weight and token: of a forward pass, and with its backward pass


def planned_devices(config: RunConfig, given: Given, models: Models) -> DevicePlan:
    """The device plan of a run on this machine. Raises ConfigError as `place` does."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return place(config, given, visible, partial(_by_rule, config, models))


def _by_rule(config: RunConfig, models: Models, devices: int, given: Given) -> tuple[int, int, str]:
    memory = min(free_memory(f"cuda:{n}") or 0 for n in range(devices))
    trainer, engine, samples = (
        trainer_role(config, models),
        engine_role(config, models.policy, memory),
        plan_of(config).samples,
    )
    if (took := measured(config.run_dir)) is not None:
        train_s, sample_s = took
        trainer, engine = (
            replace(trainer, seconds=lambda _: train_s / samples),
            replace(engine, seconds=lambda _: sample_s / samples),
        )
    sample = given.engines or (1 if config.offline else None)  # engines of offline replies only evaluate
    numbers = {"samples": samples, "overlaps": config.max_lag > 0, "train": given.ranks, "sample": sample}
    found = split(devices, trainer, engine, memory=memory, **numbers)
    if not found.fits:  # the check of memory will say what would help at these numbers
        found = split(devices, trainer, engine, memory=math.inf, **numbers)
    if config.offline:
        return found.train, found.sample, f"given = {config.offline!r} samples nothing"
    least = None if given.ranks else trainer.fewest(found.train, memory)
    why = in_words(found, trainer, engine, memory, "takes about" if took is None else "took")
    needs = f"; the trainer's memory needs {least} of them" if least is not None and least > 1 else ""
    return found.train, found.sample, why + needs


def measured(run_dir: Path) -> tuple[float, float] | None:
    """Device-seconds of a step's training and of its sampling, by a run's last steps on CUDA devices; None: it has none."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - RECENT_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    train, sample, steps = 0.0, 0.0, 0
    for line in lines[-RECENT:]:
        try:
            record = json.loads(line)
            wall, trained = record["time/step_s"], record["devices/train"] * record.get("time/trainer/train", 0.0)
            sampled = sum(v for k, v in record.items() if k.startswith("time/engine-") and k.endswith("/generate"))
            train, sample, steps = train + wall * trained, sample + wall * sampled, steps + 1
        except (ValueError, KeyError, TypeError):
            continue  # the rest of a long line, another kind of record, or a step on no device
    return (train / steps, sample / steps) if train > 0 and sample > 0 else None


def work(arch: Architecture, tokens: int) -> float:
    """Multiplications in a forward pass for each token of a row: by every weight, and by the keys and values before it."""
    return sum(n * k for n, k in matrices(arch)) + arch.layers * arch.heads * arch.head_dim * tokens


def trainer_role(config: RunConfig, models: Models) -> Role:
    """The cost of training. A batch is what a rank computes at a time, in tokens."""
    settings, algorithms, plan, reply = (
        config.trainer,
        config.algorithms.values(),
        plan_of(config),
        config.rollout.max_tokens,
    )
    once = work(models.policy, reply)
    trained = TRAINED + FORWARD * float(getattr(settings, "checkpointing", 0))  # of a share of the layers
    operations = trained * max(each.updates.epochs for each in algorithms) * once
    operations += FORWARD * once * any(each.recomputes for each in algorithms)
    if models.reference is not None and not config.placement.reference_engines:
        operations += FORWARD * work(models.reference, reply)
    if config.critic is not None:
        operations += (trained + FORWARD) * work(models.critic or models.policy, reply)
    tokens = reply * plan.step_rows / plan.samples  # for each sample
    least = 3 * models.policy.layers * LAYER_S  # seconds of a micro-batch, forward and backward
    return Role(
        lambda batch: tokens * (operations / FLOPS[settings.dtype] + least / batch),
        most=settings.micro_batch_tokens,
        under_way=reply * plan.step_rows,
        held=partial(_held, config, models),
    )


def _held(config: RunConfig, models: Models, ranks: int) -> int:
    """Bytes on the device of one of so many ranks."""
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"ranks": ranks})})
    held = trainer_memory(config, models.policy, models.reference, models.critic)
    return sum(each.bytes for each in held if not each.host)


def engine_role(config: RunConfig, arch: Architecture, memory: int) -> Role:
    """The cost of sampling. A batch is the sequences that an engine decodes at a time."""
    settings, plan, reply = config.engine, plan_of(config), config.rollout.max_tokens
    read = ITEM[settings.dtype] * sum(n * k for n, k in matrices(arch))  # bytes of weights, once a step of the engine
    each = page_bytes(arch, 1, getattr(torch, settings.dtype))  # of KV, by token
    flops, once = FLOPS[settings.dtype], work(arch, reply)

    def seconds(batch: float) -> float:
        return reply * (
            max((read / batch + each * reply / 2) / BYTES, FORWARD * once / flops) + arch.layers * LAYER_S / batch
        )

    under_way = (plan.slots if config.max_lag else config.rollout.groups) * config.rollout.group_size
    if not isinstance(settings, EngineSettings):
        return Role(seconds, under_way=under_way)
    own = sum(h.bytes for h in engine_memory(settings, arch, memory) if not h.host and not h.what.startswith("KV"))
    if settings.kv_memory_mb is not None:
        kv = settings.kv_memory_mb << 20
        most = min(settings.max_sequences, kv / (each * reply))
        return Role(seconds, most=most, under_way=under_way, held=lambda _: own + kv)
    kept = memory - SHARE_OF_FREE_MEMORY["cuda"] * max(0, memory - own)  # all that is no KV cache
    return Role(seconds, settings.max_sequences, 0, under_way, batch_bytes=each * reply, held=lambda _: max(own, kept))


def in_words(found: Split, trainer: Role, engine: Role, memory: float, takes: str) -> str:
    """The reason for a split, for people."""
    if trainer.batch(found.train, memory) is None or engine.batch(found.sample, memory) is None:
        return "the trainer does not fit beside engines" if trainer.batch(found.train, memory) is None else "no engine fits"
    turns = "" if found.overlaps else ", in turns as max_lag = 0"
    said = [
        f"theta* = {found.theta:.2f} of the devices would sample, as a step {takes} {found.train_s:.3g} s to train on "
        f"one and {found.sample_s:.3g} s to sample{turns}; {found.train} and {found.sample} take {found.step_s:.3g} s"
    ]
    holds, asked = engine.batch(found.sample, memory), engine.asked(found.sample)
    if holds is not None and holds < 0.99 * asked:
        said.append(f"an engine's memory holds {holds:.0f} of {asked:.0f} sequences")
    return "; ".join(said)
