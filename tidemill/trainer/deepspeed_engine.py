"""DeepSpeed's ZeRO-1 and ZeRO-2 behind the ranks and the optimizer of the native trainer.

    stage 1   a rank adds up its own gradients; DeepSpeed reduces them before the step
    stage 2   DeepSpeed reduces gradients in each backward pass and frees all but the rank's part, so all ranks run equally
              many passes, and autograd has to see every gradient

DeepSpeed steps its part of the weights with AdamW and gathers them again: every rank has whole weights, and writes every
n-th of n ranks' tensors. Moments are read and written through its API, whole, one at a time; its own checkpoints are
pickles. A critic is not DeepSpeed's: its gradients are added up as under `shard = "none"`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tidemill.core.errors import ConfigError
from tidemill.core.types import Metrics
from tidemill.models.decoder import Decoder
from tidemill.models.local_shards import block_of
from tidemill.models.weight_slices import Slice
from tidemill.trainer.optimizer import MOMENTS, Optimizer
from tidemill.trainer.ranks import ShardedRanks
from tidemill.trainer.replica_sums import ReplicaSums
from tidemill.trainer.trainer_kinds import AdamWSettings, DeepSpeedSettings

T = TypeVar("T")
BUCKET = 1 << 26  # elements that are reduced or gathered together
SHARED_MEMORY = "deepspeed_shm_comm"  # an operator that takes a minute to compile, and that nothing here calls


def deepspeed(device: torch.device) -> Any:
    """DeepSpeed's module, set up for this rank's device. Raises ConfigError if it is not installed."""
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # DeepSpeed takes the device of this number
    try:
        import deepspeed  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"trainer.kind = 'deepspeed' needs a package that cannot be imported ({error}): pip install "
            "'tidemill[deepspeed]', or trainer.kind = 'native'"
        ) from None
    deepspeed.ops.__compatible_ops__[SHARED_MEMORY] = False
    return deepspeed


class DeepSpeedRanks(ShardedRanks):
    """One rank whose policy's gradients DeepSpeed reduces."""

    def __init__(self, rank: int, settings: DeepSpeedSettings, device: torch.device, meeting: str) -> None:
        """Meet the other ranks, at a file that all of them can open. Blocks until all have come."""
        self._deepspeed = deepspeed(device)
        super().__init__(rank, settings.ranks, "none", 1, device, meeting)
        self._parted = settings.stage == 2
        self.gathers = not self._parted
        self._optimizer: DeepSpeedOptimizer | None = None

    def optimizer(self, model: Decoder, settings: AdamWSettings, updates: int) -> Optimizer:
        assert isinstance(settings, DeepSpeedSettings)
        self._optimizer = DeepSpeedOptimizer(self._deepspeed, self, model, settings, updates)
        return self._optimizer

    def rounds(self, parts: Sequence[T], idle: T, modules: Sequence[nn.Module], gradient: bool) -> Iterator[Sequence[T]]:
        if self._parted and gradient:
            parts = [*parts, *[idle] * (self._most(len(parts)) - len(parts))]
        yield parts

    def backward(self, loss: Tensor) -> None:
        assert self._optimizer is not None
        self._optimizer.backward(loss)

    def replica_sums(self, parameters: Mapping[str, nn.Parameter], kind: str) -> ReplicaSums:
        """Sums of the gradients that DeepSpeed does not reduce."""
        assert self._optimizer is not None
        theirs = self._optimizer.named
        return super().replica_sums({name: each for name, each in parameters.items() if name not in theirs}, kind)

    def close(self) -> None:
        if self.size > 1:  # DeepSpeed keeps the group, and a process that has one rank may make another trainer
            super().close()


