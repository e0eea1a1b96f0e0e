"""From settings to an environment, with everything checked that can be checked before a run starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tidemill.envs.environment import FunctionEnvironment, SingleTurn, TaskSource, splits_of
from tidemill.envs.guess import guess_game
from tidemill.envs.judge import RewardJudge, Scorer
from tidemill.envs.reasoning_gym import reasoning_gym
from tidemill.envs.rows import row_splits, rows
from tidemill.envs.settings import AnyEnv, GuessSettings, PythonSettings, ReasoningGymSettings, RowsSettings
from tidemill.envs.several import Several
from tidemill.envs.tasks import check_splits, columns_of
from tidemill.errors import ConfigError
from tidemill.loading import load_object
from tidemill.protocols import Environment


def make_environment(settings: AnyEnv | tuple[AnyEnv, ...], scorer: Scorer) -> Environment:
    """The environment that `settings` describe; `scorer` runs its reward functions. Raises ConfigError in one sentence."""
    match settings:
        case tuple():
            parts = {each.name: make_environment(each, scorer) for each in settings}
            return Several(parts, {each.name: each.weight for each in settings})
        case ReasoningGymSettings():
            return reasoning_gym(settings, scorer)
        case RowsSettings():
            return rows(settings, scorer)
        case GuessSettings():
            return _checked(guess_game(settings))
        case PythonSettings():
            return _from_file(settings, scorer)


def reward_environment(
    reward: str | Callable[..., Any], tasks: TaskSource, scorer: Scorer, *, name: str = "", share: float = 0.1
) -> SingleTurn:
    """A single-turn environment of a reward function and tasks: what `tidemill.train(env=FUNCTION, tasks=...)` makes."""
    judge = RewardJudge(reward, scorer)
    name = name or judge.signature.name
    splits = splits_of(tasks, name, share)
    check_splits(name, splits, prompts_apart=True)
    judge.check(columns_of([*splits["train"], *splits["eval"]]))
    return SingleTurn(name, splits, judge)


def _from_file(settings: PythonSettings, scorer: Scorer) -> Environment:
    """An environment object, or a reward function whose tasks are rows or come from `tasks` in the same file."""
    found = load_object(settings.path)
    tasks = row_splits(settings).__getitem__ if settings.data else None
    if isinstance(found, FunctionEnvironment):
        return _checked(found.with_tasks(tasks) if tasks else found)
    if _is_environment(found):
        if tasks:
            raise ConfigError(f"env.data = {settings.data!r}, but {settings.path} is an environment with tasks of its own")
        return _checked(found)
    if not callable(found) or isinstance(found, type):
        raise ConfigError(f"{settings.path!r} is a {type(found).__name__}: expected an environment or a reward function")
    if tasks is None:
        tasks = _tasks_beside(settings.path)
    return reward_environment(
        settings.path, tasks, scorer, name=Path(settings.path.rpartition(":")[0]).stem, share=settings.eval_share
    )


def _tasks_beside(path: str) -> TaskSource:
    try:
        return load_object(f"{path.rpartition(':')[0]}:tasks")
    except ConfigError:
        raise ConfigError(
            f"{path!r} is a reward function without tasks: give env.data, or define `tasks` in its file "
            "(a list of rows, or a function of the split)"
        ) from None


def _is_environment(found: Any) -> bool:
    parts = ("tasks", "run", "judge", "close")
    return not isinstance(found, type) and hasattr(found, "name") and all(callable(getattr(found, p, None)) for p in parts)


def _checked(env: Environment) -> Environment:
    check_splits(env.name, {split: env.tasks(split) for split in ("train", "eval")})
    return env
