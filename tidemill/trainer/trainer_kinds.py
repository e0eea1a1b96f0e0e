"""Registry of trainers, their settings and their spec, in a module without torch.

A new trainer is one module, with a subclass of `BaseTrainerSettings` and a function `(TrainerSpec, Sender, Cores, Offload)
-> Trainer`, and one entry in the table. An `Offload` runs blocking functions.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tidemill.algorithms.algorithm_settings import CriticSettings, ReferenceSettings, begins_as
from tidemill.core.config import Config
from tidemill.core.registry import KindSettings, Registry
from tidemill.models.adapter_config import AdapterConfig, BaseDtype
from tidemill.runtime.cpu_sharing import CoreShare
from tidemill.weight_sync.sync_settings import BaseSyncSettings

TRAINERS = Registry("trainer.kind")
TRAINERS.register("native", f"{__name__}:TrainerSettings", "tidemill.trainer.build_native_trainer:build")
TRAINERS.register("deepspeed", f"{__name__}:DeepSpeedSettings", "tidemill.trainer.build_deepspeed_trainer:build")


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
    ranks: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Processes that train together, each with a part of the rows. Left out on several CUDA devices: as many "
        "as placement.devices leaves",
    )

    @property
    def exceptions(self) -> list[str]:
        """Sentences on settings in force that change what is learnt to save memory or bytes."""
        return []


Beta = Annotated[float, Field(ge=0, lt=1)]


class AdamWSettings(BaseTrainerSettings):
    """AdamW, its schedule and its memory: settings of every trainer on the project's own decoder."""

    warmup_steps: int = Field(default=0, ge=0, description="Optimizer updates over which lr rises from 0. 0: no warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Course of lr from the end of its warm-up to the last update"
    )
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="End of linear and cosine, as a share of lr")
    weight_decay: float = Field(default=0.0, ge=0, description="Weight decay of matrices. Norms and biases have none")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="Decay rates of AdamW's two moments, each in [0, 1)")
    eps: float = Field(default=1e-8, gt=0, description="Term that AdamW adds to the denominator")
    max_grad_norm: float = Field(default=1.0, ge=0, description="Norm to which gradients are clipped. 0: not clipped")
    reduce: Literal["float32", "bfloat16", "int8"] = Field(
        default="float32",
        description="Numbers in which replicas (shard = 'none', 'hsdp') send gradients to each other. bfloat16: half the "
        "bytes; int8: a quarter. Both round sums, and pass the errors on to the next update",
    )
    checkpointing: bool | Annotated[float, Field(ge=0, le=1)] = Field(
        default=False,
        description="Recompute activations: less memory, a third more time. true: of all layers; 0.5: of half of them",
    )
    moments: Literal["float32", "int8"] = Field(
        default="float32",
        description="Numbers of AdamW's moments. int8: 8 bits each and a scale for 256 of them; it changes what is learnt",
    )
    moments_on: Literal["device", "host"] = Field(
        default="device", description="Place of AdamW's moments. host: in the machine's memory, copied piece by piece"
    )

    @property
    def exceptions(self) -> list[str]:
        rounded = "trainer.moments = 'int8': AdamW's moments are rounded to 8 bits after each update"
        summed = f"trainer.reduce = {self.reduce!r}: replicas round gradients and sums, and add the errors to the next ones"
        return [rounded] * (self.moments == "int8") + [summed] * (self.reduce != "float32")

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.min_lr_ratio and self.schedule == "constant":
            raise ValueError(
                "min_lr_ratio does not apply to schedule 'constant': choose 'linear' or 'cosine', or leave it out"
            )
        return self