class DeepSpeedOptimizer(Optimizer):
    """AdamW whose moments and step DeepSpeed divides among the ranks."""

    def __init__(
        self, deepspeed: Any, ranks: DeepSpeedRanks, model: Decoder, settings: DeepSpeedSettings, updates: int
    ) -> None:
        super().__init__(model, settings, updates)
        self._ranks, self._scale, self._accumulated = ranks, 1.0, False
        matrices = [p for p in self.named.values() if p.ndim >= 2]
        vectors = [p for p in self.named.values() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        adam = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=adam, config=_config(settings.stage, self.named.values()), dist_init_required=False
        )
        self._zero = self._engine.optimizer
        self._whole = deepspeed.utils
        adam.register_step_pre_hook(self._scale_gradient)
        # DeepSpeed finds the moments of its parts once, when only the first group of parameters would have some.
        for part in (p for group in adam.param_groups for p in group["params"]):
            step = torch.zeros((), device=part.device)
            adam.state[part] = {"step": step, **{m: torch.zeros_like(part, requires_grad=False) for m in MOMENTS}}
        self._zero._lazy_init_hp_params_optimizer_state()
        self._steps: list[Tensor] = [state["step"] for state in adam.state.values()]

    def backward(self, loss: Tensor) -> None:
        """Run backward for one micro-batch; DeepSpeed does what its stage does with the gradients."""
        self._zero.clear_backward_seen_flag()  # its own forward call would have done it
        self._engine.backward(loss, scale_wrt_gas=False)
        self._accumulated = True

    def apply(self, scale: float) -> Metrics:
        """Have DeepSpeed step with `scale` times the sum of all ranks' gradients, clipped; returns metrics.

        Raises TrainingDiverged, and takes no step, when the gradient is not finite.
        """
        self.come_back()
        if not self._accumulated:  # each parameter needs a gradient; there may have been no micro-batch
            self.backward(sum((p.sum() for p in self.named.values()), torch.zeros(())) * 0)
        self._scale, self._accumulated, lr = scale, False, self.lr
        self._zero.set_lr(lr)
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm()) * abs(scale)
        self._expect_finite(norm)
        self.done += 1
        return {"grad_norm": norm, "lr": lr}

    @torch.no_grad()
    def _scale_gradient(self, adam: torch.optim.Optimizer, *_: object) -> None:
        """Scale and clip the gradient of the part that DeepSpeed is about to step."""
        factor = self._clipped(self._scale, float(self._zero._global_grad_norm) * abs(self._scale))
        for part in (p for group in adam.param_groups for p in group["params"]):
            part.grad.mul_(factor)

    def forget(self) -> None:
        super().forget()
        self._zero.zero_grad()
        self._zero.all_grad_tensors.clear()
        self._accumulated = False

    def state(self) -> list[Slice]:
        """The moments that this rank writes, whole; empty before the first update. All ranks must ask."""
        return [block if block.tensor.numel() else replace(block, tensor=block.tensor.clone()) for block in self._gathered()]

    def _gathered(self) -> Iterable[Slice]:
        """All moments; gathered one after another, so that a rank holds no more than its own and one."""
        asked = ((name, p, m) for name, p in self.named.items() for m in MOMENTS) if self.done else ()
        whole = self._whole.safe_get_full_optimizer_state
        return self._ranks.own(block_of(f"{m}.{name}", p, whole(p, m)) for name, p, m in asked)

    def restore(self, state: dict[str, Tensor], done: int) -> None:
        """Restore checked, whole moments after `done` updates; the model's weights must be restored before."""
        self.forget()
        self._zero.refresh_fp32_params()
        for name, p in self.named.items():
            for m in MOMENTS:
                whole = state[f"{m}.{name}"] if done else torch.zeros_like(p)
                self._whole.safe_set_full_optimizer_state(p, whole.detach(), m)
        for step in self._steps:
            step.fill_(done)
        self.done = done


def _config(stage: int, parameters: Iterable[Tensor]) -> dict[str, Any]:
    """DeepSpeed's settings: sums, and a step whenever it is asked for one; scale and clipping are the caller's."""
    bucket = 2 * (min(sum(p.numel() for p in parameters), BUCKET) // 2 + 1)  # DeepSpeed wants an even number
    return {
        "train_micro_batch_size_per_gpu": 1,  # that of samples is not DeepSpeed's to know
        "managed_gradient_accumulation": False,
        "gradient_allreduce_op": "sum",
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
