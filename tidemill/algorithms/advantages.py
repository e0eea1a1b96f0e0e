"""Advantages: functions from a step's rewards to one number for each sampled token.

Constants are keyword-only. A function that compares within a cohort gives exactly 0 to a cohort with one attempt or with
equal rewards: never the raw reward, never rounding noise. A user's own advantage is `FILE.py:function` of this
signature:

    def my_advantage(x: Scores, *, strength: float = 1.0) -> Array  # [M]"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tidemill.algorithms.cohorts import (
    centre,
    cohort_index,
    cohort_size,
    discounted_sums,
    divide,
    normalise,
    standardise,
    unit,
)
from tidemill.algorithms.token_rows import ByAttempt
from tidemill.core.import_object import bound
from tidemill.core.types import Array

CORRECT = 1.0  # the least reward of a solved task, for functions that count only solved and not solved


@dataclass(frozen=True, slots=True)
class Scores(ByAttempt):
    """The scores of a step: n scored attempts with M sampled tokens, attempt after attempt."""

    rewards: Array  # [n] float64
    cohorts: Array  # [n] int64: attempts with the same number are compared: those at one task
    lengths: Array  # [n] int64, >= 1: sampled tokens in all rows (a tool's or user's tokens are not among them)
    parts: Mapping[str, Array] = field(default_factory=dict)  # [n] each: the named components of the reward
    greedy: Array | None = None  # [n] the reward of the greedy answer to the same prompt
    given: Array | None = None  # [M] further rewards at tokens: of steps, of turns, -beta * KL; None: none
    turns: Array | None = None  # [M] int64: the turn that each token belongs to, from 0 in each attempt
    values: Array | None = None  # [M] a critic's value before each token
    bootstrap: Array | None = None  # [n] the value after the last token; 0 where the episode ended
    seats: Array | None = None  # [M] int64: the seat that each token belongs to
    of_seats: Array | None = None  # [n, seats] the rewards of single seats; NaN: the attempt has no such seat

    def at_tokens(self) -> Array:
        """[M] rewards at tokens: `given`, plus each attempt's reward at its last token."""
        rewards = np.zeros(int(self.lengths.sum())) if self.given is None else np.array(self.given, np.float64)
        rewards[np.cumsum(self.lengths) - 1] += self.rewards
        return rewards


Advantage = Callable[[Scores], Array]
"""Returns [M] float64, one number per sampled token."""


def grpo(x: Scores, *, eps: float = 1e-6) -> Array:
    """(R - mean) / (std + eps), over the cohort, with the sample standard deviation (n - 1).

    Source: DeepSeekMath, 2402.03300. eps is 1e-6 in verl and 1e-4 in TRL.
    When: the usual choice for rewards that a program checks. Very easy and very hard prompts count more than others.
    Cost: nothing.
    """
    return x.spread(normalise(x.rewards, x.cohorts, eps))


def grpo_batch(x: Scores, *, eps: float = 1e-6) -> Array:
    """(R - mean) / (std + eps), the mean over the cohort, the standard deviation (n - 1) over all R - mean of the step.

    Source: ScaleRL, 2510.13786. TRL's scale_rewards="batch" divides by the spread of the raw rewards: another thing.
    When: the scale of grpo without its favour for very easy and very hard prompts.
    Cost: nothing.
    """
    return x.spread(unit(centre(x.rewards, x.cohorts), eps))


def dr_grpo(x: Scores) -> Array:
    """R - mean, over the cohort.

    Source: Dr. GRPO, 2503.20783; the paper's method is this together with the reduction `fixed`.
    When: no difficulty should be favoured, and rewards have a scale of their own.
    Cost: nothing.
    """
    return x.spread(centre(x.rewards, x.cohorts))


def rloo(x: Scores) -> Array:
    """R minus the mean of the others in the cohort, which is n / (n - 1) * (R - mean).

    Source: RLOO, 2402.14740.
    When: an unbiased gradient of the mean reward from small cohorts.
    Cost: nothing.
    """
    return x.spread(_without_own(x.rewards, x.cohorts))


def leave_one_out_seats(x: Scores) -> Array:
    """R of the seat minus the mean of the attempt's other seats; 0 for a seat that is alone, or where all are equal.

    Source: the baseline of RLOO, 2402.14740, with the seats of an attempt for the siblings of a prompt. Other seats may have
    answered to one's own tokens, so it is no mere baseline: what rises is the margin over them.
    When: seats that play against each other, with a reward each. Where all have one reward it trains nothing: use rloo.
    Cost: nothing.
    """
    rewards, seats = (_needed("leave_one_out_seats", name, getattr(x, name)) for name in ("of_seats", "seats"))
    attempt, seat = np.nonzero(~np.isnan(rewards))
    advantages = np.zeros(rewards.shape)
    advantages[attempt, seat] = _without_own(rewards[attempt, seat], attempt)
    return advantages[x.spread(np.arange(len(rewards))), seats]


