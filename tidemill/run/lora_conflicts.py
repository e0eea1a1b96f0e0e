"""Refusals of recipes with adapters, each in one sentence: what is given, why it does not go, what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidemill.algorithms.algorithm_settings import AlgorithmSettings, begins_as
from tidemill.run.policy_conflicts import warmed_base
from tidemill.trainer.trainer_kinds import TrainerSettings

if TYPE_CHECKING:
    from tidemill.run.recipe import RunConfig


def lora_conflicts(config: RunConfig) -> Iterator[str]:
    """Sentences on what does not go with the adapters of a recipe."""
    if not isinstance(config.trainer, TrainerSettings) or config.trainer.lora is None:
        return
    if config.reference is not None and config.reference.every:
        yield (
            f"trainer.lora with algorithm.reference.every = {config.reference.every}: a reference beside an adapter is "
            "the model without it, and stays what it is; leave every out"
        )
    if config.adapter_rank and (every := config.placement.sync.every_full) > 1:
        yield (
            f"trainer.lora with placement.sync.full_every = {every}: an adapter travels alone and whole each time, so "
            "there are no changes to send; leave full_every out, or set trainer.lora.publish = 'merged'"
        )
    for name, lora in config.adapters.items():
        dropout, of = lora.config.dropout, f" of the policy {name!r}" if config.policies else ""
        if lora.start is not None:
            yield from warmed_base(config, f"trainer.lora.start = {lora.start!r}{of}")
        if dropout and any(map(_behaves, config.policy_algorithms[name].values())):
            yield (
                f"trainer.lora.dropout = {dropout:g}{of} with algorithm.old_logprobs = 'behaviour': a pass that drops "
                "inputs has other logprobs than the policy that was sampled from, and cannot be held against it; set "
                "algorithm.old_logprobs = 'recompute' (with a loss that reads them, such as ppo_clip), or dropout = 0"
            )
    held, count = config.trainer.lora.base_dtype, config.placement.reference_engines
    if held != "float32" and count and begins_as(config.reference, None, str) is None:
        yield (
            f"trainer.lora.base_dtype = {held!r} with placement.reference_engines = {count}: they would serve the "
            "folder's own numbers; leave reference_engines out, and the trainer computes the reference"
        )


def _behaves(algorithm: AlgorithmSettings) -> bool:
    """True if what is sampled is trained by the engines' logprobs alone."""
    return not algorithm.given and not algorithm.recomputes
