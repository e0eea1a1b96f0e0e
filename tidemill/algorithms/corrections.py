"""Ratios of two policies, and the detached factors that correct for sampling from another one than is trained.

Three ratios, never to be mixed: r = pi / p_hat moves with the optimizer inside a step, rho = pi / mu holds staleness,
mismatch and drift together, k = p_hat / mu is constant during a step; rho = r * k. (pi: the live policy, p_hat: the
trainer's policy at the start of the step, mu: the engine's policy when the token was sampled.)
"""

from __future__ import annotations

from torch import Tensor

LOG_RATIO_BOUND = 20.0  # beyond it exp() only overflows; the ratio is held constant there and passes no gradient


def ratio(logprobs: Tensor, base: Tensor) -> Tensor:
    """exp(logprobs - base), the log clamped to +-20. Differentiable in what its arguments are differentiable in."""
    return (logprobs - base).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def truncated(old: Tensor, behaviour: Tensor, cap: float) -> Tensor:
    """min(k, cap) for each token, k = p_hat / mu, detached: truncated importance sampling (TIS)."""
    return ratio(old.detach(), behaviour).clamp(max=cap)
