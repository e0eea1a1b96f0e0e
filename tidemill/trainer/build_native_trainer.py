"""Builds the native trainer, its reference and its critic from a model folder and settings."""

from __future__ import annotations

import torch

from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import load_folder
from tidemill.models.value_model import ValueModel, load_value_model
from tidemill.trainer.critic import Critic
from tidemill.trainer.native_trainer import NativeTrainer, inline
from tidemill.trainer.reference_policy import Reference
from tidemill.trainer.trainer_kinds import TrainerSetup, folder_of
from tidemill.trainer.trainer_settings import TrainerSettings


def build(settings: TrainerSettings, setup: TrainerSetup) -> NativeTrainer:
    """Load the weights and make the trainer."""
    torch.manual_seed(setup.seed)
    decoder = load_folder(setup.model, dtype=torch.float32)
    return NativeTrainer(
        decoder,
        settings,
        steps=setup.steps,
        reference=_reference(setup),
        critic=_critic(settings, setup, decoder),
        scores=setup.scores,
        sender=setup.sender,
        source=setup.model,
        offload=setup.offload or inline,
        process=setup.name,
        cores=setup.cores,
        threads=setup.threads,
        checkpoints=setup.checkpoints,
    )


def _reference(setup: TrainerSetup) -> Reference | None:
    given, folder = setup.reference, folder_of(setup.reference, setup.model)
    if given is None or folder is None:
        return None
    return Reference(load_folder(folder, dtype=torch.float32), given.every, given.decay)


def _critic(settings: TrainerSettings, setup: TrainerSetup, policy: Decoder) -> Critic | None:
    """policy: the decoder that is trained."""
    if (given := setup.critic) is None:
        return None
    folder = folder_of(given, setup.model)
    model = ValueModel(policy, shared=True) if folder is None else load_value_model(folder)
    return Critic(model, settings.model_copy(update={"lr": given.lr or settings.lr}), setup.steps)
