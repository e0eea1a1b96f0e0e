"""Upper bounds on the numbers of a step, computed before anything is run."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.preferences import PREFERENCES
from tidemill.core.import_object import load_object
from tidemill.envs.environment_settings import AnyEnv, GuessSettings, PythonSettings, environments_of
from tidemill.run.planner.memory_model import trainer_lanes
from tidemill.run.planner.plan import RunPlan
from tidemill.run.recipe import RunConfig


@dataclass(frozen=True, slots=True)
class StepSize:
    groups: int
    group_size: int
    sequences: int
    replayed: int  # replayed groups, at most
    updates: int
    replies: int | None  # replies of an attempt, at most; None: the environment decides
    sampled_tokens: int | None  # tokens sampled in a step, at most; None: neither replies nor context are known
    row_tokens: int | None  # tokens computed for the longest row, at most; None: the context is not known
    forward_micro_batches: int  # micro-batches of one forward pass over all rows, at most
    train_micro_batches: int  # micro-batches of all updates, at most
    lanes: int  # parallel micro-batches, at most; they share the token budget of one
    denominator: int | None  # divisor of one update's weighted sum, at most


def step_size(plan: RunPlan, context: int | None) -> StepSize:
    """The numbers of a step. context: tokens that a row may hold, or None if it is not known."""
    config, r, updates = plan.config, plan.config.rollout, first_algorithm(plan.config).updates
    asked_for = [replies_of(each) for each in environments_of(config.env)]
    known = [count for count in asked_for if count is not None]
    replies = max(known) if len(known) == len(asked_for) else None
    most = None if context is None else context - 1  # a prompt has at least one token
    asked = None if config.offline or replies is None else replies * r.max_tokens  # nothing bounds an offline reply
    each = most if asked is None else asked if most is None else min(asked, most)
    groups = -(-(r.groups + plan.replayed) // updates.minibatches)  # groups of the largest update
    rows = groups * r.group_size
    lanes = trainer_lanes(plan)
    together = 1 if most is None else max(1, config.trainer.micro_batch_tokens // lanes // most)  # rows that always fit
    spread = 2 * lanes if lanes > 1 else 0  # more, to spread few rows over all lanes
    parts = min(rows, -(-rows // together) + 1 + 2 * spread)  # rows without a gradient run apart
    return StepSize(
        groups=r.groups,
        group_size=r.group_size,
        sequences=plan.samples,
        replayed=plan.replayed,
        updates=updates.count,
        replies=replies,
        sampled_tokens=0 if config.offline else None if each is None else plan.samples * each,
        row_tokens=most,
        forward_micro_batches=min(plan.step_rows, -(-plan.step_rows // together) + spread),
        train_micro_batches=updates.count * parts,
        lanes=lanes,
        denominator=_denominator(config, groups, each),
    )


def first_algorithm(config: RunConfig) -> AlgorithmSettings:
    """The first algorithm. If there are several, each takes one update a step."""
    return next(iter(config.algorithms.values()))


def replies_of(env: AnyEnv) -> int | None:
    """Replies of one attempt; None if a conversation asks as often as it likes."""
    if isinstance(env, PythonSettings):
        return None if hasattr(load_object(env.paths[0]), "run") else 1  # a reward function is asked about one reply
    return env.turns if isinstance(env, GuessSettings) else 1


def _denominator(config: RunConfig, groups: int, each: int | None) -> int | None:
    s = first_algorithm(config).with_longest(config.rollout.max_tokens)
    rows = groups * (2 if s.preference in PREFERENCES else config.rollout.group_size)  # only a pair of each group is trained
    match s.reduction:
        case "token":
            return None if each is None else rows * each
        case "prompt":
            return groups
        case "fixed":
            assert s.fixed_length is not None
            return rows * s.fixed_length
    return rows
