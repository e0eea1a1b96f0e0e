"""The Python interface: `tidemill.train` starts a run from a script or a notebook.

run = tidemill.train(env=score, tasks=[{"prompt": "2 + 2 =", "answer": "4"}], model="path/to/model", run_dir="runs/sums")
run                                                      # its results in a few lines
run.report["accuracy_after"]
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.core.config import build
from tidemill.core.errors import ConfigError
from tidemill.core.import_object import check_not_loading
from tidemill.core.interfaces import Environment
from tidemill.envs.build_environment import reward_environment
from tidemill.envs.environment import FunctionEnvironment
from tidemill.envs.python_tasks import TaskSource
from tidemill.envs.rewards.signature import name_of
from tidemill.observability.console import ProgressDisplay
from tidemill.observability.sinks import Callback
from tidemill.run.recipe import RunConfig
from tidemill.run.report import in_lines
from tidemill.run.session import EnvironmentMaker, RunEnded, run
from tidemill.run.storage.run_folder import RunFolder

Reward = str | Callable[..., Any]
LOOK_S = 0.2  # between two looks for a signal while a run goes on in another thread
CALLED_ELSEWHERE = {
    "reward_funcs": "env=[f, g], with reward_weights=[...]",
    "train_dataset": "tasks=dataset, or a table with the splits train and eval",
    "eval_dataset": 'tasks={"train": dataset, "eval": held_out}',
    "args": "settings as keywords: steps=200, trainer={'lr': 1e-6}",
    "output_dir": "run_dir",
    "processing_class": "read from the model's folder",
}  # keywords of TRL's trainers: see docs/from_trl.md


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has ended. Printing it shows its results; `report` has every figure."""

    folder: Path
    steps: int
    complete: bool  # False when it was stopped before its last step; the same call resumes it
    report: dict[str, Any]

    @property
    def final(self) -> Path:
        """The trained model, as a Hugging Face folder; with several policies a folder that holds one of each."""
        return self.folder / "final"

    def __repr__(self) -> str:
        return "\n".join(in_lines(self.report, self.folder, self.complete))


def train(
    env: str | dict[str, Any] | list[dict[str, Any]] | Environment | Reward | Sequence[Reward] | None = None,
    model: str | Path = "",
    *,
    run_dir: str | Path = "",
    tasks: TaskSource | None = None,
    reward_weights: Sequence[float] = (),
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    **settings: Any,
) -> Run:
    """Train `model` on `env` and return the result. Resumes if `run_dir` holds the same run.

    env: a value that a recipe's `env` may have; an environment; or a reward function, or a list of them, with `tasks`.
    tasks: rows with a "prompt", or a `datasets.Dataset`, of which a tenth is held out; or a table of both splits (train;
    eval or test). reward_weights: weights of a list of reward functions, 1 each by default; the reward is the weighted sum,
    as with TRL's reward_funcs. callbacks: called with (step, metrics) after each step. settings: any key of a recipe,
    tables as dictionaries: steps=200, max_lag=2, algorithm="dapo", rollout={"group_size": 16}. Raises ConfigError when the
    settings, the model or the environment are not usable.
    """
    check_not_loading("tidemill.train() is called")
    if theirs := [key for key in settings if key in CALLED_ELSEWHERE]:
        raise ConfigError(f"unknown key {theirs[0]!r}; here it is {CALLED_ELSEWHERE[theirs[0]]}")
    if missing := [key for key, given in (("env", env), ("model", model), ("run_dir", run_dir)) if given in (None, "")]:
        raise ConfigError(f"tidemill.train() needs {missing[0]}: expected train(env=..., model=..., run_dir=..., ...)")
    written, make = _environment(env, tasks, reward_weights)
    config = build(RunConfig, {"env": written, "model": str(model), "run_dir": str(run_dir), **settings})
    display = ProgressDisplay(config.steps, mode="quiet" if quiet else "auto")
    ended = _to_the_end(run(config, display, callbacks, make))
    return Run(RunFolder(config.run_dir).path, ended.steps, ended.complete, ended.report)


def _to_the_end(running: Coroutine[Any, Any, RunEnded]) -> RunEnded:
    """Run a coroutine to its end, in a new thread if an event loop runs here, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        here = True
    else:
        here = False
    return asyncio.run(running) if here else _in_a_thread(running)  # outside of the handler


def _in_a_thread(running: Coroutine[Any, Any, RunEnded]) -> RunEnded:
    """Run a coroutine in a thread. An interrupt of the wait, such as a notebook's button, stops it."""
    stop = list[Callable[[], object]]()

    async def tracked() -> RunEnded:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        stop.append(lambda: loop.call_soon_threadsafe(task.cancel))
        return await running  # bounded: it is the run itself

    with ThreadPoolExecutor(1, "tidemill.train") as pool:  # bounded: the run ends its processes within their deadlines
        ended = pool.submit(asyncio.run, tracked())
        try:
            while not ended.done():
                wait([ended], LOOK_S)
        except BaseException:
            for cancel in stop:
                cancel()
            raise
    return ended.result(timeout=0)


def _environment(
    env: Any, tasks: TaskSource | None, weights: Sequence[float]
) -> tuple[str | dict[str, Any] | list[Any], EnvironmentMaker | None]:
    """The recipe's `env`, and the maker of the environment if it comes from Python objects."""
    several = isinstance(env, list | tuple) and bool(env) and (tasks is not None or any(callable(each) for each in env))
    if weights and not several:
        raise ConfigError("reward_weights are of a list of reward functions: give env=[f, g]")
    if several:
        rewards = list(env)
        if wrong := [
            each for each in rewards if isinstance(each, Environment) or not (callable(each) or isinstance(each, str))
        ]:
            raise ConfigError(f"env is a list with a {type(wrong[0]).__name__}: expected reward functions, or names of them")
        paths = [each if isinstance(each, str) else f"{name_of(each)}:{name_of(each)}" for each in rewards]
        written = {"kind": "python", "path": paths, "reward_weights": [float(weight) for weight in weights]}
        return written, _of_rewards(rewards, tasks, ", ".join(paths), weights)
    if isinstance(env, str | dict | list | tuple):
        if tasks is not None:
            raise ConfigError(
                "tasks belong to a reward function or an @environment given as an object; `env` here is a name"
            )
        return list(env) if isinstance(env, tuple) else env, None
    name = env.name if isinstance(env, Environment) else name_of(env)
    return {"kind": "python", "path": f"{name}:{name}"}, _of_object(env, tasks)


def _of_object(env: Any, tasks: TaskSource | None) -> EnvironmentMaker:
    if isinstance(env, FunctionEnvironment):
        return lambda scorer, source: env if tasks is None else env.with_tasks(tasks)
    if isinstance(env, Environment):
        if tasks is not None:
            raise ConfigError(f"environment {env.name!r} brings its own tasks: leave `tasks` out")
        return lambda scorer, source: env
    if not callable(env):
        raise ConfigError(f"env is a {type(env).__name__}: expected a name, an environment or a reward function")
    return _of_rewards(env, tasks, name_of(env), ())


def _of_rewards(
    rewards: Reward | list[Reward], tasks: TaskSource | None, names: str, weights: Sequence[float]
) -> EnvironmentMaker:
    if tasks is None:
        raise ConfigError(f"reward function {names!r} needs tasks: give tasks=[{{'prompt': ..., 'answer': ...}}, ...]")
    return lambda scorer, source: reward_environment(rewards, tasks, scorer, weights=weights, source=source)
