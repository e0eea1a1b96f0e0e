"""Builds the native trainer, its reference and its critic from a model folder and settings."""

from __future__ import annotations

import torch

from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import load_folder
from tidemill.models.value_model import ValueModel, load_value_model
from tidemill.models.weight_slices import Sender
from tidemill.runtime.cpu_sharing import Cores
from tidemill.trainer.companions import Critic, Reference
from tidemill.trainer.native_trainer import MakeOptimizer, NativeTrainer, resolve_device
from tidemill.trainer.optimizer import Optimizer
from tidemill.trainer.ranks import Ranks, ShardedRanks
from tidemill.trainer.telemetry import Offload
from tidemill.trainer.trainer_kinds import AdamWSettings, TrainerSettings, TrainerSpec, folder_of


def build(spec: TrainerSpec, sender: Sender, cores: Cores, offload: Offload) -> NativeTrainer:
    """Meet the other ranks, load the weights and make the trainer."""
    settings = spec.trainer
    assert isinstance(settings, TrainerSettings)
    ranks = None
    if settings.ranks > 1:
        how = settings.shard, settings.replicas, resolve_device(settings.device)
        ranks = ShardedRanks(spec.rank, settings.ranks, *how, spec.meeting)
    return assemble(spec, settings, sender, cores, offload, ranks)


def assemble(
    spec: TrainerSpec,
    settings: AdamWSettings,
    sender: Sender,
    cores: Cores,
    offload: Offload,
    ranks: Ranks | None,
    optimizer: MakeOptimizer = Optimizer,
) -> NativeTrainer:
    """Load the weights and make the trainer with these ranks and this optimizer."""
    torch.manual_seed(spec.seed)
    decoder = load_folder(spec.model, dtype=torch.float32)
    return NativeTrainer(
        decoder,
        settings,
        steps=spec.steps,
        reference=_reference(spec),
        critic=_critic(settings, spec, decoder),
        scores=spec.scores,
        sender=sender,
        source=spec.model,
        offload=offload,
        process=spec.name,
        cores=cores,
        threads=spec.threads,
        checkpoints=spec.checkpoints,
        ranks=ranks,
        optimizer=optimizer,
    )


def _reference(spec: TrainerSpec) -> Reference | None:
    given, folder = spec.reference, folder_of(spec.reference, spec.model)
    if given is None or folder is None:
        return None
    return Reference(load_folder(folder, dtype=torch.float32), given.every, given.decay)


def _critic(settings: AdamWSettings, spec: TrainerSpec, policy: Decoder) -> Critic | None:
    if (given := spec.critic) is None:
        return None
    folder = folder_of(given, spec.model)
    model = ValueModel(policy, shared=True) if folder is None else load_value_model(folder)
    return Critic(model, settings.model_copy(update={"lr": given.lr or settings.lr}), spec.steps)