class LoraSettings(Config):
    """A low-rank adapter that is trained in place of the weights (LoRA, 2106.09685)."""

    rank: int = Field(
        default=16, ge=1, le=4096, description="Rank of the two matrices whose product is added to each target"
    )
    alpha: float = Field(default=32.0, gt=0, description="The product is scaled by alpha / rank")
    targets: list[str] | str = Field(
        default="all-linear",
        description="Ends of the names of matrices with an adapter: ['q_proj', 'v_proj']. A string other than 'all-linear' "
        "is a regular expression of whole names",
    )
    rslora: bool = Field(default=False, description="Scale by alpha / sqrt(rank) instead (rank-stabilised, 2312.03732)")
    dropout: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Share of an adapter's inputs that a training pass sets to 0. none: that of `start`, or 0",
    )
    start: str | None = Field(
        default=None,
        description="PEFT folder whose adapter is trained on, with its rank, alpha and targets. none: a new adapter",
    )
    publish: Literal["adapter", "merged"] = Field(
        default="adapter",
        description="Weights that engines are sent. adapter: its matrices alone, which they add to their folder's weights; "
        "merged: all weights",
    )

    base_dtype: BaseDtype = Field(
        default="float32",
        description="Numbers of the layers' matrices under the adapter. nf4: 4 bits each (QLoRA, 2305.14314); int8: 8 bits. "
        "The adapter is trained, served and merged on these numbers",
    )

    @property
    def config(self) -> AdapterConfig:
        """The adapter that these settings describe. Raises UnsupportedModel if `start` holds none."""
        if self.start is not None:
            known = AdapterConfig.from_folder(Path(self.start).expanduser())
            return known if self.dropout is None else replace(known, dropout=self.dropout)
        targets = self.targets if isinstance(self.targets, str) else tuple(self.targets)
        how = {"rslora": self.rslora, "base_dtype": self.base_dtype}
        return AdapterConfig(self.rank, self.alpha, targets, dropout=self.dropout or 0.0, **how)

    @model_validator(mode="after")
    def _one_adapter(self) -> Self:
        if self.start is not None:
            fields = LoraSettings.model_fields
            if given := [n for n in ("rank", "alpha", "targets", "rslora") if getattr(self, n) != fields[n].default]:
                raise ValueError(
                    f"start = {self.start!r} and {given[0]} = {getattr(self, given[0])!r}: an adapter that exists has its "
                    f"own {given[0]}; leave {given[0]} out, or leave start out"
                )
            if (held := self.config.base_dtype) != self.base_dtype:
                raise ValueError(
                    f"start = {self.start!r} was trained on a base in {held}, and base_dtype = {self.base_dtype!r}: set "
                    f"base_dtype = {held!r}"
                )
        return self

    @field_validator("targets")
    @classmethod
    def _readable(cls, given: list[str] | str) -> list[str] | str:
        if isinstance(given, str) and given != "all-linear":
            try:
                re.compile(given)
            except re.error as error:
                raise ValueError(
                    f"targets = {given!r} is no regular expression ({error}); expected 'all-linear', a list such as "
                    "['q_proj', 'v_proj'], or a regular expression of whole names"
                ) from None
        if not given:
            raise ValueError("targets is empty, so nothing would be trained; expected 'all-linear' or ['q_proj', 'v_proj']")
        return given


class PolicySpec(Config):
    """One of the policies that a trainer of several trains: an adapter on their common base, or a whole model."""

    lr: float
    lora: LoraSettings | None = None  # None: a whole model
    steps: int  # its optimizer updates of the whole run


