"""Corrections for sampling from another policy: factors on each token's advantage.

k = p_hat / mu is constant during a step: p_hat is the trainer's policy at its start, mu the engine's when the token was
sampled. A correction is a function of k alone (and of signs and ages), so it is computed once a step and multiplied into the
advantages, which is exact for every policy loss (see `losses`). KL and entropy terms are not corrected.
A dropped token has a factor of 0. It still counts in every denominator, so the other tokens do not become heavier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tidemill.algorithms.token_rows import ByAttempt
from tidemill.core.import_object import bound
from tidemill.core.types import Array, Metrics

LOG_RATIO_BOUND = 20.0  # beyond it exp() only overflows


@dataclass(frozen=True, slots=True)
class Ratios(ByAttempt):
    """M sampled tokens of n attempts, row after row, at the start of a step."""

    old: Array | None  # [M] float64 log p_hat; None where it was not recomputed
    behaviour: Array  # [M] float64 log mu
    advantages: Array  # [M]
    lengths: Array  # [n] int64, >= 1
    lags: Array  # [M] int64: updates between the weights that sampled the token and those being trained

    @property
    def log_k(self) -> Array:
        if self.old is None:
            raise ValueError("a correction reads p_hat, which this run does not compute: set old_logprobs = 'recompute'")
        return self.old - self.behaviour


Correction = Callable[[Ratios], Array]
"""Returns [M] float64 factors >= 0."""


def tis(x: Ratios, *, cap: float = 2.0) -> Array:
    """min(k, cap) for each token.

    Source: truncated importance sampling, fengyao.notion.site/off-policy-rl, who ran caps of 2 and 8.
    When: engine and trainer differ a little, or rollouts lag: the bias is that of the few tokens above the cap.
    Cost: p_hat, one more forward pass.
    """
    _positive(cap=cap)
    return np.minimum(_exp(x.log_k), cap)


def tis_sequence(x: Ratios, *, cap: float = 2.0) -> Array:
    """min(prod k, cap) for each attempt.

    Source: as `tis`, of the product, which alone is unbiased for an attempt's reward as long as it is not cut.
    When: short answers. The product of many factors has a large variance.
    Cost: p_hat, one more forward pass.
    """
    _positive(cap=cap)
    return x.spread(np.minimum(_exp(x.per_attempt(x.log_k)), cap))


def icepop(x: Ratios, *, low: float = 0.5, high: float = 5.0) -> Array:
    """k where low <= k <= high, else 0, for each token: kept tokens carry the weight k.

    Source: IcePop, 2510.18855; the same as token-level masked importance sampling (MIS).
    When: a mixture of experts, or another precision in the engine, makes single tokens wrong by far.
    Cost: p_hat, one more forward pass.
    """
    return _kept(x.log_k, low, high)


def mis_sequence(x: Ratios, *, low: float = 0.0, high: float = 2.0) -> Array:
    """prod k where low <= prod k <= high, else 0, for each attempt.

    Source: masked importance sampling, richardli.xyz/rl-collapse.
    When: attempts of a stale policy are to be left out rather than cut.
    Cost: p_hat, one more forward pass.
    """
    return x.spread(_kept(x.per_attempt(x.log_k), low, high))


def mis_geometric(x: Ratios, *, low: float = 0.99, high: float = 1.01) -> Array:
    """1 where low <= exp(mean log k) <= high, else 0, for each attempt: a rejection, not a weight.

    Source: richardli.xyz/rl-collapse; usually together with `tis`, which gives the weight. Bounds are of p_hat / mu.
    When: long answers, for which the product of the ratios carries no information.
    Cost: p_hat, one more forward pass.
    """
    return x.spread((_kept(x.per_attempt(x.log_k) / x.lengths, low, high) > 0).astype(np.float64))


def veto(x: Ratios, *, low: float = 1e-4) -> Array:
    """0 for an attempt with a token of k < low, else 1.

    Source: the catastrophic-token veto of richardli.xyz/rl-collapse.
    When: beside another correction, against attempts with a token that the trainer would never have sampled.
    Cost: p_hat, one more forward pass.
    """
    _positive(low=low)
    return x.spread((x.per_attempt((x.log_k < np.log(low)).astype(np.float64)) == 0).astype(np.float64))


def opsm(x: Ratios, *, delta: float = 0.5) -> Array:
    """0 for an attempt with A < 0 and mean(log mu - log p_hat) > delta, else 1.

    Source: off-policy sequence masking, DeepSeek-V3.2, 2512.02556, eq. 9, of the live policy: for one update a step. delta
    is not published there.
    When: failures of an old policy pull too hard; successes are always kept.
    Cost: p_hat, one more forward pass.
    """
    far = -x.per_attempt(x.log_k) / x.lengths > delta
    negative = x.per_attempt(x.advantages) < 0
    return x.spread((~(far & negative)).astype(np.float64))


def m2po(x: Ratios, *, limit: float = 0.04) -> Array:
    """1, but 0 for the tokens of largest (log k)^2 among those that push outwards, until their mean is <= limit.

    Source: M2PO, 2510.01161; selected over the whole step, equals together. Outwards: A > 0 and k > 1, or A < 0 and k < 1.
    When: very stale data, together with the loss `importance`: few tokens are left out, and no ratio is clipped.
    Cost: p_hat, one more forward pass.
    """
    _positive(limit=limit)
    outwards = np.flatnonzero(x.advantages * x.log_k > 0)
    squares = x.log_k[outwards] ** 2
    ascending = np.sort(squares)
    means = np.cumsum(ascending) / np.arange(1, len(squares) + 1)  # never falls
    left_out = ascending[np.searchsorted(means, limit, side="right") :]
    bound = left_out[0] if len(left_out) else np.inf
    factors = np.ones(len(x.log_k))
    factors[outwards[squares >= bound]] = 0.0  # all equal ones together: rows have no order (I6)
    return factors


def age(x: Ratios, *, half_life: float = 4.0) -> Array:
    """0.5 ** (lag / half_life), by the oldest token of each attempt.

    Source: ours. It weighs data and does not correct its distribution: the gradient is biased towards new samples.
    When: p_hat is not known, and old samples should count for less.
    Cost: nothing.
    """
    _positive(half_life=half_life)
    oldest = np.maximum.reduceat(x.lags, x.starts)
    return x.spread(0.5 ** (oldest / half_life))


CORRECTIONS: dict[str, Callable[..., Array]] = {
    f.__name__: f for f in (tis, tis_sequence, icepop, mis_sequence, mis_geometric, veto, opsm, m2po, age)
}
PER_TOKEN = frozenset({"tis", "icepop", "m2po"})  # factors differ within an attempt
SELECTING = frozenset({"m2po"})  # these select among all tokens of a step; the others read one attempt
WITHOUT_OLD = frozenset({"age"})  # the others are 1 everywhere unless p_hat is recomputed


def correction_by_name(name: str, constants: dict[str, float]) -> Correction:
    """The correction of this name, or FILE.py:function. ValueError if unknown."""
    return bound("correction", name, constants, CORRECTIONS)


def correct(x: Ratios, corrections: Sequence[Correction]) -> tuple[Array, Metrics]:
    """([M] all factors' product w, {mean, share dropped, (sum w)^2 / (M sum w^2)})."""
    factors = np.ones(len(x.behaviour))
    for each in corrections:
        own = np.asarray(each(x), np.float64)
        if own.shape != factors.shape or not np.isfinite(own).all() or (own < 0).any():
            raise ValueError(f"a correction returned {own.shape}: expected {len(factors)} finite factors >= 0, one a token")
        factors *= own
    if not len(factors):
        return factors, {}
    squares = float((factors**2).sum())
    ess = float(factors.sum()) ** 2 / (len(factors) * squares) if squares else 0.0
    return factors, {"mean": float(factors.mean()), "dropped": float((factors == 0).mean()), "ess": ess}


def _exp(log_ratios: Array) -> Array:
    return np.exp(np.clip(log_ratios, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def _kept(log_ratios: Array, low: float, high: float) -> Array:
    if not 0 <= low < high:
        raise ValueError(f"low={low}, high={high}: expected 0 <= low < high")
    ratios = _exp(log_ratios)
    return np.where((ratios >= low) & (ratios <= high), ratios, 0.0)


def _positive(**constants: float) -> None:
    for name, value in constants.items():
        if not value > 0:
            raise ValueError(f"{name}={value}: expected a positive number")
