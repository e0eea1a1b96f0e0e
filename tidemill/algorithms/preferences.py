"""Preferences as advantages, so that a pair need not share a micro-batch.

A preference loss is a function of sums of log pi over sequences. Its gradient is therefore the sum over sequences of
-A * grad log pi(y), with A = -dLoss / d log pi(y), computed from log pi at the start of the step. A is put on every
token of its sequence, under the loss `reinforce` (-A log pi), summed over tokens; divided by p, that is the gradient of
the mean over p pairs. It is exact for the weights at the start of the step, so a step is one update. `labelled` is KTO's
course, from single replies: rows, and each prompt with the next one's reply -> z, the mean of their log(pi / pi_ref).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tidemill.algorithms.advantages import Scores
from tidemill.algorithms.token_rows import POLICY, REFERENCE, Logprobs
from tidemill.core.types import Array, Metrics, Sample

GOOD = 0.5  # a reply with a higher score is good
CERTAIN = -1e-6  # a mean logprob above it counts as this: the log odds of p = 1 are infinite


@dataclass(frozen=True, slots=True)
class Pairs:
    """p pairs of answers, each to one prompt."""

    chosen: Array  # [p] float64 sum of log pi; of a reward model its output
    rejected: Array  # [p]
    chosen_length: Array  # [p] int64, >= 1: tokens in the sum
    rejected_length: Array  # [p]
    chosen_reference: Array | None = None  # [p] sum of log pi_ref
    rejected_reference: Array | None = None  # [p]


@dataclass(frozen=True, slots=True)
class Preference:
    chosen: Array  # [p] advantages
    rejected: Array  # [p]
    loss: Array  # [p]
    margin: Array  # [p] implicit reward of the chosen answer minus that of the rejected one


@dataclass(frozen=True, slots=True)
class Unpaired:
    advantages: Array  # [n]
    loss: Array  # [n]
    reward: Array  # [n] implicit
    margin: Array  # [n] reward minus beta z for a desirable answer, beta z minus reward for another


def dpo(x: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Preference:
    """-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h); h = log(pi / pi_ref) of the chosen - that of the rejected.

    Source: DPO, 2305.18290; sums over tokens. label_smoothing e: the share of labels taken to be wrong (conservative DPO).
    When: pairs of answers, clearly better and worse. The usual first choice.
    Cost: a reference: one forward pass.
    """
    _check(beta > 0 and 0 <= label_smoothing < 0.5, f"beta={beta}, label_smoothing={label_smoothing}: expected > 0, < 0.5")
    chosen, rejected = _log_ratios("dpo", x)
    margin = beta * (chosen - rejected)
    right, wrong = _log_sigmoid(margin), _log_sigmoid(-margin)
    a = beta * ((1 - label_smoothing) * np.exp(wrong) - label_smoothing * np.exp(right))
    return Preference(a, -a, -(1 - label_smoothing) * right - label_smoothing * wrong, margin)


def ipo(x: Pairs, *, beta: float = 0.1) -> Preference:
    """(h - 1 / (2 beta))^2; h = mean log(pi / pi_ref) of the chosen - that of the rejected, means over tokens.

    Source: IPO, 2310.12036; means as in TRL and AReaL, which the authors confirmed; sums in OpenRLHF.
    When: labels without noise, which DPO would drive to an infinite margin.
    Cost: a reference: one forward pass.
    """
    _check(beta > 0, f"beta={beta}: expected a positive number")
    chosen, rejected = _log_ratios("ipo", x)
    h = chosen / x.chosen_length - rejected / x.rejected_length
    off = h - 1 / (2 * beta)
    return Preference(-2 * off / x.chosen_length, 2 * off / x.rejected_length, off**2, beta * h)


def orpo(x: Pairs, *, weight: float = 0.1) -> Preference:
    """-m_w - weight * log sigmoid(o_w - o_l); m = mean log pi over tokens, o = m - log(1 - exp m), w chosen, l rejected.

    Source: ORPO, 2403.07691. The first term is a mean over each answer's tokens; in TRL over those of the batch.
    When: supervised training and preferences in one, from a base model.
    Cost: nothing: no reference.
    """
    _check(weight >= 0, f"weight={weight}: expected a number >= 0")
    mean = x.chosen / x.chosen_length
    chosen, rejected = np.minimum(mean, CERTAIN), np.minimum(x.rejected / x.rejected_length, CERTAIN)
    fail_chosen, fail_rejected = -np.expm1(chosen), -np.expm1(rejected)  # 1 - p, with all its digits near p = 1
    margin = (chosen - np.log(fail_chosen)) - (rejected - np.log(fail_rejected))
    slope = weight * np.exp(_log_sigmoid(-margin))
    up, down = 1 + slope / fail_chosen, -slope / fail_rejected  # do / dm = 1 / (1 - p)
    return Preference(up / x.chosen_length, down / x.rejected_length, -mean - weight * _log_sigmoid(margin), margin)


def simpo(x: Pairs, *, beta: float = 2.5, gamma_ratio: float = 0.55) -> Preference:
    """-log sigmoid(beta (m_w - m_l) - gamma), gamma = gamma_ratio * beta; m = mean log pi over tokens.

    Source: SimPO, 2405.14734, and its constants; TRL sets gamma itself, to 0.5.
    When: no memory for a reference, and answers whose length should not pay.
    Cost: nothing: no reference.
    """
    _check(beta > 0, f"beta={beta}: expected a positive number")
    margin = beta * (x.chosen / x.chosen_length - x.rejected / x.rejected_length)
    u = margin - gamma_ratio * beta
    a = beta * np.exp(_log_sigmoid(-u))
    return Preference(a / x.chosen_length, -a / x.rejected_length, -_log_sigmoid(u), margin)


def kto(
    logprobs: Array, reference: Array, desirable: Array, z: float, *, beta: float = 0.1,
    desirable_weight: float = 1.0, undesirable_weight: float = 1.0,
) -> Unpaired:  # fmt: skip
    """Desirable w_d (1 - sigmoid(beta (h - z))); undesirable w_u (1 - sigmoid(beta (z - h))); h = log(pi / pi_ref).

    Source: KTO, 2402.01306; `logprobs`, `reference` [n] are sums over tokens, z is `kto_baseline`, a constant.
    Its rule for the weights: w_d n_d / (w_u n_u) from 1 to 4/3, n_d and n_u how many are desirable and not.
    When: answers judged good or bad one by one, without pairs.
    Cost: a reference: one forward pass, and one of each model on mismatched pairs for z.
    """
    _check(beta > 0, f"beta={beta}: expected a positive number")
    h = np.asarray(logprobs, np.float64) - reference
    sign = np.where(desirable, 1.0, -1.0)
    weights = np.where(desirable, desirable_weight, undesirable_weight)
    u = sign * beta * (h - z)
    short = np.exp(_log_sigmoid(-u))  # 1 - sigmoid(u)
    return Unpaired(sign * weights * beta * short * np.exp(_log_sigmoid(u)), weights * short, beta * h, u)


def kto_baseline(logprobs: Array, reference: Array) -> float:
    """max(0, mean of log(pi / pi_ref)) over mismatched answers' sums; 0 without any."""
    return max(0.0, float(np.mean(np.asarray(logprobs, np.float64) - reference))) if len(logprobs) else 0.0


