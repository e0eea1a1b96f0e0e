"""Parts of commands that judge: recipe, environment, scoring workers, a log of warnings."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from pathlib import Path

from tidemill.cli.commands.screen import console
from tidemill.core.errors import ConfigError
from tidemill.core.interfaces import Environment
from tidemill.envs.environment_settings import AnyEnv, PythonSettings, environments_of
from tidemill.envs.episode_workers import in_workers
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.observability.safe_text import visible
from tidemill.run.recipe import RunConfig, load_recipe
from tidemill.run.recipe_files import found
from tidemill.run.roles import budget_of
from tidemill.run.storage.run_folder import RunFolder
from tidemill.runtime.process_logs import warnings_to


@contextmanager
def working(command: str, text: str, as_json: bool, logs: Path | None = None) -> Iterator[None]:
    """Show `text` on a terminal while the body runs. Tracebacks of warnings go to a file in `logs`.

    If that is not writable they go to a temporary folder. Standard error names the file.
    """
    own = logs is None or not _writable(logs)
    place = Path(tempfile.mkdtemp(prefix=f"tidemill-{command}-")) if own or logs is None else logs
    screen = console(stderr=True)
    try:
        with (
            screen.status(f"{text} ...") if screen.is_terminal and not as_json else nullcontext(),
            warnings_to(place / f"{command}-warnings.log", _tell),
        ):
            yield
    finally:
        if own:
            with suppress(OSError):  # not empty: it holds a log
                place.rmdir()


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK)


def _tell(path: Path) -> None:
    print(visible(f"an attempt failed in its environment's code: the tracebacks go to {path}"), file=sys.stderr, flush=True)


@asynccontextmanager
async def scoring_workers(config: RunConfig) -> AsyncIterator[RewardPool]:
    scorer = RewardPool(**config.scoring.workers_as())
    try:
        yield scorer
    finally:
        await scorer.close()


@asynccontextmanager
async def in_its_workers(
    config: RunConfig, environment: Environment, written: AnyEnv | tuple[AnyEnv, ...]
) -> AsyncIterator[Environment]:
    """The environment, made of `written`, with its user code in workers."""
    spend = budget_of(config.supervise).spend
    environment = in_workers(environment, config.placement.environment, spend, _note, written)
    try:
        yield environment
    finally:
        await environment.close()


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def recipe_of(folder: RunFolder, overrides: Sequence[str] = ()) -> RunConfig:
    """The recipe of a run, with its files where they are, looked for beside the run."""
    return found(load_recipe([], overrides, folder.recipe()), [folder.path.parent, folder.path.parent.parent])


def with_sources(config: RunConfig, folder: RunFolder) -> RunConfig:
    """The recipe, with the recorded source of an environment that came from Python."""
    env = config.env
    names = [name for each in environments_of(env) if isinstance(each, PythonSettings) for name in _objects(each)]
    if not names:
        return config
    file = folder.source / f"environment_{names[0]}.py"
    if isinstance(env, PythonSettings) and file.is_file():
        return config.model_copy(update={"env": env.model_copy(update={"path": f"{file.resolve()}:{names[0]}"})})
    rewards = [f"{path.resolve()}:{name}" for name in names if (path := folder.source / f"reward_{name}.py").is_file()]
    path = ", ".join(f'"{reward}"' for reward in rewards)
    give = f'env=\'{{kind = "python", path = [{path}], data = "ROWS.jsonl", eval_data = "HELD_OUT.jsonl"}}\''
    what, give = ("tasks", give) if rewards else ("an environment", "env=FILE.py:NAME")
    raise ConfigError(f"{folder.path} was trained on {what} given as a Python object, in no file: give {give}")


def _objects(env: PythonSettings) -> list[str]:
    """The names of environments and rewards that were given as Python objects, not by file."""
    return [name for name, _, same in (path.partition(":") for path in env.paths) if name == same]
