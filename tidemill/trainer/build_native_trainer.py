"""Builds the native trainer, its reference and its critic from a model folder and settings."""

from __future__ import annotations

from dataclasses import replace

import torch

from tidemill.models.adapter_config import AdapterConfig
from tidemill.models.adapter_files import fill_from
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import load_folder
from tidemill.models.lora import attach
from tidemill.models.quantised_base import load_quantised
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
    ranks, lora = None, settings.lora and settings.lora.config
    if settings.ranks > 1:
        how = settings.shard, settings.replicas, resolve_device(settings.device)
        ranks = ShardedRanks(spec.rank, settings.ranks, *how, spec.meeting)
    alone = settings.lora is not None and settings.lora.publish == "adapter"
    start = settings.lora and settings.lora.start
    return assemble(spec, settings, sender, cores, offload, ranks, lora=lora, adapter_alone=alone, start=start)


def assemble(
    spec: TrainerSpec,
    settings: AdamWSettings,
    sender: Sender,
    cores: Cores,
    offload: Offload,
    ranks: Ranks | None,
    optimizer: MakeOptimizer = Optimizer,
    lora: AdapterConfig | None = None,
    adapter_alone: bool = False,
    start: str | None = None,
) -> NativeTrainer:
    """Load the weights and make the trainer with these ranks, this optimizer, and an adapter if it trains one.

    adapter_alone: see `NativeTrainer`. start: folder of the adapter's first weights."""
    torch.manual_seed(spec.seed)
    decoder = load_quantised(spec.model, "float32" if lora is None else lora.base_dtype)
    if lora is not None:
        lora = replace(lora, base=str(spec.model))
        attach(decoder, lora, torch.Generator().manual_seed(spec.seed))
        if start is not None:
            fill_from(decoder, start)
    return NativeTrainer(
        decoder,
        settings,
        steps=spec.steps,
        reference=_reference(spec, decoder if lora is not None else None),
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
        lora=lora,
        adapter_alone=adapter_alone,
    )


def _reference(spec: TrainerSpec, adapted: Decoder | None) -> Reference | None:
    """adapted: the policy, if it has an adapter: without that it is the initial policy, which takes no memory then."""
    given, folder = spec.reference, folder_of(spec.reference, spec.model)
    if given is None or folder is None:
        return None
    if adapted is not None and folder == spec.model:
        return Reference(adapted, without_adapter=True)
    return Reference(load_folder(folder, dtype=torch.float32), every=given.every, decay=given.decay)


def _critic(settings: AdamWSettings, spec: TrainerSpec, policy: Decoder) -> Critic | None:
    if (given := spec.critic) is None:
        return None
    folder = folder_of(given, spec.model)
    model = ValueModel(policy, shared=True) if folder is None else load_value_model(folder)
    return Critic(model, settings.model_copy(update={"lr": given.lr or settings.lr}), spec.steps)
