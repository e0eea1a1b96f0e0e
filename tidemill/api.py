"""Tidemill from Python: a run in a few lines.

    def score(completion: str, answer: str) -> float:
        return float(completion.strip() == answer)

    tasks = [{"prompt": "2 + 2 =", "answer": "4"}, ...]
    run = tidemill.train(env=score, tasks=tasks, model="path/to/model", run_dir="runs/sums")
    run.report["accuracy_after"]

`run.final` is the trained model's Hugging Face folder. What a recipe can say, keyword arguments can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.config import build
from tidemill.envs.environment import FunctionEnvironment, TaskSource
from tidemill.envs.make import reward_environment
from tidemill.errors import ConfigError
from tidemill.loading import check_not_loading
from tidemill.observability.display import ProgressDisplay
from tidemill.observability.sinks import Callback
from tidemill.protocols import Environment
from tidemill.recipe import RunConfig
from tidemill.run_folder import RunFolder
from tidemill.scoring.pool import WorkerPool
from tidemill.session import Ended, run


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has ended."""

    folder: Path
    steps: int
    complete: bool  # False when it was stopped before its last step; the same call goes on
    report: dict[str, Any]

    @property
    def final(self) -> Path:
        """The trained model, as a Hugging Face folder."""
        return self.folder / "final"


def train(
    env: str | dict[str, Any] | list[dict[str, Any]] | Environment | Callable[..., Any],
    model: str | Path,
    *,
    run_dir: str | Path,
    tasks: TaskSource | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    **settings: Any,
) -> Run:
    """Train `model` on `env` and return what came of it. Goes on when `run_dir` holds a run of the same settings.

    env: what a recipe's `env` may say; an environment; or a reward function, with `tasks` (rows with a "prompt"; a tenth is
    held out). callbacks: called with (step, metrics) after each step. settings: any key of a recipe, tables as
    dictionaries: steps=200, max_lag=2, algorithm="dapo", rollout={"group_size": 16}.
    Raises ConfigError when the settings, the model or the environment are not usable.
    """
    check_not_loading("tidemill.train() is called")
    by_name = isinstance(env, str | dict | list)
    if by_name and tasks is not None:
        raise ConfigError("tasks belong to a reward function or an @environment given as an object; `env` here is a name")
    written = env if by_name else {"kind": "python", "path": f"{_name(env)}:{_name(env)}"}
    config = build(RunConfig, {"env": written, "model": str(model), "run_dir": str(run_dir), **settings})
    display = ProgressDisplay(config.steps, mode="quiet" if quiet else "auto")
    ended = _to_the_end(run(config, display, callbacks, None if by_name else _maker(env, tasks)))
    return Run(RunFolder(config.run_dir).path, ended.steps, ended.complete, ended.report)


def _to_the_end(running: Coroutine[Any, Any, Ended]) -> Ended:
    """Run it here; where a loop runs already, as in a notebook, in a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(running)
    with ThreadPoolExecutor(1) as thread:  # bounded: it is the run itself
        return thread.submit(asyncio.run, running).result()  # bounded: as above, the run itself


def _maker(env: Any, tasks: TaskSource | None) -> Callable[[WorkerPool], Environment]:
    if isinstance(env, FunctionEnvironment):
        return lambda scorer: env if tasks is None else env.with_tasks(tasks)
    if isinstance(env, Environment):
        if tasks is not None:
            raise ConfigError(f"environment {env.name!r} brings its own tasks: leave `tasks` out")
        return lambda scorer: env
    if not callable(env):
        raise ConfigError(f"env is a {type(env).__name__}: expected a name, an environment or a reward function")
    if tasks is None:
        raise ConfigError(f"reward function {_name(env)!r} needs tasks: give tasks=[{{'prompt': ..., 'answer': ...}}, ...]")
    return lambda scorer: reward_environment(env, tasks, scorer)


def _name(env: Any) -> str:
    return env.name if isinstance(env, Environment) else getattr(env, "__name__", type(env).__name__)
