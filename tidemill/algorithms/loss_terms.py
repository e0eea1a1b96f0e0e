"""Inputs and outputs of a loss, the ratio of two policies, and sums over sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from tidemill.core.token_extras import TokenExtra

F = TypeVar("F", bound=Callable[..., "Loss"])

LOG_RATIO_BOUND = 20.0  # beyond it exp() only overflows; the ratio is held constant there and passes no gradient


@dataclass(frozen=True, slots=True)
class LossInput:
    """The N trained tokens of some samples, flat and in order.

    A sequence is an attempt with all of its rows; every sequence is whole.
    """

    logprobs: Tensor  # [N] log pi, live: differentiable, as is the entropy
    behaviour: Tensor  # [N] log mu, as the engine recorded it
    old: Tensor  # [N] log p_hat, the trainer's at the start of the step; = behaviour when it was not recomputed
    advantages: Tensor  # [N]
    sequence: Tensor  # [N] int64: which sequence each token belongs to, 0 .. sequences - 1
    sequences: int
    reference: Tensor | None = None  # [N] log pi_ref
    entropy: Tensor | None = None  # [N] live, of the distribution that was sampled, nats
    lag: Tensor | None = None  # [N] int64: updates between the weights that sampled the token and those being trained
    values: Tensor | None = None  # [N] a critic's value before the token, live
    old_values: Tensor | None = None  # [N] the same at the start of the step
    returns: Tensor | None = None  # [N] the critic's targets
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # [N, *shape] each, of the declared dtype: see `extra`

    def select(self, keep: Tensor) -> LossInput:
        """Only the tokens where `keep` [N] is True; the others reach neither value nor gradient."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        kept = {name: value[keep] for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **kept, extras={name: value[keep] for name, value in self.extras.items()})

    def extra(self, name: str) -> Tensor:
        """[N, *shape] what the engine returned with each token, under the name of an extra that the loss `reads`."""
        lacking = f"no token extra {name!r} came with these tokens: put @reads(TokenExtra({name!r}, DTYPE)) on the loss"
        return needed(self.extras.get(name), f"{lacking}, before the run begins")


@dataclass(frozen=True, slots=True)
class Loss:
    terms: Tensor  # [N] one term a token, unreduced
    metrics: dict[str, Tensor] = field(default_factory=dict)  # name -> [N], to be summed over trained tokens


def reads(*extras: TokenExtra) -> Callable[[F], F]:
    """Declare the token extras that a loss reads, so that engines return them."""

    def declared(loss: F) -> F:
        loss.extras = extras  # type: ignore[attr-defined]
        return loss

    return declared


def ratio(logprobs: Tensor, base: Tensor | float) -> Tensor:
    """exp(logprobs - base), with the log clamped to +-20; differentiable in both arguments."""
    return (logprobs - base).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def clip_ratio(r: Tensor, a: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """(min(r A, clip(r, 1 - low, 1 + high) A), [N] bool: True where that has no gradient)."""
    check_bounds(low, high)
    objective = torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)
    return objective, ((a > 0) & (r > 1 + high)) | ((a < 0) & (r < 1 - low))


def sequence_sum(x: LossInput, values: Tensor) -> Tensor:
    """[sequences] the sums of `values` [N]."""
    return values.new_zeros(x.sequences).index_add(0, x.sequence, values)


def sequence_mean(x: LossInput, values: Tensor) -> Tensor:
    """[N] the mean of `values` [N] over each token's sequence."""
    return (sequence_sum(x, values) / sequence_sum(x, torch.ones_like(values)).clamp(min=1))[x.sequence]


def needed(value: Tensor | None, otherwise: str) -> Tensor:
    if value is None:
        raise ValueError(otherwise)
    return value


def check_bounds(clip_low: float, clip_high: float) -> None:
    require(clip_low >= 0 and clip_high >= 0, f"{clip_low=}, {clip_high=}: expected numbers >= 0")


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
