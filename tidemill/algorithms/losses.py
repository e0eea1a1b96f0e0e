"""Per-token losses on flat tensors: each maps N tokens to N unreduced terms.

`evaluate` weighs the terms and sums them, for all losses alike. Losses are minimised. pi is the live policy, p_hat the
trainer's at the start of the step, mu the engine's when it sampled the token, A the advantage, sg[] a stop-gradient.
Three ratios, never to be mixed: r = pi / p_hat moves with the optimizer inside a step, rho = pi / mu holds staleness,
mismatch and drift together, k = p_hat / mu is constant in a step; rho = r k.

On policy (pi = p_hat = mu) the terms of every policy loss add up to the gradient -A grad log pi. Every policy loss scales
with its advantage: loss(c A) = c loss(A) for a detached c >= 0, one a token (one a sequence for `presets.PER_SEQUENCE`). The
corrections of `corrections.py` are therefore factors on the advantages, and no loss has code for them; some losses (aipo,
a3po) also correct by a formula of their own.

Constants come as keyword arguments from a `LossSpec`; a user's own loss is `FILE.py:function` with the same signature:

    def my_loss(x: LossInput, *, strength: float = 1.0) -> Loss
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from tidemill.algorithms.loss_terms import (
    LOG_RATIO_BOUND,
    Loss,
    LossInput,
    check_bounds,
    clip_ratio,
    needed,
    ratio,
    require,
    sequence_mean,
    sequence_sum,
)
from tidemill.core.import_object import bound as by_name
from tidemill.core.token_extras import TokenExtra
from tidemill.core.types import LossSpec

LossFunction = Callable[[LossInput], Loss]


def reinforce(x: LossInput) -> Loss:
    """-A log pi.

    Source: Williams, 1992.
    When: one update on samples of the very weights that are trained; it corrects for nothing else.
    Cost: nothing.
    """
    return Loss(-x.advantages * x.logprobs)


def ppo_clip(x: LossInput, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 0.0) -> Loss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / p_hat; where A < 0, at most dual_clip |A|.

    Source: PPO, 1707.06347; asymmetric bounds DAPO, 2503.14476; dual clip 1912.09729: 0 is off, elsewhere 3 is common.
    When: the usual choice, for samples that are a few versions old at most, and for several updates a step.
    Cost: one more forward pass (p_hat), unless mu stands in for it.
    """
    require(dual_clip == 0 or dual_clip > 1, f"{dual_clip=}: expected 0 (off) or a number > 1")
    a, r = x.advantages, ratio(x.logprobs, x.old)
    objective, clipped = clip_ratio(r, a, clip_low, clip_high)
    if dual_clip:
        objective = torch.where(a < 0, torch.maximum(objective, dual_clip * a), objective)
        clipped = clipped | ((a < 0) & (r > dual_clip))
    return Loss(-objective, {"clipped": clipped, "ratio": r})


def aipo(x: LossInput, *, cap: float = 5.0) -> Loss:
    """-sg[min(rho, cap)] A log pi, rho = pi / mu.

    Source: LlamaRL, 2505.24034, caps of 2 to 10; ScaleRL's CISPO, 2510.13786, is the same. Without sg it would drop tokens.
    When: asynchronous training: corrects for staleness and mismatch, and no token loses its gradient.
    Cost: nothing.
    """
    require(cap > 0, f"{cap=}: expected a positive number")
    rho = ratio(x.logprobs.detach(), x.behaviour)
    return Loss(-(rho.clamp(max=cap) * x.advantages) * x.logprobs, {"clipped": rho > cap, "ratio": rho})


