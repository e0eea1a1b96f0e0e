"""Preparation of a step: groups become samples with advantages, weights and a scale.

    rows(groups) -> the trainer's logprobs of them, where they are asked for -> prepare(groups, rows, logprobs)

An attempt is trained on if it has a Score, was not cancelled, and holds a token that was sampled or given to be learnt.
All others are left out of the statistics, the gradient and its denominators (I5). Every number counts attempts, whose
tokens are those of all their rows; rows count for nothing, and become samples one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np

from tidemill.algorithms.advantages import (
    ACROSS_SEATS,
    ADVANTAGES,
    OVER_THE_STEP,
    USING_GIVEN,
    Scores,
    advantage_by_name,
    distilled,
    overlong,
    returns,
)
from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.attempts import Attempt, Attempts, baseline, by_seat, by_turn, longest_reply
from tidemill.algorithms.corrections import CORRECTIONS, SELECTING, Ratios, correct, correction_by_name
from tidemill.algorithms.preferences import OF_SCORES, PREFERENCES, UNPAIRED, Pairs, labelled, mismatched, pairs_of
from tidemill.algorithms.reductions import reduction
from tidemill.algorithms.token_rows import CRITIC, POLICY, REFERENCE, Logprobs, by_row, ended, filled, flat, row_of
from tidemill.core.attempt_checks import expect_one_outcome
from tidemill.core.outcomes import fitting, parts_of
from tidemill.core.types import (
    GREEDY,
    TRUNCATED,
    Array,
    Finish,
    Group,
    InfraError,
    Metrics,
    PreparedStep,
    Sample,
    Score,
    Trajectory,
    Update,
)

ENTROPY, ENTROPY_WEIGHT = "entropy_sampled", "entropy_weight"  # metrics of a step whose entropy has a target
OF_SAMPLING = ("unscored", "zero_variance_groups", "reward", "reward_std", "truncated")  # metrics that given replies lack


class ConfiguredAlgorithm:
    """An `Algorithm` made from settings. Raises ValueError for functions that cannot be loaded."""

    def __init__(self, settings: AlgorithmSettings, max_tokens: int) -> None:
        """max_tokens: the longest completion that may be sampled."""
        self.settings, self._longest = settings.with_longest(max_tokens), max_tokens
        self._corrections = [correction_by_name(each.name, each.constants) for each in settings.corrections]
        self._advantage = advantage_by_name(settings.advantage, settings.constants_for("advantage"))
        self._preference = settings.preference
        self._entropies: tuple[int, Metrics] = -1, {}  # the latest step, and its metrics for the next entropy weight
        self._recorded: Callable[[int], Metrics] = lambda _: {}
        self._tell: Callable[[str], None] | None = None
        self._reads_turns = settings.advantage in USING_GIVEN or ".py:" in settings.advantage

    @property
    def asks(self) -> tuple[str, ...]:
        """The policies whose logprobs of the rows `prepare` needs; for the critic, its values."""
        s = self.settings
        wanted = {POLICY: s.recomputes, REFERENCE: s.reference is not None, CRITIC: s.critic is not None}
        return tuple(who for who, is_wanted in wanted.items() if is_wanted)

    @property
    def by_group(self) -> bool:
        """True if each group can be prepared alone with the same result, and the step is one update."""
        s = self.settings
        if s.preference or s.entropy.target is not None or s.updates.count > 1:
            return False
        corrections = {each.name for each in s.corrections}
        # nothing is known of a user's own function
        return s.advantage in ADVANTAGES.keys() - OVER_THE_STEP and corrections <= CORRECTIONS.keys() - SELECTING

    def recall(self, recorded: Callable[[int], Metrics], tell: Callable[[str], None] | None = None) -> None:
        """Set the source of earlier steps' metrics, and what tells the user a sentence."""
        self._recorded, self._tell = recorded, tell

    def drop_reason(self, group: Group) -> str | None:
        """ "unscored" (nothing to train on) or "zero-variance" for a group without a gradient; else None."""
        if not (attempts := list(self._attempts([group]))):
            return "unscored"
        if self.settings.zero_variance == "drop" and not self._told_apart(self._scores(attempts)).any():
            return "zero-variance"
        return None

    def rows(self, groups: Sequence[Group], step: int) -> list[Sample]:
        """The rows trained at this step, in the groups' order, without advantages and weights yet.

        For a preference of `UNPAIRED`, mismatched rows follow; they are measured and not trained on. Raises ValueError when
        rows of different attempts have one number.
        """
        for group in groups:
            expect_one_outcome(group)
        known = step if self.settings.reads_lags else None
        found = [[row_of(each.group, t, known) for t in self._trained(each)] for each in self._attempts(groups)]
        if self._preference in UNPAIRED:
            found += mismatched(found)
        rows = list(chain.from_iterable(found))
        return [ended(row) for row in rows] if self.settings.scores else rows

    def prepare(self, groups: Sequence[Group], step: int, rows: Sequence[Sample], logprobs: Logprobs) -> PreparedStep:
        """The samples, updates and metrics of one step.

        `rows` are those that `rows(groups, step)` returned. Raises ValueError for groups that cannot be trained on.
        """
        s, attempts = self.settings, list(self._attempts(groups))
        counts = np.array([len(self._trained(each)) for each in attempts], np.int64)  # rows of each attempt
        own = int(counts.sum())  # mismatched rows follow
        beside = rows[own:], {who: values[own:] for who, values in logprobs.items()}, np.roll(counts, -1)
        rows, logprobs = rows[:own], {who: values[:own] for who, values in logprobs.items()}
        known, earned = _Known.of(rows, logprobs), self._scores(attempts)
        told_apart = {each.group.id for each, differs in zip(attempts, self._told_apart(earned), strict=True) if differs}
        scores = earned if self._preference else self._with_known(earned, known)
        advantages, counted, found = self._credited(scores, attempts, known, beside)
        lags = flat(rows, [step - row.versions for row in rows]).astype(np.int64)
        ratios = Ratios(known.old, known.behaviour, advantages, scores.lengths, lags)
        factors, corrected = correct(ratios, self._corrections)
        masked = [s.overlong.treat == "mask" and each.end.finish in TRUNCATED for each in attempts]
        trained = scores.lengths * counted * ~np.array(masked, bool)
        weights, parts, ends = np.zeros(len(attempts)), list[tuple[slice, float]](), np.append(0, np.cumsum(counts))
        for part in _minibatches(scores.cohorts, s.updates.minibatches):
            weights[part], scale = reduction(s.reduction, trained[part], scores.cohorts[part], s.fixed_length)
            parts.append((slice(ends[part.start], ends[part.stop]), scale))
        kept = {"old_logprobs": logprobs.get(POLICY), "ref_logprobs": logprobs.get(REFERENCE)}
        if (critic := s.critic) is not None and known.values is not None and not s.scores:
            target = returns(scores, s.constants.get("gamma", 1.0), critic.lam)
            kept |= {"values": logprobs[CRITIC], "returns": list(by_row(rows, target))}
            found |= _of_values(known.values, target)
            if step < critic.warmup:
                advantages = np.zeros(len(advantages))
        samples = list(filled(rows, factors * advantages, np.repeat(weights, counts), kept))
        updates = [Update(samples[part], scale) for part, scale in parts] * s.updates.epochs
        metrics = _metrics(groups, attempts, earned.parts, len(groups) - len(told_apart) if s.compares else 0)
        if s.given:
            metrics = {name: value for name, value in metrics.items() if name not in OF_SAMPLING}
        metrics |= found | ({f"correction/{name}": value for name, value in corrected.items()} if self._corrections else {})
        weight, measured = self._entropy(step, known.behaviour)
        return PreparedStep(samples, {POLICY: s.loss_spec(weight)}, updates, metrics | measured)

    def _with_known(self, scores: Scores, known: _Known) -> Scores:
        """The scores with the KL penalty taken off the rewards, and with the critic's values."""
        s = self.settings
        if s.kl_in_reward and known.against is not None:
            penalty = -s.kl_in_reward * known.against
            if s.advantage in USING_GIVEN:  # else the attempt's reward pays the sum
                scores = replace(scores, given=penalty if scores.given is None else scores.given + penalty)
            else:
                scores = replace(scores, rewards=scores.rewards + scores.per_attempt(penalty))
        return scores if known.values is None else replace(scores, values=known.values)

    def _credited(
        self, scores: Scores, attempts: Attempts, known: _Known, beside: tuple[Sequence[Sample], Logprobs, Array]
    ) -> tuple[Array, Array, Metrics]:
        """(advantages [M], [n] bool: attempts that count for the reduction, metrics)."""
        s, against = self.settings, known.against
        every = np.ones(len(attempts), bool)
        if self._preference in UNPAIRED:
            preference = partial(UNPAIRED[self._preference], **s.constants_for("preference"))
            advantages, found = labelled(preference, scores, known.policy, known.reference, beside)
            counted = every
        elif self._preference:
            siblings = np.array([each.end.sample for each in attempts], np.int64)
            of = known.values if s.scores else known.policy
            assert of is not None
            advantages, counted, found = self._preferred(scores, siblings, of, known.reference)
        else:
            advantages, counted, found = self._advantage(scores), every, Metrics()
        if s.reference is not None and s.reference.distil and known.reference is not None:
            advantages = advantages + distilled(known.reference, known.policy, s.reference.distil)
        if against is not None:
            found["log_reference_ratio"] = float(against.mean()) if len(against) else 0.0
        return advantages, counted, found

    def _entropy(self, step: int, behaviour: Array) -> tuple[float, Metrics]:
        """(the entropy's weight in this step, metrics that the next step's follows from)."""
        s = self.settings.entropy
        if s.target is None or not len(behaviour):
            return s.coefficient, {}
        latest, before = self._entropies
        if latest != step - 1:
            before = self._recorded(step - 1)
        weight = s.next(before[ENTROPY_WEIGHT], before[ENTROPY]) if ENTROPY_WEIGHT in before else s.coefficient
        found = {ENTROPY: -float(behaviour.mean()), ENTROPY_WEIGHT: weight}
        self._entropies = step, found
        return weight if found[ENTROPY] <= s.target else 0.0, found

    def _attempts(self, groups: Sequence[Group]) -> Iterator[Attempt]:
        for group in groups:
            if self.settings.wants_greedy and baseline(group) is None:
                continue
            for rows in group.attempts:
                end, learnt = rows[-1], [t for t in rows if t.learnt.any()]
                cut = self.settings.overlong.treat == "filter" and end.finish in TRUNCATED
                scored = isinstance(end.outcome, Score) and end.finish is not Finish.CANCELLED
                if learnt and scored and end.sample != GREEDY and not cut:
                    attempt = Attempt(group, end, learnt)
                    if not self._misfits(attempt):
                        yield attempt

    def _trained(self, attempt: Attempt) -> Sequence[Trajectory]:
        """The attempt's rows that become samples: a reward model learns from the end of the last one alone."""
        return [attempt.end] if self.settings.scores else attempt.rows

    def _misfits(self, attempt: Attempt) -> bool:
        """True for a score of more turns than replies, which older versions recorded; the first is told of."""
        if not self._reads_turns:
            return False
        replies = int((np.diff(attempt.mask.astype(np.int8), prepend=0) > 0).sum())
        outcome = fitting(attempt.end.outcome, replies, "its judge")
        if isinstance(outcome, InfraError) and self._tell is not None:
            self._tell(f"an attempt of group {attempt.group.id} is not trained on, nor are others like it: {outcome.reason}")
            self._tell = None
        return isinstance(outcome, InfraError)

    def _scores(self, attempts: Attempts) -> Scores:
        s = self.settings
        rewards = np.array([each.end.reward for each in attempts], np.float64)
        if (cache := s.overlong.cache) is not None:
            replies = np.array([longest_reply(each.mask) for each in attempts], np.int64)
            rewards = rewards + overlong(replies, self._longest, cache)
        given, turns = by_turn(attempts) if self._reads_turns else (None, None)
        seats, of_seats = by_seat(s.advantage, attempts) if s.advantage in ACROSS_SEATS else (None, None)
        return Scores(
            rewards,
            cohorts=np.array([each.group.id for each in attempts], np.int64),
            lengths=np.array([1 if s.scores else each.learnt for each in attempts], np.int64),
            parts=parts_of(each.end for each in attempts),
            greedy=np.array([baseline(each.group) for each in attempts], np.float64) if s.wants_greedy else None,
            **{"given": given, "turns": turns, "seats": seats, "of_seats": of_seats},
        )

    def _told_apart(self, scores: Scores) -> Array:
        """[n] bool: True if an attempt's reward differs from the first of those it is compared with."""
        if scores.given is not None:
            return np.ones(len(scores.rewards), bool)
        if (seats := scores.of_seats) is not None:
            return np.nanmax(seats, 1) > np.nanmin(seats, 1)
        first, index = np.unique(scores.cohorts, return_index=True, return_inverse=True)[1:]
        columns = [scores.rewards, *(scores.parts.values() if self.settings.advantage == "gdpo" else ())]
        pairs = [(column, column[first[index]]) for column in columns]
        return np.any([(one != other) & ~(np.isnan(one) & np.isnan(other)) for one, other in pairs], axis=0)

    def _preferred(
        self, scores: Scores, siblings: Array, policy: Array, reference: Array | None
    ) -> tuple[Array, Array, Metrics]:
        """(advantages [M], [n] bool: attempts in a pair, metrics) of pairs in each cohort.

        siblings: the attempts' numbers [n], so that ties are always broken in the same way.
        """
        chosen, rejected = pairs_of(scores.rewards, scores.cohorts, siblings)
        sums, lengths = scores.per_attempt(policy), scores.lengths
        pairs = Pairs(sums[chosen], sums[rejected], lengths[chosen], lengths[rejected])
        if reference is not None:
            known = scores.per_attempt(reference)
            pairs = replace(pairs, chosen_reference=known[chosen], rejected_reference=known[rejected])
        found = (PREFERENCES | OF_SCORES)[self._preference](pairs, **self.settings.constants_for("preference"))
        of_attempt = np.zeros(len(lengths))
        # twice, because the mean over pairs is taken as one over the attempts in them
        of_attempt[chosen], of_attempt[rejected] = 2 * found.chosen, 2 * found.rejected
        metrics: Metrics = {"pairs": float(len(chosen))}
        if len(chosen):
            metrics |= {"preference_loss": float(found.loss.mean()), "margin": float(found.margin.mean())}
            metrics["preference_accuracy"] = float((found.margin > 0).mean())
        return scores.spread(of_attempt), np.isin(np.arange(len(of_attempt)), (chosen, rejected)), metrics


