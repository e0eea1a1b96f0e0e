"""Settings of the trainer on one device, in a module without torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tidemill.trainer.trainer_kinds import BaseTrainerSettings

Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainerSettings(BaseTrainerSettings):
    """The native trainer on one device: AdamW, its schedule and its memory."""

    kind: Literal["native"] = Field(default="native", description="Kind of trainer")
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer updates over which lr rises from 0. 0: no warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Course of lr from the end of its warm-up to the last update"
    )
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="End of linear and cosine, as a share of lr")
    weight_decay: float = Field(default=0.0, ge=0, description="Weight decay of matrices. Norms and biases have none")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="Decay rates of AdamW's two moments, each in [0, 1)")
    eps: float = Field(default=1e-8, gt=0, description="Term that AdamW adds to the denominator")
    max_grad_norm: float = Field(default=1.0, ge=0, description="Norm to which gradients are clipped. 0: not clipped")
    checkpointing: bool = Field(default=False, description="Recompute activations: less memory, a third more time")

    @model_validator(mode="after")
    def _consistent(self) -> TrainerSettings:
        if self.min_lr_ratio and self.schedule == "constant":
            raise ValueError(
                "min_lr_ratio does not apply to schedule 'constant': choose 'linear' or 'cosine', or leave it out"
            )
        return self