def a3po(x: LossInput, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Loss:
    """-sg[p_hat / mu] min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / p_hat.

    Its own p_hat: log p_hat = alpha log mu + (1 - alpha) sg[log pi], alpha = 1 / lag of the token, 0 where the lag is 0.

    Source: A-3PO, 2512.06547. At lag 0 some code takes mu for p_hat; the paper takes pi.
    When: stale samples, clipped around a policy between mu and pi that follows each token's age.
    Cost: nothing.
    """
    lag = needed(x.lag, "a3po needs each token's lag: give LossInput.lag")
    alpha = torch.where(lag >= 1, 1 / lag.clamp(min=1).to(x.logprobs.dtype), 0)
    old = alpha * x.behaviour + (1 - alpha) * x.logprobs.detach()
    r = ratio(x.logprobs, old)
    objective, clipped = clip_ratio(r, x.advantages, clip_low, clip_high)
    return Loss(-ratio(old, x.behaviour) * objective, {"clipped": clipped, "ratio": r})


def gspo(x: LossInput, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Loss:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean of log r over the sequence).

    r = pi / p_hat. Each token has its sequence's term, so that the reduction "sequence" gives the paper's loss, with 1 /
    |y| in its gradient.

    Source: GSPO, 2507.18071, bounds as there; elsewhere they default to PPO's 0.2, which clips nothing.
    When: one reward a sequence, mixture-of-experts models. A must not differ within a sequence.
    Cost: one more forward pass (p_hat), unless mu stands in for it.
    """
    s = ratio(sequence_mean(x, x.logprobs - x.old), 0)
    objective, clipped = clip_ratio(s, x.advantages, clip_low, clip_high)
    return Loss(-objective, {"clipped": clipped, "ratio": s})


def gspo_token(x: LossInput, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Loss:
    """-min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A), s_t = sg[s] pi / sg[pi], s as in gspo.

    Source: GSPO-token, 2507.18071; with one A a sequence, gspo's value and gradient.
    When: gspo with advantages that differ within a sequence.
    Cost: one more forward pass (p_hat), unless mu stands in for it.
    """
    frozen = x.logprobs.detach()
    s = ratio(sequence_mean(x, frozen - x.old), 0) * ratio(x.logprobs, frozen)
    objective, clipped = clip_ratio(s, x.advantages, clip_low, clip_high)
    return Loss(-objective, {"clipped": clipped, "ratio": s})


def cispo(x: LossInput, *, clip_low: float = 1.0, clip_high: float = 4.0) -> Loss:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi, r = pi / p_hat; no lower bound at clip_low >= 1.

    Source: MiniMax-M1, 2506.13585: no lower bound, the upper one is not published. Elsewhere clip_high may be the cap
        itself, here 1 + clip_high is. With mu in place of p_hat: aipo.
    When: rare, decisive tokens are to keep the gradient that PPO's clip takes from them.
    Cost: one more forward pass (p_hat), unless mu stands in for it.
    """
    check_bounds(clip_low, clip_high)
    r = ratio(x.logprobs.detach(), x.old)
    clipped = (r < 1 - clip_low) | (r > 1 + clip_high)
    return Loss(-(r.clamp(1 - clip_low, 1 + clip_high) * x.advantages) * x.logprobs, {"clipped": clipped, "ratio": r})


