"""Builds environments from settings, and checks all that can be checked before a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidemill.core.errors import ConfigError
from tidemill.core.import_object import load_object
from tidemill.core.interfaces import Environment
from tidemill.envs.agent_environment import AgentEnvironment
from tidemill.envs.environment import FunctionEnvironment, SingleTurn
from tidemill.envs.environment_mixture import Several
from tidemill.envs.environment_settings import (
    AgentSettings,
    AnyEnv,
    GuessSettings,
    PythonSettings,
    ReasoningGymSettings,
    RowsSettings,
)
from tidemill.envs.guess import guess_game
from tidemill.envs.python_tasks import TaskSource, splits_of
from tidemill.envs.reasoning_gym import reasoning_gym
from tidemill.envs.reward_list import Reward, judge_of
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.envs.task_files import row_splits, rows
from tidemill.envs.tasks import check_splits, columns_of


def make_environment(settings: AnyEnv | tuple[AnyEnv, ...], pool: RewardPool) -> Environment:
    """The environment that `settings` describe. Raises ConfigError when something in it cannot be used."""
    match settings:
        case tuple():
            parts = {each.name: make_environment(each, pool) for each in settings}
            return Several(parts, {each.name: each.weight for each in settings})
        case ReasoningGymSettings():
            return reasoning_gym(settings, pool)
        case RowsSettings():
            return rows(settings, pool)
        case GuessSettings():
            return _checked(guess_game(settings))
        case PythonSettings():
            return _from_file(settings, pool)
        case AgentSettings():
            return AgentEnvironment(settings, pool)


def reward_environment(
    reward: Reward | Sequence[Reward],
    tasks: TaskSource,
    pool: RewardPool,
    *,
    name: str = "",
    share: float = 0.1,
    weights: Sequence[float] = (),
    source: Path | None = None,
) -> SingleTurn:
    """A single-turn environment from tasks and a reward function, or several with weights.

    source: a folder to which the source of a function without a file may be written, for the reward workers.
    """
    judge = judge_of(reward, pool, weights=weights, source=source)
    splits = splits_of(tasks, name or judge.name, share)
    made = SingleTurn(name or judge.name, splits, judge)
    judge.check(columns_of([*splits["train"], *splits["eval"]]))
    return made


def _from_file(settings: PythonSettings, pool: RewardPool) -> Environment:
    """The environment in a user's file: an environment object, or reward functions with tasks."""
    rows_of = RowsSettings(**settings.model_dump(include={"data", "eval_data", "eval_share"})) if settings.data else None
    tasks = row_splits(rows_of).__getitem__ if rows_of else None
    objects = [load_object(path) for path in settings.paths]
    found, path = objects[0], settings.paths[0]
    if isinstance(settings.path, str) and isinstance(found, FunctionEnvironment):
        return _checked(found.with_tasks(tasks) if tasks else found)
    if isinstance(settings.path, str) and _is_environment(found):
        if tasks:
            raise ConfigError(f"env.data = {settings.data!r}, but {path} is an environment with tasks of its own")
        return _checked(found)
    expected = "an environment or a reward function" if isinstance(settings.path, str) else "a reward function"
    for each, where in zip(objects, settings.paths, strict=True):
        if not callable(each) or isinstance(each, type):
            raise ConfigError(f"{where!r} is a {type(each).__name__}: expected {expected}")
    place = path.rpartition(":")[0]
    return reward_environment(
        settings.path,
        tasks or _tasks_beside(settings.paths),
        pool,
        name=Path(place).stem if place.endswith(".py") else place.rpartition(".")[2],
        share=settings.eval_share,
        weights=settings.reward_weights,
    )


def _tasks_beside(paths: Sequence[str]) -> TaskSource:
    for path in paths:
        try:
            return load_object(f"{path.rpartition(':')[0]}:tasks")
        except ConfigError:
            continue
    raise ConfigError(
        f"{paths[0]!r} is a reward function without tasks: give env.data, or define `tasks` in its file "
        "(a list of rows, or a function of the split)"
    )


def _is_environment(found: Any) -> bool:
    parts = ("tasks", "run", "judge", "close")
    return not isinstance(found, type) and hasattr(found, "name") and all(callable(getattr(found, p, None)) for p in parts)


def _checked(env: Environment) -> Environment:
    check_splits(env.name, {split: env.tasks(split) for split in ("train", "eval")})
    return env