def none(x: Scores) -> Array:
    """0: the reward is looked at, and not trained on.

    Source: ours.
    When: a preference or a teacher takes the reward's place.
    Cost: nothing.
    """
    return np.zeros(int(x.lengths.sum()))


def reinforce(x: Scores, *, baseline: float = 0.0) -> Array:
    """R - baseline, a constant.

    Source: REINFORCE, Williams 1992.
    When: one attempt a prompt with rewards of both signs, or rewards that are advantages already.
    Cost: nothing; a large variance.
    """
    return x.spread(x.rewards - baseline)


def reinforce_pp(x: Scores, *, gamma: float = 1.0, eps: float = 1e-8) -> Array:
    """(G - mean) / sqrt(var + eps), over all tokens of the step; G: return-to-go of `given`, and of R at the last token.

    Source: REINFORCE++, 2501.03262, with -beta * KL in `given`. The variance is that of M - 1, as in verl; of M in OpenRLHF.
    When: one attempt a prompt, and many prompts a step. Long answers weigh more in the mean and in the spread.
    Cost: nothing.
    """
    return standardise(discounted_sums(x.at_tokens(), x.lengths, gamma), eps)


def reinforce_pp_baseline(x: Scores, *, eps: float = 1e-8) -> Array:
    """(B - mean) / sqrt(var + eps), over all tokens of the step; B = R - mean, over the cohort.

    Source: REINFORCE++-baseline, 2501.03262; its KL term belongs to the loss. Elsewhere the second mean, which is not 0
    when lengths differ, also moves cohorts whose rewards are all equal; here they stay at 0.
    When: groups of attempts, and one scale for all prompts of a step.
    Cost: nothing.
    """
    centred = centre(x.rewards, x.cohorts)
    index = cohort_index(x.cohorts)
    apart = np.bincount(index, centred != 0)[index] > 0
    return np.where(x.spread(apart), standardise(x.spread(centred), eps), 0.0)


def remax(x: Scores) -> Array:
    """G - R of the greedy answer to the same prompt; G: return-to-go of `given`, and of R at the last token.

    Source: ReMax, 2310.10505.
    When: one attempt a prompt, and a baseline that depends on the prompt.
    Cost: one greedy rollout a prompt.
    """
    return discounted_sums(x.at_tokens(), x.lengths, 1.0) - x.spread(_needed("remax", "greedy", x.greedy))


def maxrl(x: Scores) -> Array:
    """(R - mean) / mean, over the cohort; 0 where the mean is not positive. Rewards are meant to be 0 or 1.

    Source: MaxRL, 2602.02710: in expectation the gradient of log p, truncated at order n - 1. Others divide by mean + 1e-6.
    When: hard prompts, of which few attempts are solved: these count the most.
    Cost: nothing.
    """
    index = cohort_index(x.cohorts)
    mean = (np.bincount(index, x.rewards) / np.bincount(index))[index]
    return x.spread(divide(centre(x.rewards, x.cohorts), mean))


def opo(x: Scores) -> Array:
    """R - sum(|y| R) / sum(|y|), over the cohort.

    Source: OPO, 2505.23585: the baseline of least variance if a gradient's norm grows with the answer's length.
    When: exact on-policy steps, and answers of very different lengths.
    Cost: nothing.
    """
    # A baseline is the same whatever R is counted from.
    centred, index = centre(x.rewards, x.cohorts), cohort_index(x.cohorts)
    baseline = np.bincount(index, x.lengths * centred) / np.bincount(index, x.lengths)
    return x.spread(centred - baseline[index])


def gdpo(x: Scores, *, weights: Mapping[str, float] | None = None, eps: float = 1e-4) -> Array:
    """s / (std of s over the attempts of the step + eps); s = sum of weight * (part - mean) / (std + eps), over the cohort.

    Source: GDPO, 2601.05242; over attempts and with eps as in TRL, over tokens in the authors' code. The mean of s is 0.
    A part that has no weight counts once; without parts, the reward is the only one. An attempt that lacks a part gets 0
    for it, as in TRL.
    When: a reward of several parts with different scales, none of which may drown the others.
    Cost: nothing.
    """
    parts, weights = x.parts or {"reward": x.rewards}, weights or {}
    if unknown := sorted(set(weights) - set(parts)):
        raise ValueError(f"gdpo has weights for {', '.join(unknown)}: the parts of the reward are {', '.join(parts)}")
    total = np.zeros(len(x.rewards))
    for name, part in parts.items():
        known = ~np.isnan(part)
        total[known] += weights.get(name, 1.0) * normalise(part[known], x.cohorts[known], eps)
    return x.spread(unit(total, eps))


