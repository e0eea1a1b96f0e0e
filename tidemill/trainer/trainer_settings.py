"""Settings of the trainer on one device, in a module without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tidemill.trainer.trainer_kinds import BaseTrainerSettings


class TrainerSettings(BaseTrainerSettings):
    kind: Literal["native"] = "native"
    warmup_steps: int = Field(default=0, ge=0)  # optimizer updates over which lr rises from 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # of lr after the warm-up, to the last update
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)  # where linear and cosine end, as a share of lr
    weight_decay: float = Field(default=0.0, ge=0)  # of matrices; norms and biases have none
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    max_grad_norm: float = Field(default=1.0, ge=0)  # 0: gradients are not clipped
    checkpointing: bool = False  # recompute activations in the backward pass: less memory, a third more time

    @model_validator(mode="after")
    def _consistent(self) -> TrainerSettings:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {list(self.betas)}: expected two numbers in [0, 1)")
        if self.min_lr_ratio and self.schedule == "constant":
            raise ValueError(
                "min_lr_ratio does not apply to schedule 'constant': choose 'linear' or 'cosine', or leave it out"
            )
        return self
