"""One step of several policies, each trained by the algorithms of its own environments.

A policy is trained as if it were alone: advantages, statistics, drops, denominators, scales and updates are those of its
own groups. Update k of a step holds the samples of every policy that has a k-th one. It has one scale, the greatest of
theirs; what remains of each policy's own becomes a weight of its losses, as in `mixture`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.mixture import algorithm_of, asked_by, check_alike, check_mixture, merged_metrics
from tidemill.algorithms.token_rows import Logprobs
from tidemill.core.types import Group, LossSpec, Metrics, PreparedStep, Sample, Update


class PolicyAlgorithms:
    """An `Algorithm` that gives each environment's groups to the algorithm of its policy."""

    def __init__(
        self,
        by_policy: Mapping[str, Mapping[str, AlgorithmSettings]],
        policy_of: Mapping[str, str],
        max_tokens: int,
    ) -> None:
        """by_policy: of each policy, algorithms by environment. policy_of: by environment.

        Raises ValueError for functions that cannot be loaded.
        """
        self._parts = {policy: algorithm_of(own, max_tokens) for policy, own in by_policy.items()}
        self._policy_of = dict(policy_of)

    @property
    def asks(self) -> tuple[str, ...]:
        return asked_by(self._parts.values())

    @property
    def by_group(self) -> bool:
        """False for several policies: the weight of one's loss depends on the scales of the others."""
        return len(self._parts) == 1 and all(part.by_group for part in self._parts.values())

    def recall(self, recorded: Callable[[int], Metrics], tell: Callable[[str], None] | None = None) -> None:
        """Set the source of earlier steps' metrics, of which each policy is given its own, and what tells the user."""

        def of_policy(policy: str) -> Callable[[int], Metrics]:
            def latest(step: int) -> Metrics:
                """The policy's metrics of its latest step up to this one: not every step has groups of it."""
                for earlier in range(step, -1, -1):
                    if found := _own(policy, recorded(earlier)):
                        return found
                return {}

            return latest

        for policy, part in self._parts.items():
            part.recall(of_policy(policy), tell)

    def drop_reason(self, group: Group) -> str | None:
        return self._parts[self._of(group)].drop_reason(group)

    def rows(self, groups: Sequence[Group], step: int) -> list[Sample]:
        """The rows of each policy, one policy after another. Raises ValueError for one that another policy sampled."""
        rows = list[Sample]()
        for policy, own in self._split(groups).items():
            found = self._parts[policy].rows(own, step)
            if other := next((row for row in found if row.policy != policy), None):
                raise ValueError(
                    f"group {other.group} was sampled by the policy {other.policy!r}, and its environment trains "
                    f"{policy!r}: bring back the recipe as it was, or give another run_dir"
                )
            rows += found
        return rows

    def prepare(self, groups: Sequence[Group], step: int, rows: Sequence[Sample], logprobs: Logprobs) -> PreparedStep:
        found: dict[str, PreparedStep] = {}
        for policy, own in self._split(groups).items():
            part, ids = self._parts[policy], {group.id for group in own}
            where = [i for i, row in enumerate(rows) if row.group in ids]
            known = {who: [logprobs[who][i] for i in where] for who in part.asks}
            found[policy] = part.prepare(own, step, [rows[i] for i in where], known)
        losses, updates = dict[str, LossSpec](), list[Update]()
        for number in range(max(len(prepared.updates) for prepared in found.values())):
            updates.append(_together(found, number, losses))
        samples = updates[0].samples
        if len(updates) > 1:
            samples = [_renamed(sample, policy, 0) for policy, each in found.items() for sample in each.samples]
        return PreparedStep(samples, losses, updates, merged_metrics({name: each.metrics for name, each in found.items()}))

    def _of(self, group: Group) -> str:
        """The policy that a group trains. Raises ValueError for an environment without one."""
        if len(self._parts) == 1:
            return next(iter(self._parts))
        if (policy := self._policy_of.get(group.task.env, "")) not in self._parts:
            raise ValueError(
                f"group {group.id} is of environment {group.task.env!r}, which trains no policy; those that do are "
                f"{', '.join(map(repr, self._policy_of))}: bring back the recipe as it was, or give another run_dir"
            )
        return policy

    def _split(self, groups: Sequence[Group]) -> dict[str, list[Group]]:
        split = {policy: [group for group in groups if self._of(group) == policy] for policy in self._parts}
        return {policy: own for policy, own in split.items() if own}


def algorithm_of_policies(
    by_policy: Mapping[str, Mapping[str, AlgorithmSettings]], policy_of: Mapping[str, str], max_tokens: int
) -> PolicyAlgorithms:
    """The algorithm of a run of several policies: see `PolicyAlgorithms`."""
    return PolicyAlgorithms(by_policy, policy_of, max_tokens)


def check_policies(by_policy: Mapping[str, Mapping[str, AlgorithmSettings]]) -> None:
    """Raise ValueError when the groups of these policies cannot be trained on in one step."""
    for policy, own in by_policy.items():
        check_mixture(own)
        if other := next((env for env in own if env in by_policy and env != policy), None):
            raise ValueError(
                f"environment {other!r} trains the policy {policy!r}, and another policy is called {other!r}: their metrics "
                "would have the same names; rename one of them"
            )
    several = {
        f"the algorithm of policy {policy!r}" + (f" in environment {env!r}" if env else ""): each
        for policy, own in by_policy.items()
        for env, each in own.items()
    }
    check_alike(several)


def _together(found: Mapping[str, PreparedStep], number: int, losses: dict[str, LossSpec]) -> Update:
    """Update `number` of all policies that have one; adds its losses to `losses`."""
    own = {policy: each.updates[number] for policy, each in found.items() if number < len(each.updates)}
    scale, samples = max(update.scale for update in own.values()), list[Sample]()
    for policy, update in own.items():
        share = 1.0 if update.scale == scale else update.scale / scale
        for key, spec in found[policy].losses.items():
            losses[_key(key, policy, number)] = replace(spec, weight=spec.weight * share)
        samples += [_renamed(sample, policy, number) for sample in update.samples]
    return Update(samples, scale)


def _renamed(sample: Sample, policy: str, number: int) -> Sample:
    return replace(sample, loss=_key(sample.loss, policy, number))


def _key(loss: str, policy: str, number: int) -> str:
    """The name of a policy's loss in an update: its weight differs from one update to the next."""
    return f"{policy}/{loss}" + (f"/{number}" if number else "")


def _own(policy: str, metrics: Metrics) -> Metrics:
    """The metrics of one policy among those of a step, by their own names."""
    return {key.removeprefix(f"{policy}/"): value for key, value in metrics.items() if key.startswith(f"{policy}/")}
