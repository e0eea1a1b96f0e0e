"""AdamW optimizer with clipping, learning-rate schedule and checkpoint state.

A step scales the accumulated gradient sums once, clips them, updates the weights and frees the gradients. It calls torch's
function `adamw`: creating torch's class imports a compiler that nothing here uses, which takes as long as importing torch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from tidemill.core.errors import TrainingDiverged
from tidemill.core.types import Metrics
from tidemill.models.host_memory import MovedToHost
from tidemill.models.local_shards import block_of, full, local
from tidemill.models.weight_slices import Slice
from tidemill.trainer.moments import Moments, made_for
from tidemill.trainer.trainer_kinds import AdamWSettings

MOMENTS = ("exp_avg", "exp_avg_sq")


def lr_factor(update: int, *, updates: int, warmup: int, schedule: str, floor: float) -> float:
    """The factor on lr at update number `update` (0 is the first) of `updates`.

    It rises linearly over `warmup` updates, then follows the schedule down to `floor`, which the last update reaches.
    """
    if update < warmup:
        return (update + 1) / warmup
    if schedule == "constant":
        return 1.0
    done = min((update - warmup) / max(updates - 1 - warmup, 1), 1.0)
    shape = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return floor + (1 - floor) * shape


class Optimizer:
    """AdamW over a module's parameters; matrices have weight decay, vectors none."""

    def __init__(self, model: nn.Module, settings: AdamWSettings, updates: int) -> None:
        """updates: their total number, which shapes the schedule."""
        if updates < 1:
            raise ValueError(f"steps={updates}: expected at least 1")
        self.settings, self.updates, self.done = settings, updates, 0
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._moments: dict[str, Moments] = {}  # by name; empty before the first update
        self._moved, self._moved_gradients = MovedToHost(), MovedToHost()

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        s = self.settings
        shape = {"updates": self.updates, "warmup": s.warmup_steps, "schedule": s.schedule, "floor": s.min_lr_ratio}
        return s.lr * lr_factor(self.done, **shape)

    @torch.no_grad()
    def norm(self, scale: float) -> float:
        """The norm of `scale` times the accumulated gradient.

        Raises TrainingDiverged, and frees the gradient, when it is not finite.
        """
        self.come_back()
        gradients = [p.grad for p in self.named.values() if p.grad is not None]
        norm = float(full(torch.nn.utils.get_total_norm(gradients, foreach=True))) * abs(scale)
        self._expect_finite(norm)
        return norm

    def _expect_finite(self, norm: float) -> None:
        if not math.isfinite(norm):
            self.forget()
            raise TrainingDiverged(
                f"the gradient norm of update {self.done} is {norm}: no step was taken. Lower trainer.lr or "
                "trainer.max_grad_norm, in a run_dir of its own, or look for extreme importance ratios in the metrics"
            )

    def _clipped(self, scale: float, norm: float) -> float:
        """The factor on the accumulated gradient: `scale`, or less where `norm` is above the limit."""
        limit = self.settings.max_grad_norm
        return scale * min(1.0, limit / norm) if limit and norm else scale

    @torch.no_grad()
    def apply(self, scale: float) -> Metrics:
        """Update the weights with `scale` times the accumulated gradient, clipped; returns metrics.

        Raises TrainingDiverged as `norm` does. Parameters without a gradient get a zero one.
        """
        for p in self.named.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        norm = self.norm(scale)
        gradients = [p.grad for p in self.named.values() if p.grad is not None]
        factor = self._clipped(scale, norm)
        if factor != 1.0:
            for gradient in gradients:
                local(gradient).mul_(factor)
        self._moments = self._moments or self._made()
        lr, decay = self.lr, self.settings.weight_decay
        self._step([name for name, p in self.named.items() if p.ndim >= 2], lr, decay)
        self._step([name for name, p in self.named.items() if p.ndim < 2], lr, 0.0)
        self.forget()
        self.done += 1
        return {"grad_norm": norm, "lr": lr}

    def _step(self, names: list[str], lr: float, decay: float) -> None:
        """Step the named parameters, all of which have gradients."""
        weights = {name: local(self.named[name].detach()) for name in names}
        gradients = {name: local(p.grad) for name in names if (p := self.named[name]).grad is not None}
        held = {name: self._moments[name] for name in names}
        at_once = [name for name in names if held[name].whole]
        both = [[held[name].held[i] for name in at_once] for i in range(2)]
        self._adamw([weights[name] for name in at_once], [gradients[name] for name in at_once], both, lr, decay)
        for name in names:
            if not held[name].whole:
                weight, gradient = weights[name].view(-1), gradients[name].reshape(-1)
                for part in held[name].pieces():
                    moments = held[name].load(part)
                    self._adamw([weight[part]], [gradient[part]], [[each] for each in moments], lr, decay)
                    held[name].store(part, moments)

    def _adamw(
        self, weights: list[Tensor], gradients: list[Tensor], moments: list[list[Tensor]], lr: float, decay: float
    ) -> None:
        if not weights:
            return
        (first, second), (beta1, beta2) = moments, self.settings.betas
        counts = [torch.tensor(float(self.done), device=p.device) for p in weights]  # adamw increments them itself
        adamw(
            weights,
            gradients,
            first,
            second,
            [],
            counts,
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=decay,
            eps=self.settings.eps,
            maximize=False,
        )

    def forget(self) -> None:
        self._moved_gradients.back()
        for p in self.named.values():
            p.grad = None

    def leave(self, device: torch.device) -> None:
        """Move moments and gradients from this device to the host's memory, until they are needed or `come_back`."""
        self._moved.move([t for each in self._moments.values() for t in each.held if t.device.type == device.type])
        self._moved_gradients.move([local(p.grad) for p in self.named.values() if p.grad is not None])

    def come_back(self) -> None:
        self._moved.back()
        self._moved_gradients.back()
        self._moved_gradients = MovedToHost()  # they are seldom moved: their room is not kept

    def _made(self) -> dict[str, Moments]:
        return made_for({name: local(p.detach()) for name, p in self.named.items()}, self.settings)

    def state(self) -> list[Slice]:
        """This process's rows of both moments of every parameter; empty before the first update."""
        self.come_back()
        held = [(name, self.named[name], moments) for name, moments in self._moments.items()]
        return [moments.block(i, block_of(f"{m}.{name}", p)) for name, p, moments in held for i, m in enumerate(MOMENTS)]

    def expected(self, done: int) -> list[Slice]:
        """`state()` after `done` updates, by name, shape and dtype."""
        return [block_of(f"{m}.{name}", p) for name, p in self.named.items() for m in MOMENTS] if done else []

    def restore(self, state: dict[str, Tensor], done: int) -> None:
        """Restore a checked `state` after `done` updates; moments are copied to where they are held."""
        self.come_back()
        self.forget()
        self.done, self._moments = done, self._made() if done else {}
        for name, moments in self._moments.items():
            moments.restore([state[f"{m}.{name}"] for m in MOMENTS])
