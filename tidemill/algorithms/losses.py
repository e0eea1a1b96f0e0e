"""Per-token losses on flat tensors. A loss returns its terms; weighing and summing them is `evaluate`, for all alike.

Losses are minimised. On policy (pi = p_hat = mu) every policy loss here has the gradient -A * grad log pi. Constants
come as keyword arguments from a `LossSpec`; a user's own loss is `FILE.py:function` with the same signature:

    def my_loss(x: LossInput, *, strength: float = 1.0) -> Loss
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from tidemill.algorithms.corrections import ratio, truncated
from tidemill.loading import load_object
from tidemill.types import LossSpec


@dataclass(frozen=True, slots=True)
class LossInput:
    """The trained tokens of some samples, flat. N tokens, in order within their sequence; sequences are whole."""

    logprobs: Tensor  # [N] log pi, live: differentiable, as is the entropy
    behaviour: Tensor  # [N] log mu, as the engine recorded it
    old: Tensor  # [N] log p_hat, the trainer's at the start of the step; = behaviour when it was not recomputed
    advantages: Tensor  # [N]
    sequence: Tensor  # [N] int64: which sequence each token belongs to, 0 .. sequences - 1
    sequences: int
    reference: Tensor | None = None  # [N] log pi_ref
    entropy: Tensor | None = None  # [N] live, of the whole distribution at the sampling temperature, nats

    def select(self, keep: Tensor) -> LossInput:
        """Only the tokens where `keep` [N] bool. What is left out can reach neither the value nor the gradient."""
        return LossInput(
            self.logprobs[keep],
            self.behaviour[keep],
            self.old[keep],
            self.advantages[keep],
            self.sequence[keep],
            self.sequences,
            None if self.reference is None else self.reference[keep],
            None if self.entropy is None else self.entropy[keep],
        )


@dataclass(frozen=True, slots=True)
class Loss:
    terms: Tensor  # [N] one term a token, unreduced
    metrics: dict[str, Tensor] = field(default_factory=dict)  # name -> [N], to be summed over trained tokens


LossFunction = Callable[[LossInput], Loss]


def ppo_clip(
    x: LossInput, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 0.0, tis_cap: float = 0.0
) -> Loss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / p_hat. PPO, 1707.06347; asymmetric: DAPO, 2503.14476.

    dual_clip > 1 bounds the term by dual_clip * |A| for A < 0 (1912.09729); tis_cap > 0 multiplies by min(p_hat / mu,
    tis_cap), detached. 0 switches either off.
    """
    _require(clip_low >= 0 and clip_high >= 0, f"clip_low={clip_low}, clip_high={clip_high}: expected numbers >= 0")
    _require(dual_clip == 0 or dual_clip > 1, f"dual_clip={dual_clip}: expected 0 (off) or a number > 1")
    _require(tis_cap >= 0, f"tis_cap={tis_cap}: expected 0 (off) or a positive number")
    a, r = x.advantages, ratio(x.logprobs, x.old)
    objective = torch.minimum(r * a, r.clamp(1 - clip_low, 1 + clip_high) * a)
    ratios = r.detach()
    clipped = ((a > 0) & (ratios > 1 + clip_high)) | ((a < 0) & (ratios < 1 - clip_low))
    if dual_clip:
        objective = torch.where(a < 0, torch.maximum(objective, dual_clip * a), objective)
        clipped = clipped | ((a < 0) & (ratios > dual_clip))
    if tis_cap:
        objective = objective * truncated(x.old, x.behaviour, tis_cap)
    return Loss(-objective, {"clipped": clipped, "ratio": ratios})


def aipo(x: LossInput, *, cap: float = 5.0) -> Loss:
    """-sg[min(rho, cap)] A log pi, rho = pi / mu with the live pi. Never drops a gradient. LlamaRL, 2505.24034."""
    _require(cap > 0, f"cap={cap}: expected a positive number")
    rho = ratio(x.logprobs.detach(), x.behaviour)
    return Loss(-(rho.clamp(max=cap) * x.advantages) * x.logprobs, {"clipped": rho > cap, "ratio": rho})


def cross_entropy(x: LossInput) -> Loss:
    """-log pi: supervised training on given tokens."""
    return Loss(-x.logprobs)


LOSSES: dict[str, Callable[..., Loss]] = {"ppo_clip": ppo_clip, "aipo": aipo, "cross_entropy": cross_entropy}
PROPORTIONAL = frozenset({"ppo_clip", "aipo"})  # terms that are a multiple of A: where A = 0 there is no gradient


def loss_by_name(spec: LossSpec) -> LossFunction:
    """The loss with its constants bound. ValueError for an unknown name or a constant it does not take."""
    function = load_object(spec.name) if ".py:" in spec.name else LOSSES.get(spec.name)
    if function is None:
        raise ValueError(f"loss {spec.name!r}: expected one of {', '.join(LOSSES)}, or FILE.py:function")
    accepted = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    if unknown := sorted(set(spec.params) - set(accepted)):
        takes = f"it takes {', '.join(accepted)}" if accepted else "it takes none"
        raise ValueError(f"loss {spec.name!r} has no constant {', '.join(unknown)}: {takes}")
    return partial(function, **spec.params)


def evaluate(loss: LossFunction, x: LossInput, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """sum of weights [N] * terms, and the sums of its metrics, over the tokens with a weight.

    Tokens without one are cut out before the loss sees them, so that whatever garbage stands there (NaN, -inf) has
    exactly no gradient: multiplying it by 0 would not do. "tokens" is the number of those left.
    """
    keep = weights != 0
    if not bool(keep.all()):
        x, weights = x.select(keep), weights[keep]
    result = loss(x)
    if not isinstance(result, Loss) or result.terms.shape != x.logprobs.shape:
        given = f"shape {tuple(result.terms.shape)}" if isinstance(result, Loss) else type(result).__name__
        raise ValueError(f"a loss returned {given}: expected Loss(terms) with one term for each of {len(weights)} tokens")
    total = (weights * result.terms).sum()
    metrics = {name: values.detach().sum(dtype=total.dtype) for name, values in result.metrics.items()}
    metrics |= {"loss": total.detach(), "tokens": total.new_tensor(len(weights))}
    if x.entropy is not None:
        metrics["entropy"] = x.entropy.detach().sum()
    return total, metrics


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
