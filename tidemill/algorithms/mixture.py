"""One step over several environments, each with its own algorithm.

An algorithm contributes the gradient that it would compute from its groups alone, times its share of the step's groups:

    gradient = sum over algorithms a of groups_a / groups * scale_a * sum over a's samples i of weight_i * sum_t grad term_it

The step has one scale, the greatest of groups_a / groups * scale_a. The remaining factors become weights of the
algorithms' losses, float64 numbers beside the samples, so that the samples' own weights are not rounded again (I6).
Advantages, statistics, drops and denominators never cross from one algorithm's groups to another's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.prepare_step import ConfiguredAlgorithm
from tidemill.algorithms.token_rows import CRITIC, POLICY, REFERENCE, Logprobs
from tidemill.core.types import Group, Metrics, PreparedStep, Sample, Update

COMMON = ""  # the name of the recipe's own algorithm, for groups whose environment has none
ADDED = frozenset({"groups", "samples", "unscored", "zero_variance_groups", "pairs"})  # metrics; others are means


class Mixture:
    """An `Algorithm` that gives each environment's groups to that environment's algorithm."""

    def __init__(self, algorithms: Mapping[str, AlgorithmSettings], max_tokens: int) -> None:
        """algorithms: by environment. Raises ValueError for functions that do not load."""
        self._parts = {name: ConfiguredAlgorithm(settings, max_tokens) for name, settings in algorithms.items()}

    @property
    def asks(self) -> tuple[str, ...]:
        return asked_by(self._parts.values())

    @property
    def by_group(self) -> bool:
        """Always False: the weight of an algorithm's loss depends on its share of the step."""
        return False

    def recall(self, recorded: Callable[[int], Metrics], tell: Callable[[str], None] | None = None) -> None:
        """Pass on `tell`: `check_mixture` refuses algorithms whose steps depend on earlier ones."""
        for part in self._parts.values():
            part.recall(recorded, tell)

    def drop_reason(self, group: Group) -> str | None:
        return self._parts[self._of(group)].drop_reason(group)

    def rows(self, groups: Sequence[Group], step: int) -> list[Sample]:
        return [row for name, own in self._split(groups).items() for row in self._parts[name].rows(own, step)]

    def prepare(self, groups: Sequence[Group], step: int, rows: Sequence[Sample], logprobs: Logprobs) -> PreparedStep:
        found: dict[str, PreparedStep] = {}
        factors: dict[str, float] = {}
        for name, own in self._split(groups).items():
            part, ids = self._parts[name], {group.id for group in own}
            where = [i for i, row in enumerate(rows) if row.group in ids]
            known = {who: [logprobs[who][i] for i in where] for who in part.asks}
            found[name] = part.prepare(own, step, [rows[i] for i in where], known)
            (update,) = found[name].updates
            factors[name] = len(own) / len(groups) * update.scale
        scale = max(factors.values())
        samples, losses = list[Sample](), {}
        for name, prepared in found.items():
            spec, key = prepared.losses[POLICY], f"{POLICY}/{name}" if name else POLICY
            losses[key] = replace(spec, weight=spec.weight * factors[name] / scale if scale else 0.0)
            samples += [replace(sample, loss=key) for sample in prepared.samples]
        metrics = merged_metrics({name: prepared.metrics for name, prepared in found.items()})
        return PreparedStep(samples, losses, [Update(samples, scale)], metrics)

    def _of(self, group: Group) -> str:
        return group.task.env if group.task.env in self._parts else COMMON

    def _split(self, groups: Sequence[Group]) -> dict[str, list[Group]]:
        split = {name: [group for group in groups if self._of(group) == name] for name in self._parts}
        return {name: own for name, own in split.items() if own}


def asked_by(parts: Iterable[ConfiguredAlgorithm | Mixture]) -> tuple[str, ...]:
    """The models whose logprobs or values any of these algorithms asks for, in one fixed order."""
    wanted = {who for part in parts for who in part.asks}
    return tuple(who for who in (POLICY, REFERENCE, CRITIC) if who in wanted)


def algorithm_of(algorithms: Mapping[str, AlgorithmSettings], max_tokens: int) -> ConfiguredAlgorithm | Mixture:
    """The algorithm of a run, or of one of its policies, by environment. ValueError for functions that cannot be loaded."""
    if len(algorithms) == 1:  # whatever it is called: the tasks of a lone environment do not name it
        (only,) = algorithms.values()
        return ConfiguredAlgorithm(only, max_tokens)
    return Mixture(algorithms, max_tokens)


def check_mixture(algorithms: Mapping[str, AlgorithmSettings]) -> None:
    """Raise ValueError when the groups of these algorithms cannot be trained on in one step."""
    if len(algorithms) < 2:
        return
    for name, each in algorithms.items():
        if each.updates.count > 1:
            raise ValueError(
                f"{_called(name)} takes {each.updates.count} updates a step: environments with different algorithms share "
                "one update; set updates to 1 there, or give all environments the same algorithm"
            )
        if each.given or each.entropy.target is not None:
            what = f"given = {each.given!r}" if each.given else "entropy.target"
            raise ValueError(f"{_called(name)} has {what}, which goes with no other algorithm beside it in one run")
    check_alike({_called(name): each for name, each in algorithms.items()})


def check_alike(algorithms: Mapping[str, AlgorithmSettings]) -> None:
    """Raise ValueError when these algorithms ask for different things of which a run has one. Keys: named to the user."""
    _expect_alike(algorithms, "another reference policy", "the trainer holds one", _reference)
    _expect_alike(algorithms, "another critic", "the trainer holds one", lambda each: each.critic)
    greedy = "a greedy attempt at each task, or none"
    _expect_alike(algorithms, greedy, "what is sampled does not differ between them", lambda each: each.wants_greedy)


def _expect_alike(
    algorithms: Mapping[str, AlgorithmSettings], what: str, why: str, asked: Callable[[AlgorithmSettings], Any]
) -> None:
    """Raise ValueError unless all algorithms that ask for something (not None) ask for the same."""
    wants = {name: want for name, each in algorithms.items() if (want := asked(each)) is not None}
    first = next(iter(wants), "")
    if other := [name for name, want in wants.items() if want != wants[first]]:
        raise ValueError(f"{other[0]} asks for {what}, unlike {first}: {why}; give both the same")


def _reference(settings: AlgorithmSettings) -> tuple[str, int, float] | None:
    reference = settings.reference
    return None if reference is None else (reference.model, reference.every, reference.decay)


def _called(name: str) -> str:
    return f"the algorithm of environment {name!r}" if name else "the recipe's algorithm"


def merged_metrics(parts: Mapping[str, Metrics]) -> Metrics:
    """Metrics of the step: sums, and means by samples; then those of each part, as PART/KEY."""
    merged = Metrics()
    for key in dict.fromkeys(key for each in parts.values() for key in each):
        having = [each for each in parts.values() if key in each]
        values, samples = [each[key] for each in having], [each["samples"] for each in having]
        if key in ADDED:
            merged[key] = sum(values)
        elif key.endswith("_max"):
            merged[key] = max(values)
        else:
            merged[key] = float(np.average(values, weights=samples)) if any(samples) else float(np.mean(values))
    own = {f"{name}/{key}": value for name, each in parts.items() if name for key, value in each.items()}
    return merged | own
