"""Memory of one of several ranks, from that of a trainer of one rank."""

from __future__ import annotations

from dataclasses import replace

from tidemill.models.architecture import Architecture, parameters, wide_matrices
from tidemill.run.planner.held_memory import Held
from tidemill.trainer.trainer_kinds import TrainerSettings

SPARES = 2  # layers that are gathered at the same time under zero3: one computes, the next one arrives


def per_rank(held: list[Held], settings: TrainerSettings, models: list[Architecture]) -> list[Held]:
    """The memory of each rank, if one rank alone holds `held`. models: those that are trained, the policy first."""
    if settings.ranks == 1:
        return held
    replicas = {"none": settings.ranks, "hsdp": settings.replicas}.get(settings.shard, 1)
    shards, found = settings.ranks // replicas, []
    for each in held:
        if each.what.startswith(("activations", "quantised")):
            found.append(each)
        else:  # copies for others are divided among all ranks
            found.append(replace(each, bytes=each.bytes // (settings.ranks if each.divided else shards)))
    if shards > 1:
        at_once = settings.shard == "zero2"
        narrow = settings.lora is not None and settings.lora.base_dtype != "float32"
        size = sum(_gathered(model, at_once, narrow) for model in models)
        lever = "trainer.shard = 'zero3'" if at_once else "a smaller model"
        of = "all weights" if at_once else "layers"
        each = 8 if settings.lora is None else 4  # beside an adapter they have no gradients
        found.append(replace(held[1], what=f"{of} while gathered, with gradients", bytes=each * size, lever=lever))
    return found


def _gathered(model: Architecture, at_once: bool, narrow: bool) -> int:
    """Weights that a rank holds whole during a pass. narrow: without the layers' matrices."""
    if narrow:
        return parameters(model) - wide_matrices(model)
    whole = parameters(model)
    layer = (whole - parameters(replace(model, layers=1, windows=model.windows[:1]))) // max(model.layers - 1, 1)
    return whole if at_once else whole - model.layers * layer + min(SPARES, model.layers) * layer
