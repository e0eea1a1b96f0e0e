"""AdamW over the accumulated sums: scale once, clip, step, forget the gradient. And its schedule and its state."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tidemill.protocols import TrainingDiverged
from tidemill.trainer.settings import TrainerSettings
from tidemill.types import Metrics

MOMENTS = ("exp_avg", "exp_avg_sq")


def lr_factor(update: int, *, updates: int, warmup: int, schedule: str, floor: float) -> float:
    """The share of lr for update number `update` (0 is the first) of `updates`: a linear rise over `warmup`, then the
    schedule down to `floor`, which the last update reaches."""
    if update < warmup:
        return (update + 1) / warmup
    if schedule == "constant":
        return 1.0
    done = min((update - warmup) / max(updates - 1 - warmup, 1), 1.0)
    shape = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return floor + (1 - floor) * shape


class Optimizer:
    def __init__(self, model: nn.Module, settings: TrainerSettings, updates: int) -> None:
        """updates: how many there will be in all, for the schedule's shape."""
        if updates < 1:
            raise ValueError(f"steps={updates}: expected at least 1")
        self.settings, self.updates, self.done = settings, updates, 0
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        decayed = [p for p in self.named.values() if p.ndim >= 2]
        plain = [p for p in self.named.values() if p.ndim < 2]
        self._adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        s = self.settings
        shape = {"updates": self.updates, "warmup": s.warmup_steps, "schedule": s.schedule, "floor": s.min_lr_ratio}
        return s.lr * lr_factor(self.done, **shape)

    @torch.no_grad()
    def norm(self, scale: float) -> float:
        """Of `scale` times the accumulated gradient. Raises TrainingDiverged, and forgets the gradient, when it is not
        finite."""
        gradients = [p.grad for p in self.named.values() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients, foreach=True)) * abs(scale)
        if not math.isfinite(norm):
            self.forget()
            raise TrainingDiverged(
                f"the gradient norm of update {self.done} is {norm}: no step was taken; lower lr or max_grad_norm, "
                "or look for extreme importance ratios in the metrics"
            )
        return norm

    @torch.no_grad()
    def apply(self, scale: float) -> Metrics:
        """One update with `scale` times the accumulated gradient, clipped. Raises TrainingDiverged, and forgets the
        gradient, when its norm is not finite. Parameters that nothing reached have a zero gradient."""
        for p in self.named.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        norm = self.norm(scale)
        gradients = [p.grad for p in self.named.values() if p.grad is not None]
        limit = self.settings.max_grad_norm
        factor = scale * min(1.0, limit / norm) if limit and norm else scale
        if factor != 1.0:
            for gradient in gradients:
                gradient.mul_(factor)
        lr = self.lr
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self.forget()
        self.done += 1
        return {"grad_norm": norm, "lr": lr}

    def forget(self) -> None:
        self._adam.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Both moments of every parameter by name; empty before the first update."""
        return {
            f"{m}.{name}": self._adam.state[p][m] for name, p in self.named.items() if p in self._adam.state for m in MOMENTS
        }

    def expected(self, done: int) -> dict[str, Tensor]:
        """Names of `state()` after `done` updates, each with a tensor of its shape and dtype."""
        return {f"{m}.{name}": p for name, p in self.named.items() for m in MOMENTS} if done else {}

    def restore(self, state: dict[str, Tensor], done: int) -> None:
        """Take over checked `state` after `done` updates; moments are copied to the parameters' device."""
        self.forget()
        self._adam.state.clear()
        self.done = done
        for name, p in self.named.items() if done else ():
            moments = {m: torch.empty_like(p).copy_(state[f"{m}.{name}"]) for m in MOMENTS}
            self._adam.state[p] = {"step": torch.tensor(float(done), device=p.device), **moments}
