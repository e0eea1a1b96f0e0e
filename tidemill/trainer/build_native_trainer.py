"""Builds the native trainer, its reference and its critic from a model folder and settings.

Of several policies it builds one each; those that are adapters share weights that are loaded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from tidemill.core.seeding import derive_seed
from tidemill.models.adapter_config import AdapterConfig
from tidemill.models.adapter_files import fill_from
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import load_folder
from tidemill.models.lora import attach
from tidemill.models.quantised_base import load_quantised
from tidemill.models.value_model import ValueModel, load_value_model
from tidemill.models.weight_slices import LiveSender, Sender
from tidemill.runtime.cpu_sharing import Cores
from tidemill.trainer.companions import Critic, Reference
from tidemill.trainer.native_trainer import MakeOptimizer, NativeTrainer, resolve_device
from tidemill.trainer.optimizer import Optimizer
from tidemill.trainer.policy_trainers import PolicyTrainers, sharing
from tidemill.trainer.ranks import Ranks, ShardedRanks
from tidemill.trainer.telemetry import Offload, Recorder
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


def build_policies(
    spec: TrainerSpec, senders: Mapping[str, Sender | LiveSender], cores: Cores, offload: Offload
) -> PolicyTrainers:
    """Make a trainer for each of the spec's policies; adapters share a base, which is loaded once. senders: by policy."""
    settings = spec.trainer
    assert isinstance(settings, TrainerSettings)
    recorder, trainers = Recorder(spec.name), dict[str, NativeTrainer]()
    adapted = any(each.lora is not None for each in spec.policies.values())
    base = load_quantised(spec.model, spec.base_dtype) if adapted else None
    for name, each in spec.policies.items():
        own = spec.model_copy(update={"steps": each.steps, "reference": None if trainers else spec.reference})
        trainers[name] = assemble(
            *(own, settings.model_copy(update={"lr": each.lr}), senders[name], cores, offload, None),
            lora=each.lora and each.lora.config,
            adapter_alone=each.lora is not None,
            start=each.lora and each.lora.start,
            base=base if each.lora is not None else None,
            policy=name,
            recorder=recorder,
        )
    return PolicyTrainers(trainers, recorder)


def assemble(
    spec: TrainerSpec,
    settings: AdamWSettings,
    sender: Sender | LiveSender,
    cores: Cores,
    offload: Offload,
    ranks: Ranks | None,
    optimizer: MakeOptimizer = Optimizer,
    lora: AdapterConfig | None = None,
    adapter_alone: bool = False,
    start: str | None = None,
    base: Decoder | None = None,
    policy: str = "policy",
    recorder: Recorder | None = None,
) -> NativeTrainer:
    """Load the weights and make the trainer with these ranks, this optimizer, and an adapter if it trains one.

    adapter_alone, policy, recorder: see `NativeTrainer`. start: folder of the adapter's first weights. base: its frozen
    weights, which it shares with others."""
    torch.manual_seed(spec.seed)
    kind = "float32" if lora is None else lora.base_dtype
    decoder = load_quantised(spec.model, kind) if base is None else sharing(base)
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
        critic=_critic(settings, spec, decoder, lora),
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
        policy=policy,
        recorder=recorder,
        seed=spec.seed,
    )


def _reference(spec: TrainerSpec, adapted: Decoder | None) -> Reference | None:
    """adapted: the policy, if it has an adapter: without that it is the initial policy, which takes no memory then."""
    given, folder = spec.reference, folder_of(spec.reference, spec.model)
    if given is None or folder is None:
        return None
    if adapted is not None and folder == spec.model:
        return Reference(adapted, without_adapter=True)
    return Reference(load_folder(folder, dtype=torch.float32), every=given.every, decay=given.decay)


def _critic(settings: AdamWSettings, spec: TrainerSpec, policy: Decoder, lora: AdapterConfig | None) -> Critic | None:
    """lora: of the policy's adapter. A critic with a model of its own then has one with the same settings."""
    if (given := spec.critic) is None:
        return None
    folder = folder_of(given, spec.model)
    if folder is None:
        model = ValueModel(policy, shared=True)
    else:
        model = load_value_model(folder, "float32" if lora is None else lora.base_dtype)
        if lora is not None:
            attach(model.decoder, lora, torch.Generator().manual_seed(derive_seed(spec.seed, "critic")))
    return Critic(model, settings.model_copy(update={"lr": given.lr or settings.lr}), spec.steps)
