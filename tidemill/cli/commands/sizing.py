"""What a recipe comes to before anything is run: the numbers of a step. They are bounds that hold."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.preferences import PREFERENCES
from tidemill.core.import_object import load_object
from tidemill.envs.environment_settings import AnyEnv, GuessSettings, PythonSettings, environments_of
from tidemill.run.planner.memory_model import step_rows, trainer_lanes
from tidemill.run.recipe import RunConfig


@dataclass(frozen=True, slots=True)
class StepSize:
    groups: int
    group_size: int
    sequences: int
    replayed: int  # groups of earlier steps that are trained once more, at most
    updates: int
    replies: int | None  # of an attempt, at most; None: the environment decides
    sampled_tokens: int | None  # at most; None: neither replies nor context are known
    row_tokens: int | None  # run for the longest row, at most; None: the context is not known
    forward_micro_batches: int  # of one forward pass over all rows, at most
    train_micro_batches: int  # of all updates, at most
    lanes: int  # micro-batches that run at a time, at most: they share the tokens of one
    denominator: int | None  # of one update, at most: what the sum of weighted terms is divided by


def step_size(config: RunConfig, context: int | None) -> StepSize:
    """context: tokens that a row may hold, None while the model is not known."""
    r, updates = config.rollout, first_algorithm(config).updates
    sequences, asked_for = r.groups * r.group_size, [replies_of(each) for each in environments_of(config.env)]
    known = [count for count in asked_for if count is not None]
    replies = max(known) if len(known) == len(asked_for) else None
    most = None if context is None else context - 1  # a prompt has a token at least
    given = bool(config.given)
    asked = None if given or replies is None else replies * r.max_tokens  # nothing bounds what a task gives
    each = most if asked is None else asked if most is None else min(asked, most)
    groups = -(-(r.groups + config.replayed) // updates.minibatches)  # of the largest update
    rows = groups * r.group_size
    lanes = trainer_lanes(config)
    together = 1 if most is None else max(1, config.trainer.micro_batch_tokens // lanes // most)  # rows that fit in any case
    spread = 2 * lanes if lanes > 1 else 0  # of few rows over all lanes: any two in a row are more than one holds
    parts = min(rows, -(-rows // together) + 1 + 2 * spread)  # those that have no gradient are run apart
    return StepSize(
        groups=r.groups,
        group_size=r.group_size,
        sequences=sequences,
        replayed=config.replayed,
        updates=updates.count,
        replies=replies,
        sampled_tokens=0 if given else None if each is None else sequences * each,
        row_tokens=most,
        forward_micro_batches=min(step_rows(config), -(-step_rows(config) // together) + spread),
        train_micro_batches=updates.count * parts,
        lanes=lanes,
        denominator=_denominator(config, groups, each),
    )


def first_algorithm(config: RunConfig) -> AlgorithmSettings:
    """The recipe's, where not every environment has its own; of several, each takes one update a step."""
    return next(iter(config.algorithms.values()))


def replies_of(env: AnyEnv) -> int | None:
    """A conversation asks as often as it likes. Raises ConfigError when the user's file does not load."""
    if isinstance(env, PythonSettings):
        return None if hasattr(load_object(env.paths[0]), "run") else 1  # a reward function is asked about one reply
    return env.turns if isinstance(env, GuessSettings) else 1


def _denominator(config: RunConfig, groups: int, each: int | None) -> int | None:
    s = first_algorithm(config).with_longest(config.rollout.max_tokens)
    rows = groups * (2 if s.preference in PREFERENCES else config.rollout.group_size)  # a pair is all that trains of a group
    match s.reduction:
        case "token":
            return None if each is None else rows * each
        case "prompt":
            return groups
        case "fixed":
            assert s.fixed_length is not None
            return rows * s.fixed_length
    return rows