def pass_at_k(x: Scores, *, k: float = 4) -> Array:
    """Solved f / s; not solved (f - C(n-c-1, k-1) / C(n-1, k-1)) / s; f = C(n-c, k) / C(n, k), s = sqrt(f (1 - f)).

    Source: Pass@k Training, 2508.10751; c of the cohort's n are solved (R >= 1). Sums to 0 over the cohort; 0 where s is 0.
    In a cohort smaller than k, k is its size.
    When: coverage matters more than the single answer: prompts that are solved often no longer train.
    Cost: nothing.
    """

    def formula(n: int, c: int, k: int) -> tuple[float, float]:
        fail = math.comb(n - c, k) / math.comb(n, k)
        if not 0 < fail < 1:
            return 0.0, 0.0
        spread = math.sqrt(fail * (1 - fail))
        return (fail - math.comb(n - c - 1, k - 1) / math.comb(n - 1, k - 1)) / spread, fail / spread

    return _by_count(x, formula, _whole(k, least=1))


def pkpo(x: Scores, *, k: float = 4) -> Array:
    """Solved (k / n) C(n-c, k-1) / C(n-1, k-1); not solved 0.

    Source: PKPO, 2505.15201, with the pass@(k-1) of the others as baseline; c of the cohort's n are solved (R >= 1). The sum
    over a prompt's attempts of this, times the gradient of the sum of log pi, is an unbiased gradient of its pass@k: the
    reduction is one of sums over tokens (`attempt`, or `fixed`), never of means over them.
    In a cohort smaller than k, k is its size. k >= 2: pass@1 is what rloo is for.
    When: pass@k itself is the aim. Advantages are never negative: what fails is not pushed down.
    Cost: nothing.
    """

    def formula(n: int, c: int, k: int) -> tuple[float, float]:
        return 0.0, k / n * math.comb(n - c, k - 1) / math.comb(n - 1, k - 1) if n > 1 else 0.0

    return _by_count(x, formula, _whole(k, least=2))


def gae(x: Scores, *, gamma: float = 1.0, lam: float = 1.0, whiten: float = 1.0, adaptive: float = 0.0) -> Array:
    """sum over s >= t of (gamma lam)^(s-t) (r_s + gamma V_(s+1) - V_s), then (A - mean) / sqrt(var + 1e-8) over all tokens.

    Source: GAE, 1506.02438; whitened as in verl, whiten = 0 leaves it out. adaptive > 0: lam = 1 - 1 / (adaptive * |y|), at
    least 0, for each attempt (VAPO, 2504.05118, with 0.05). The token after a tool's answer follows on the one before it.
    When: there is a critic; long episodes, or one attempt a prompt.
    Cost: a critic: its forward and backward pass, and its memory.
    """
    each = np.maximum(1 - 1 / (adaptive * x.lengths), 0.0) if adaptive else lam
    advantages = _gae("gae", x, gamma, each)
    return standardise(advantages, 1e-8) if whiten else advantages


def process(x: Scores, *, gamma: float = 1.0) -> Array:
    """G_t - mean of G_0, over the cohort; G: return-to-go of `given`, and of R at the last token.

    Source: process supervision, DeepSeekMath 2402.03300, which normalises each step's reward instead of the returns.
    When: steps are scored, and a step should answer only for what comes after it.
    Cost: a scorer of steps.
    """
    to_go = discounted_sums(x.at_tokens(), x.lengths, gamma)
    total = to_go[x.starts]
    mean = total - centre(total, x.cohorts)  # the totals themselves where they are all equal
    return np.where(x.spread(cohort_size(x.cohorts) > 1), to_go - x.spread(mean), 0.0)


def turn_level(x: Scores, *, credit: float = 1.0, eps: float = 1e-6) -> Array:
    """N(R) over the cohort + credit * N(G_j) over the cohort's j-th turns; N = (v - mean) / (std + eps), std with n - 1.

    G_j is the sum of `given` over turn j and all later turns of the attempt.
    Source: MT-GRPO, 2505.11821, whose code also puts the coefficient on the turn's part. It gives the score of one turn to
    the tokens before the tool's answer; here each turn gets its return-to-go, compared with the siblings that have the turn.
    When: turns are scored (did the call work?) beside the outcome.
    Cost: a scorer of turns.
    """
    turns, outcome = _needed("turn_level", "turns", x.turns), grpo(x, eps=eps)
    if x.given is None:
        return outcome
    width = int(turns.max(initial=0)) + 1
    cells, cell = np.unique(x.spread(np.arange(len(x.rewards))) * width + turns, return_inverse=True)  # attempts' turns
    row, turn = np.divmod(cells, width)
    to_go = discounted_sums(np.bincount(cell, x.given, len(cells)), np.bincount(row, minlength=len(x.rewards)), 1.0)
    return outcome + credit * normalise(to_go, cohort_index(x.cohorts)[row] * width + turn, eps)[cell]


