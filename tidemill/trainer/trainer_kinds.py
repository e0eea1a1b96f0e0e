"""Registry of trainers, with their common settings and build inputs, in a module without torch.

A new trainer is one module, with a subclass of `BaseTrainerSettings` and a function `(settings, TrainerSetup) -> Trainer`,
and one entry in the table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from tidemill.algorithms.algorithm_settings import CriticSettings, ReferenceSettings, begins_as
from tidemill.core.registry import KindSettings, Registry

if TYPE_CHECKING:
    from tidemill.models.weight_slices import Sender
    from tidemill.runtime.cpu_sharing import Cores

TRAINERS = Registry("trainer.kind")
TRAINERS.register(
    *("native", "tidemill.trainer.trainer_settings:TrainerSettings", "tidemill.trainer.build_native_trainer:build")
)


class BaseTrainerSettings(KindSettings, registry=TRAINERS):
    """Settings that every trainer has, which a run reads whatever its kind."""

    lr: float = Field(default=1e-6, gt=0, description="Learning rate of the policy")
    micro_batch_tokens: int = Field(
        default=4096, ge=1, description="Tokens computed at a time. It bounds memory and changes no result"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Dtype of matrix products. Weights and optimizer stay in float32"
    )
    serving_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Dtype of the weights sent to engines"
    )
    device: str = Field(default="auto", description="Device of the trainer. auto: cuda if there is one, else cpu")


@dataclass(frozen=True, slots=True)
class TrainerSetup:
    """Inputs from which a trainer is built, besides its settings."""

    model: Path  # a Hugging Face folder
    name: str  # name of its process
    steps: int  # optimizer updates of the whole run
    reference: ReferenceSettings | None
    critic: CriticSettings | None
    scores: bool  # export the critic instead of the policy
    checkpoints: bool  # checkpoints are written beside training
    sender: Sender  # sends new weights
    seed: int
    cores: Cores
    threads: int  # at most so many parallel micro-batches
    offload: Callable[[Callable[[], Any]], asyncio.Future[Any]] | None  # runs blocking work; None: in the calling thread


def folder_of(companion: ReferenceSettings | CriticSettings | None, initial: Path) -> Path | None:
    """The folder of a reference's or critic's first weights; None if it has none of its own."""
    return begins_as(companion, initial, lambda named: Path(named).expanduser())