def sapo(x: LossInput, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Loss:
    """-(4 / tau) sigmoid(tau (r - 1)) A, r = pi / p_hat; tau = tau_positive where A > 0, else tau_negative.

    Source: SAPO, 2511.20347, under the reduction "sequence"; some code takes the token mean.
    When: the gradient is to fade with the distance from p_hat, not to end at a bound.
    Cost: one more forward pass (p_hat), unless mu stands in for it.
    """
    require(tau_positive > 0 and tau_negative > 0, f"{tau_positive=}, {tau_negative=}: expected positive numbers")
    a, r = x.advantages, ratio(x.logprobs, x.old)
    above, below = (4 / tau * torch.sigmoid(tau * (r - 1)) for tau in (tau_positive, tau_negative))
    return Loss(-torch.where(a > 0, above, below) * a, {"ratio": r})


def dppo_tv(x: LossInput, *, delta: float = 0.15) -> Loss:
    """-M rho A, rho = pi / mu; M = 0 where |pi - mu| > delta and rho has gone the way A pushes, else 1.

    Source: DPPO, 2602.04879, binary TV. Some code also caps rho or takes p_hat for mu; the paper finds both harmful.
    When: stale or mismatched samples; rare tokens may move by large ratios, as little probability moves with them.
    Cost: nothing.
    """
    return _dppo(x, (x.logprobs.detach().exp() - x.behaviour.exp()).abs(), delta)


def dppo_kl(x: LossInput, *, delta: float = 0.05) -> Loss:
    """-M rho A, rho = pi / mu; M = 0 where D > delta and rho has gone the way A pushes, else 1.

    D = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)).

    Source: DPPO, 2602.04879, binary KL. Some code gives it the delta of dppo_tv, which is too loose.
    When: as dppo_tv, and stricter with tokens that are nearly certain.
    Cost: nothing.
    """
    pi, mu = x.logprobs.detach(), x.behaviour
    log_not_pi, log_not_mu = ((-torch.expm1(p)).clamp(min=torch.finfo(p.dtype).tiny).log() for p in (pi, mu))
    return _dppo(x, mu.exp() * (mu - pi) + log_not_mu.exp() * (log_not_mu - log_not_pi), delta)


def gmpo(x: LossInput, *, bound: float = 0.4) -> Loss:
    """-A exp(mean over the sequence of l), l = min(log r, bound) where A > 0, else max(log r, -bound).

    r = pi / p_hat. Each token has its sequence's term, so that the reduction "sequence" gives the paper's loss, with 1 /
    |y| in its gradient.

    Source: GMPO, 2507.20673. The bound is one of log r; PPO's 0.2 means something else.
    When: single outlying tokens upset the ratios. A must not differ within a sequence.
    Cost: one more forward pass (p_hat), unless mu stands in for it.
    """
    require(bound >= 0, f"{bound=}: expected a number >= 0")
    a, log_r = x.advantages, x.logprobs - x.old
    s = ratio(sequence_mean(x, torch.where(a > 0, log_r.clamp(max=bound), log_r.clamp(min=-bound))), 0)
    return Loss(-a * s, {"clipped": ((a > 0) & (log_r > bound)) | ((a < 0) & (log_r < -bound)), "ratio": s})


def importance(x: LossInput) -> Loss:
    """-rho A, rho = pi / mu.

    Source: importance sampling; what M2PO, 2510.01161, has for the tokens that it keeps.
    When: with a correction that drops the outliers: this bounds nothing.
    Cost: nothing.
    """
    rho = ratio(x.logprobs, x.behaviour)
    return Loss(-rho * x.advantages, {"ratio": rho})


def topr(x: LossInput, *, cap: float = 1.0) -> Loss:
    """-sg[w] A log pi; w = 1 where A >= 0, else min(pi(y) / mu(y), cap), y the whole sequence.

    Source: TOPR, 2503.14286, with A for its reward. Some code takes the ratio of each token.
    When: very old or foreign samples: successes count in full, failures as far as pi still makes them. One A a sequence.
    Cost: nothing.
    """
    require(cap > 0, f"{cap=}: expected a positive number")
    a, log_rho = x.advantages, x.logprobs.detach() - x.behaviour
    rho = ratio(sequence_sum(x, log_rho), 0)[x.sequence]
    weight = torch.where(a < 0, rho.clamp(max=cap), 1)
    return Loss(-(weight * a) * x.logprobs, {"clipped": (a < 0) & (rho > cap), "ratio": ratio(log_rho, 0)})


def rollout_mask(x: LossInput, *, clip_low: float = 0.2, clip_high: float = 0.28) -> Loss:
    """-sg[rho 1(1 - clip_low < rho < 1 + clip_high)] A log pi, rho = pi / mu.

    Source: GLM-5, 2602.15763. The defaults are usual bounds of PPO's, not constants that the paper publishes.
    When: asynchronous training; what has left the bounds around mu is dropped, whatever the sign of A.
    Cost: nothing.
    """
    check_bounds(clip_low, clip_high)
    rho = ratio(x.logprobs.detach(), x.behaviour)
    kept = (rho > 1 - clip_low) & (rho < 1 + clip_high)
    return Loss(-torch.where(kept, rho * x.advantages, 0) * x.logprobs, {"clipped": ~kept, "ratio": rho})


def cross_entropy(x: LossInput) -> Loss:
    """-log pi.

    Source: maximum likelihood.
    When: supervised training on given tokens.
    Cost: nothing.
    """
    return Loss(-x.logprobs)


def kl_k1(x: LossInput, *, importance: float = 1.0) -> Loss:
    """rho^importance d, d = log pi - log pi_ref, rho = pi / mu.

    Source: 2510.01555, 2512.21852. With importance 0 its gradient is zero on average, so that it only adds noise.
    When: importance 1: value and gradient of KL(pi || pi_ref) without bias, at any staleness.
    Cost: one forward pass of the reference, and its weights.
    """
    return _kl(x, _to_reference(x, "kl_k1"), x.logprobs, importance)


def kl_k2(x: LossInput, *, importance: float = 1.0) -> Loss:
    """sg[rho]^importance d^2 / 2, d = log pi - log pi_ref, rho = pi / mu.

    Source: 2510.01555. It is sg[rho] that makes the gradient that of KL(pi || pi_ref); with a live rho it is another one.
    When: as kl_k1, with less noise near pi_ref; its value is no KL. importance 0 is right on policy only.
    Cost: one forward pass of the reference, and its weights.
    """
    return _kl(x, _to_reference(x, "kl_k2").square() / 2, x.logprobs.detach(), importance)


def kl_k3(x: LossInput, *, importance: float = 1.0) -> Loss:
    """rho^importance (exp(-d) - 1 + d), d = log pi - log pi_ref clamped to +-20, rho = pi / mu.

    Source: importance 1: DeepSeek-V3.2, 2512.02556; 0: GRPO, 2402.03300, whose gradient is that of KL(pi_ref || pi).
    When: as kl_k1, and no term is below 0. importance 0 to reproduce what was done with it; right on policy only.
    Cost: one forward pass of the reference, and its weights.
    """
    d = _to_reference(x, "kl_k3").clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return _kl(x, torch.expm1(-d) + d, x.logprobs, importance)


def entropy(x: LossInput) -> Loss:
    """-H, the entropy of the distribution that the token was drawn from.

    Source: A3C, 1602.01783.
    When: beside another loss, with a small weight, where exploration ends too early.
    Cost: nothing.
    """
    return Loss(-needed(x.entropy, "entropy needs each token's entropy: give LossInput.entropy"))


def value(x: LossInput, *, clip: float = 0.0) -> Loss:
    """max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2; with clip 0 (off) (V - R)^2 / 2.

    Source: PPO's code, 1707.06347; common values of clip are 0.2 and 0.5. R: `returns`.
    When: there is a critic: it is trained beside the policy, on the same tokens.
    Cost: nothing beside the critic.
    """
    require(clip >= 0, f"{clip=}: expected 0 (off) or a positive number")
    values, target = _of_critic("value", x.values), _of_critic("value", x.returns)
    squares = (values - target).square()
    if not clip:
        return Loss(squares / 2, {"value_error": squares})
    old = _of_critic("value", x.old_values)
    near = (torch.clamp(values, old - clip, old + clip) - target).square()
    return Loss(torch.maximum(squares, near) / 2, {"value_error": squares, "value_clipped": near > squares})


def score(x: LossInput) -> Loss:
    """-A V.

    Source: the chain rule: A = -dLoss / dV of a loss of many rows' values at once, such as `bradley_terry`.
    When: training a reward model.
    Cost: nothing beside the critic.
    """
    return Loss(-x.advantages * _of_critic("score", x.values))


_ON_MU = (reinforce, aipo, a3po, dppo_tv, dppo_kl, importance, topr, rollout_mask)  # on mu, or on no other policy
_ON_OLD = (ppo_clip, gspo, gspo_token, cispo, sapo, gmpo)
_OTHERS = (cross_entropy, kl_k1, kl_k2, kl_k3, entropy, value, score)
LOSSES: dict[str, Callable[..., Loss]] = {f.__name__: f for f in (*_ON_OLD, *_ON_MU, *_OTHERS)}
PROPORTIONAL = frozenset(f.__name__ for f in (*_ON_OLD, *_ON_MU))  # proportional to A: where A = 0 there is no gradient


def loss_by_name(spec: LossSpec) -> LossFunction:
    """spec.weight * (the loss with its constants bound + each loss of spec.also, made likewise).

    Metrics are not weighed; one of `also` whose name is taken goes by "LOSS/metric". ValueError for what is unknown.
    """
    own = by_name("loss", spec.name, spec.params, LOSSES)
    if not spec.also and spec.weight == 1:
        return own
    return partial(_sum, [(spec.name, own), *((s.name, loss_by_name(s)) for s in spec.also)], spec.weight)


def extras_of(spec: LossSpec) -> list[TokenExtra]:
    """The token extras that a loss and its further terms read. Raises what `loss_by_name` raises."""
    loss = by_name("loss", spec.name, spec.params, LOSSES)
    return [*getattr(loss.func, "extras", ()), *(extra for other in spec.also for extra in extras_of(other))]


def evaluate(loss: LossFunction, x: LossInput, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """sum of weights [N] * terms, and the sums of its metrics, over the tokens with a weight.

    Tokens without one are cut out before the loss sees them, so that whatever garbage stands there (NaN, -inf) has
    exactly no gradient: multiplying it by 0 would not do. "tokens" is the number of those left.
    """
    keep = weights != 0
    if not bool(keep.all()):
        x, weights = x.select(keep), weights[keep]
    result = _checked(loss(x), x)
    total = (weights * result.terms).sum()
    metrics = {name: values.detach().sum(dtype=total.dtype) for name, values in result.metrics.items()}
    metrics |= {"loss": total.detach(), "tokens": total.new_tensor(len(weights))}
    if x.entropy is not None:
        metrics["entropy"] = x.entropy.detach().sum()
    return total, metrics


def _sum(losses: Sequence[tuple[str, LossFunction]], weight: float, x: LossInput) -> Loss:
    terms, metrics = torch.zeros_like(x.logprobs), dict[str, Tensor]()
    for name, loss in losses:
        result = _checked(loss(x), x)
        terms = terms + result.terms
        for key, values in result.metrics.items():
            while key in metrics:
                key = f"{name}/{key}"
            metrics[key] = values
    return Loss(weight * terms, metrics)


def _checked(result: Loss, x: LossInput) -> Loss:
    if not isinstance(result, Loss) or result.terms.shape != x.logprobs.shape:
        given = f"shape {tuple(result.terms.shape)}" if isinstance(result, Loss) else type(result).__name__
        raise ValueError(f"a loss returned {given}: expected Loss(terms) with one term for each of {len(x.logprobs)} tokens")
    return result


def _dppo(x: LossInput, distance: Tensor, delta: float) -> Loss:
    require(delta >= 0, f"{delta=}: expected a number >= 0")
    a, rho = x.advantages, ratio(x.logprobs, x.behaviour)
    dropped = (distance > delta) & (((a > 0) & (rho > 1)) | ((a < 0) & (rho < 1)))
    return Loss(-torch.where(dropped, 0, rho * a), {"clipped": dropped, "ratio": rho})


def _kl(x: LossInput, estimate: Tensor, logprobs: Tensor, importance: float) -> Loss:
    require(importance in (0, 1), f"{importance=}: expected 0 or 1")
    terms = ratio(logprobs, x.behaviour) * estimate if importance else estimate
    return Loss(terms, {"kl": terms})


def _to_reference(x: LossInput, name: str) -> Tensor:
    return x.logprobs - needed(x.reference, f"{name} needs reference logprobs: set algorithm.reference")


def _of_critic(name: str, values: Tensor | None) -> Tensor:
    return needed(values, f"{name} needs a critic's values and returns: set algorithm.critic")