def returns(x: Scores, gamma: float = 1.0, lam: float = 1.0) -> Array:
    """GAE + V, unwhitened: what a critic is trained towards. [M]

    Source: GAE, 1506.02438. VAPO, 2504.05118, keeps lam = 1 here, whatever the policy has.
    When: together with gae.
    Cost: nothing beyond gae's.
    """
    return _gae("returns", x, gamma, lam) + _needed("returns", "values", x.values)


def distilled(teacher: Array, own: Array, coefficient: float = 1.0) -> Array:
    """coefficient * (log nu - log p_hat), each token for itself: no return-to-go. [M]

    Source: on-policy distillation, as MOPD in 2601.02780; nu: the teacher, on the student's tokens and at its temperature.
    When: added to another advantage, or instead of one where nothing is scored.
    Cost: one forward pass of the teacher.
    """
    return coefficient * (np.asarray(teacher, np.float64) - own)


def overlong(lengths: Array, limit: float, cache: float) -> Array:
    """0 where |y| <= limit - cache; (limit - cache - |y|) / cache from there on; -1 where |y| >= limit. [n]

    Source: DAPO, 2503.14476, with limit 20480 and cache 4096, where an attempt is one reply. Of several, y is the longest:
    the limit is one of each reply, and a long conversation is none that was cut off. To be added to the reward.
    When: answers that are cut off should cost more the longer they are, instead of all at once.
    Cost: nothing.
    """
    if not 0 < cache <= limit:
        raise ValueError(f"limit={limit}, cache={cache}: expected 0 < cache <= limit")
    return np.clip((limit - cache - np.asarray(lengths, np.float64)) / cache, -1.0, 0.0)


_ALONE = (none, reinforce, reinforce_pp, remax, gae, leave_one_out_seats)
_AMONG = (grpo, grpo_batch, dr_grpo, rloo, reinforce_pp_baseline, maxrl, opo, gdpo, pass_at_k, pkpo, process, turn_level)
ADVANTAGES: dict[str, Callable[..., Array]] = {f.__name__: f for f in (*_AMONG, *_ALONE)}
COMPARING = frozenset(f.__name__ for f in _AMONG)  # these compare attempts: a cohort of one trains nothing
ACROSS_SEATS = frozenset({"leave_one_out_seats"})  # these compare the seats of an attempt: one seat trains nothing
# these read all groups of a step, the others one at a time
OVER_THE_STEP = frozenset({"grpo_batch", "reinforce_pp", "reinforce_pp_baseline", "gdpo", "gae"})
USING_GIVEN = frozenset({"reinforce_pp", "remax", "gae", "process", "turn_level"})  # the others ignore `given`
# the field of Scores that must not be None
NEEDS = {"remax": "greedy", "gae": "values", "turn_level": "turns", "leave_one_out_seats": "of_seats"}


def advantage_by_name(name: str, constants: Mapping[str, Any]) -> Advantage:
    """The advantage of this name, or FILE.py:function, with `constants` bound. ValueError if unknown."""
    return bound("advantage", name, constants, ADVANTAGES)


def _needed(name: str, field: str, value: Array | None) -> Array:
    if value is None:
        raise ValueError(f"{name} needs Scores.{field}, which is None")
    return value


def _without_own(values: Array, cohorts: Array) -> Array:
    """[n] values minus the mean of the others in the cohort: n / (n - 1) * (value - mean)."""
    size = cohort_size(cohorts)
    return centre(values, cohorts) * (size / np.maximum(size - 1, 1))


def _whole(k: float, least: int) -> int:
    if not float(k).is_integer() or k < least:
        raise ValueError(f"k={k}: expected a whole number >= {least}")
    return int(k)


def _by_count(x: Scores, formula: Callable[[int, int, int], tuple[float, float]], k: int) -> Array:
    """[M] values by cohort: `formula(n, c solved, k <= n)` gives those for not solved and for solved."""
    solved, index = x.rewards >= CORRECT, cohort_index(x.cohorts)
    counts = zip(np.bincount(index).tolist(), np.bincount(index, solved).tolist(), strict=True)
    table = np.array([formula(n, int(c), min(k, n)) for n, c in counts], np.float64).reshape(-1, 2)
    return x.spread(table[index, solved.astype(np.int64)])


def _gae(name: str, x: Scores, gamma: float, lam: Array | float) -> Array:
    values = _needed(name, "values", x.values)
    after = np.append(values[1:], 0.0)[: len(values)]
    after[np.cumsum(x.lengths) - 1] = 0.0 if x.bootstrap is None else x.bootstrap
    return discounted_sums(x.at_tokens() + gamma * after - values, x.lengths, gamma * lam)