def mismatched(attempts: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
    """Rows of each attempt's prompt with the next attempt's replies; the last one takes the first's."""
    return [_after(own[0], other) for own, other in zip(attempts, [*attempts[1:], *attempts[:1]], strict=True)]


def _after(own: Sample, attempt: Sequence[Sample]) -> list[Sample]:
    """The rows of an attempt after another's prompt; each loses its own prompt."""
    names = ("tokens", "mask", "logprobs", "versions", "advantages", "weights")  # the other arrays are about sampling
    begin, start, prompt = int(own.predicted.argmax()), int(attempt[0].predicted.argmax()), attempt[0].tokens
    found = []
    for row in attempt:
        cut = start if np.array_equal(row.tokens[:start], prompt[:start]) else int(row.predicted.argmax())
        both = {name: np.concatenate((getattr(own, name)[:begin], getattr(row, name)[cut:])) for name in names}
        found.append(replace(own, **both, extras={}))
    return found


def labelled(
    preference: Callable[..., Unpaired],
    scores: Scores,
    policy: Array,
    reference: Array | None,
    beside: tuple[Sequence[Sample], Logprobs, Array],
) -> tuple[Array, Metrics]:
    """(advantages [M] under a preference of `UNPAIRED`, metrics).

    policy, reference: logprobs [M] of the rows. beside: the mismatched rows, their logprobs, and each attempt's number.
    """
    assert reference is not None
    (others, theirs, counts), good = beside, scores.rewards > GOOD
    starts = np.cumsum(counts) - counts
    pi, ref = (
        np.add.reduceat([v[row.predicted].sum(dtype=np.float64) for row, v in zip(others, theirs[who], strict=True)], starts)
        for who in (POLICY, REFERENCE)
    )
    z = kto_baseline(pi, ref)
    found = preference(scores.per_attempt(policy), scores.per_attempt(reference), good, z)
    told: Metrics = {"preference_loss": float(found.loss.mean()), "kto_baseline": z}
    told["preference_accuracy"] = float((found.margin > 0).mean())
    if good.any() and not good.all():
        told["margin"] = float(found.reward[good].mean() - found.reward[~good].mean())
    return scores.spread(found.advantages), told


def bradley_terry(x: Pairs, *, margin: Array | float = 0.0, centre: float = 0.0) -> Preference:
    """-log sigmoid(R_w - R_l - margin) + centre (R_w + R_l)^2; R: a reward model's outputs, w chosen, l rejected.

    Source: Bradley-Terry, with the margin of Llama 2, 2307.09288, and the centring of 2312.09244 (0.01). The "advantages"
    are coefficients -dLoss / dR, for the loss `score`.
    When: training a reward model on pairs.
    Cost: nothing.
    """
    difference, total = x.chosen - x.rejected, x.chosen + x.rejected
    u = difference - margin
    a, pull = np.exp(_log_sigmoid(-u)), -2 * centre * total
    return Preference(a + pull, -a + pull, -_log_sigmoid(u) + centre * total**2, difference)


def pairs_of(rewards: Array, cohorts: Array, order: Array | None = None) -> tuple[Array, Array]:
    """(chosen, rejected) rows, each [p] int64: the best and the worst attempt of each cohort.

    Cohorts whose rewards are all equal give no pair; pairs are ordered by cohort number. Of equal attempts the first is
    taken, by `order` [n] if it is given. Used for online DPO (2402.04792) from rollouts.
    """
    order = np.arange(len(rewards)) if order is None else order
    best, worst = (np.lexsort((order, sign * np.asarray(rewards), cohorts)) for sign in (-1, 1))
    _, starts = np.unique(np.asarray(cohorts)[best], return_index=True)
    chosen, rejected = best[starts], worst[starts]
    differ = rewards[chosen] > rewards[rejected]
    return chosen[differ], rejected[differ]


PREFERENCES: dict[str, Callable[..., Preference]] = {f.__name__: f for f in (dpo, ipo, orpo, simpo)}
UNPAIRED: dict[str, Callable[..., Unpaired]] = {"kto": kto}  # for answers labelled one by one
OF_SCORES: dict[str, Callable[..., Preference]] = {"bradley_terry": bradley_terry}  # on a head's outputs instead of log pi
EVERY_PREFERENCE: dict[str, Callable[..., Any]] = {**PREFERENCES, **UNPAIRED, **OF_SCORES}
WITH_REFERENCE = frozenset({"dpo", "ipo", "kto"})


def _log_ratios(name: str, x: Pairs) -> tuple[Array, Array]:
    if x.chosen_reference is None or x.rejected_reference is None:
        missing = "chosen_reference" if x.chosen_reference is None else "rejected_reference"
        raise ValueError(f"{name} needs Pairs.{missing}, which is None")
    return x.chosen - x.chosen_reference, x.rejected - x.rejected_reference


def _log_sigmoid(x: Array) -> Array:
    return -np.logaddexp(0.0, -x)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
