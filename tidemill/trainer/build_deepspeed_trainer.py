"""Builds a trainer whose gradients DeepSpeed reduces and whose weights it steps."""

from __future__ import annotations

from tidemill.models.weight_slices import Sender
from tidemill.runtime.cpu_sharing import Cores
from tidemill.trainer.build_native_trainer import assemble
from tidemill.trainer.deepspeed_engine import DeepSpeedRanks
from tidemill.trainer.native_trainer import NativeTrainer, resolve_device
from tidemill.trainer.telemetry import Offload
from tidemill.trainer.trainer_kinds import DeepSpeedSettings, TrainerSpec


def build(spec: TrainerSpec, sender: Sender, cores: Cores, offload: Offload) -> NativeTrainer:
    """Meet the other ranks, load the weights and make the trainer. Raises ConfigError if DeepSpeed is not installed."""
    settings = spec.trainer
    assert isinstance(settings, DeepSpeedSettings)
    ranks = DeepSpeedRanks(spec.rank, settings, resolve_device(settings.device), spec.meeting)
    spec = spec.model_copy(update={"threads": 1})  # DeepSpeed runs one backward pass at a time
    return assemble(spec, settings, sender, cores, offload, ranks, ranks.optimizer)