@dataclass(frozen=True, slots=True)
class _Known:
    """Numbers for each trained token [M], row after row; None for what was not asked for."""

    behaviour: Array  # as the engine recorded it
    old: Array | None  # p_hat, at the start of the step
    reference: Array | None
    values: Array | None  # the critic's

    @classmethod
    def of(cls, rows: Sequence[Sample], logprobs: Logprobs) -> _Known:
        asked = (flat(rows, logprobs[who]) if who in logprobs else None for who in (POLICY, REFERENCE, CRITIC))
        return cls(flat(rows, [row.logprobs for row in rows]), *asked)

    @property
    def policy(self) -> Array:
        """The policy's logprobs: the trainer's if they were computed, else the engine's."""
        return self.behaviour if self.old is None else self.old

    @property
    def against(self) -> Array | None:
        """log(p_hat / pi_ref)"""
        return None if self.reference is None else self.policy - self.reference


def _minibatches(prompts: Array, count: int) -> Iterator[slice]:
    """Slices of attempts for `count` parts with about equally many groups; no group is divided."""
    starts = np.flatnonzero(np.diff(prompts, prepend=prompts[:1] - 1))  # the first attempt of each group
    firsts = [int(part[0]) for part in np.array_split(starts, min(count, len(starts)))] if len(starts) else [0]
    for first, last in zip(firsts, [*firsts[1:], len(prompts)], strict=True):
        yield slice(first, last)


def _of_values(values: Array, target: Array) -> Metrics:
    """Metrics of a critic: its mean value, and 1 - Var(R - V) / Var(R)."""
    if not len(target):
        return {}
    spread = float(target.var())
    explained = 1 - float((target - values).var()) / spread if spread > 0 else 0.0
    return {"value/mean": float(values.mean()), "value/explained_variance": explained}


def _metrics(groups: Sequence[Group], attempts: Attempts, parts: Mapping[str, Array], flat: int) -> Metrics:
    tried = sum(len(g.ends) for g in groups)
    rewards = np.array([each.end.reward for each in attempts] or [0.0])
    lengths = np.array([each.learnt for each in attempts] or [0])
    metrics = {
        "groups": float(len(groups)),
        "samples": float(len(attempts)),
        "unscored": float(tried - len(attempts)),
        "zero_variance_groups": float(flat),  # groups without a gradient, if the advantage compares attempts
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "completion_tokens": float(lengths.mean()),
        "completion_tokens_max": float(lengths.max()),
        "truncated": sum(each.end.finish in TRUNCATED for each in attempts) / max(len(attempts), 1),
    }
    return metrics | {f"reward/{name}": float(np.nanmean(values)) for name, values in sorted(parts.items())}