class TrainerSettings(AdamWSettings):
    """The native trainer: its ranks and what each of them holds."""

    kind: Literal["native"] = Field(default="native", description="Kind of trainer")
    shard: Literal["none", "zero2", "zero3", "hsdp"] = Field(
        default="zero2",
        description="Part that each of several ranks holds. none: all weights; zero2: a share of weights, gradients and "
        "moments, gathered once a call; zero3: the same, gathered layer by layer; hsdp: replicas, each sharded as by zero3",
    )
    lora: LoraSettings | None = Field(
        default=None, description="Train a low-rank adapter and no other weights of the policy: trainer.lora.rank = 16"
    )
    replicas: int = Field(default=2, ge=2, description="Replicas under shard = 'hsdp'. Each has ranks / replicas ranks")

    @field_validator("shard", mode="before")
    @classmethod
    def _none_is_a_name(cls, given: Any) -> Any:  # on a command line, `none` is no value
        return "none" if given is None else given

    @model_validator(mode="after")
    def _consistent(self) -> TrainerSettings:
        if self.reduce != "float32" and (self.ranks == 1 or self.shard not in ("none", "hsdp")):
            raise ValueError(
                f"reduce = {self.reduce!r} with ranks = {self.ranks} and shard = {self.shard!r}: it narrows sums over "
                "replicas only; give at least 2 ranks and shard = 'none' or 'hsdp', or leave reduce out"
            )
        if self.shard == "hsdp" and (self.ranks % self.replicas or self.ranks == self.replicas):
            raise ValueError(
                f"ranks = {self.ranks} with replicas = {self.replicas}: shard = 'hsdp' needs a multiple of replicas, "
                "at least twice as many; with one rank in each replica, use shard = 'none'"
            )
        return self


class DeepSpeedSettings(AdamWSettings):
    """DeepSpeed's ZeRO-1 or ZeRO-2 in place of the native optimizer; needs the extra `deepspeed`."""

    kind: Literal["deepspeed"] = Field(default="deepspeed", description="Kind of trainer")
    shard: Literal["zero1", "zero2"] = Field(
        default="zero2",
        description="Part that each of several ranks holds. zero1: all weights and gradients, a share of moments; zero2: "
        "all weights, a share of gradients and moments; gradients are reduced after each micro-batch",
    )

    @property
    def stage(self) -> int:
        """DeepSpeed's number of its kind of sharding."""
        return int(self.shard.removeprefix("zero"))

    @field_validator("shard", mode="before")
    @classmethod
    def _not_three(cls, given: object) -> object:
        if given == "zero3":
            raise ValueError(
                "DeepSpeed's 'zero3' gathers a weight for its module's own call only, and logprobs read the head outside of "
                "it: choose 'zero1' or 'zero2', or trainer.kind = 'native' with 'zero3'"
            )
        return given

    @model_validator(mode="after")
    def _nothing_narrow(self) -> Self:
        for name, only in {"moments": "float32", "moments_on": "device", "reduce": "float32"}.items():
            if (given := getattr(self, name)) != only:
                raise ValueError(
                    f"{name} = {given!r}: DeepSpeed holds moments and adds up gradients in float32 on the device; leave it "
                    "out, or choose trainer.kind = 'native'"
                )
        return self


class TrainerSpec(Config):
    """Everything that a trainer is built from, as plain data that travels to its process."""

    role: str = "trainer"
    name: str = "trainer"
    model: Path  # a Hugging Face folder
    trainer: BaseTrainerSettings
    steps: int  # optimizer updates of the whole run
    reference: ReferenceSettings | None = None
    critic: CriticSettings | None = None
    scores: bool = False  # export the critic, as a reward model, instead of the policy
    checkpoints: bool = True  # checkpoints are written beside training: see `NativeTrainer`
    sync: BaseSyncSettings  # sends new weights
    folder: Path  # for transports that need one
    seed: int = 0
    core_share: CoreShare | None = None  # None: its cores are its own
    threads: int = 1  # at most so many parallel micro-batches
    rank: int = 0
    meeting: str = ""  # file at which several ranks meet
    profile: Path | None = None  # folder for `operator_profiler`
    policies: dict[str, PolicySpec] = Field(default={})  # by name; empty: one policy, "policy", by `trainer` and `steps`

    @property
    def base_dtype(self) -> BaseDtype:
        """The numbers of the layers' matrices under the policies' adapters."""
        held: list[BaseDtype] = [each.lora.base_dtype for each in self.policies.values() if each.lora is not None]
        return held[0] if held else "float32"


def folder_of(companion: ReferenceSettings | CriticSettings | None, initial: Path) -> Path | None:
    """The folder of a reference's or critic's first weights; None if it has none of its own."""
    return begins_as(companion, initial, lambda named: Path(named).expanduser())
