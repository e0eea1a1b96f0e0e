"""`tidemill eval`: greedy accuracy on held-out tasks, of a run's model or of any model folder.

For a run everything but the weights is the run's own: tasks, context, reply length, engine. So `final` gives the figure
that its report calls accuracy_after, and `initial` gives accuracy_before.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any, Literal

from rich.text import Text

from tidemill.build import start_engine
from tidemill.commands.machine import usable_cores
from tidemill.commands.screen import console, labelled, print_json
from tidemill.config import ConfigError
from tidemill.envs.make import make_environment
from tidemill.envs.settings import PythonSettings
from tidemill.envs.template import check_prompts
from tidemill.evaluation import Evaluator
from tidemill.model_folder import ModelFolder
from tidemill.pool import EnginePool
from tidemill.recipe import RunConfig, load_recipe
from tidemill.run_folder import RunFolder, read_json
from tidemill.scoring.pool import WorkerPool
from tidemill.session import context_of, make_episodes
from tidemill.types import Metrics

Which = Literal["final", "initial"]
Z95 = 1.959964  # of the normal distribution, two-sided


@dataclass(frozen=True, slots=True)
class Subject:
    """What is evaluated, under which settings, on how many tasks."""

    model: Path
    config: RunConfig
    tasks: int
    recorded: float | None = None  # what the run's own report says of the same evaluation


def evaluate(
    target: Path, recipe: Path | None, tasks: int | None, which: Which | None, overrides: Sequence[str], as_json: bool
) -> int:
    subject = find_subject(target, recipe, tasks, which, overrides)
    screen = console(stderr=True)
    busy = screen.status(f"{subject.model}: greedy, {subject.tasks:,} held-out tasks ...")
    begin = time.monotonic()
    with busy if screen.is_terminal and not as_json else nullcontext():
        name, results = asyncio.run(_run(subject))
    if as_json:
        print_json({"model": str(subject.model), "environment": name, **as_figures(results), "recorded": subject.recorded})
    else:
        _show(subject, name, results, time.monotonic() - begin)
    return 0


def find_subject(
    target: Path, recipe: Path | None, tasks: int | None, which: Which | None, overrides: Sequence[str]
) -> Subject:
    """Whether `target` is a run or a model, and what follows from that. Raises ConfigError in one sentence."""
    if tasks is not None and tasks < 1:
        raise ConfigError(f"--tasks {tasks}: expected how many to evaluate on, at least 1")
    if not target.is_dir():
        raise ConfigError(f"{target} does not exist: give the folder of a run, or a Hugging Face model folder")
    facts = read_json(target / "config.json") if (target / "config.json").is_file() else {}
    if "run_dir" in facts:
        if recipe is not None:
            raise ConfigError(
                f"{target} is a run, which is evaluated by its own recipe: leave out --recipe, or give a model"
            )
        return _of_run(RunFolder(target), facts, tasks, which or "final", overrides)
    if "model_type" not in facts:
        raise ConfigError(f"{target} is neither a run nor a model: there is no config.json of either in it")
    if which is not None:
        raise ConfigError(f"--which {which} is for runs, and {target} is a model")
    if recipe is None and not any(o.lstrip("-").partition("=")[0].partition(".")[0] == "env" for o in overrides):
        raise ConfigError(f"{target} is a model: say what to evaluate it on, with --recipe FILE or env=...")
    base = {"run_dir": str(target), "model": str(target)}
    config = load_recipe([recipe] if recipe else [], [*overrides, f"model={target}"], base)
    return Subject(target, config, tasks or config.eval.final_tasks)


def _of_run(folder: RunFolder, facts: dict[str, Any], tasks: int | None, which: Which, overrides: Sequence[str]) -> Subject:
    config = load_recipe([], overrides, facts)
    model = folder.final if which == "final" else folder.initial
    if not model.is_dir():
        when = "its last step" if which == "final" else "its warm-up"
        other = "; its initial/ can be evaluated with --which initial" if folder.initial.is_dir() else ""
        raise ConfigError(f"{folder.path} has no {which}/ yet: it appears after {when}{other}")
    env = config.env
    if (
        isinstance(env, PythonSettings)
        and not env.path.partition(":")[0].endswith(".py")
        and len({*env.path.split(":")}) == 1
    ):
        raise ConfigError(
            f"{folder.path} was trained on an environment given as a Python object, which no file names: say env=FILE.py:NAME"
        )
    subject = Subject(model, config, tasks or config.eval.final_tasks)
    report = folder.summary()
    if report is None or overrides or report["held_out"] is None or report["held_out"] > subject.tasks:
        return subject
    return Subject(model, config, subject.tasks, report["accuracy_after" if which == "final" else "accuracy_before"])


async def _run(subject: Subject) -> tuple[str, Metrics]:
    config = subject.config
    scorer = WorkerPool(**config.scoring.model_dump())
    try:
        environment = make_environment(config.env, scorer)
        try:
            model = ModelFolder.open(subject.model)
            tasks = environment.tasks("eval")[: subject.tasks]
            check_prompts(tasks, model.tokenizer, context_of(config, model))
            with tempfile.TemporaryDirectory(prefix="tidemill-eval-") as logs:
                parts = (config.placement, config.engine, model.path, Path(logs), usable_cores())
                async with start_engine(*parts) as engine:
                    evaluator = Evaluator(EnginePool([engine]), make_episodes(config, environment, model), config.seed)
                    return environment.name, await evaluator(tasks)
        finally:
            await environment.close()
    finally:
        await scorer.close()


def as_figures(results: Metrics) -> dict[str, Any]:
    low, high = interval(results["accuracy"], results["n"])
    counts = {name: int(results[name]) for name in ("n", "infra_errors", "unscorable")}
    return {**results, **counts, "accuracy_ci95": [low, high]}


def interval(share: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of n: unlike share +- 1.96 errors it stays within 0..1, and is not empty at the ends.

    https://www.itl.nist.gov/div898/handbook/prc/section2/prc241.htm
    """
    if n == 0:
        return 0.0, 1.0
    centre = (share + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 * sqrt(share * (1 - share) / n + Z95**2 / (4 * n * n)) / (1 + Z95**2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def _show(subject: Subject, name: str, results: Metrics, seconds: float) -> None:
    f = as_figures(results)
    low, high = f["accuracy_ci95"]
    accuracy = Text.assemble(
        (f"{f['accuracy']:.4f}", "bold green"), f" ± {f['accuracy_se']:.4f}   95 % CI {low:.3f} to {high:.3f}"
    )
    if subject.recorded is not None:
        same = subject.recorded == f["accuracy"]
        said = "the run's report says the same" if same else f"the run's report says {subject.recorded:.4f}"
        accuracy.append(f"   {said}", "dim" if same else "bold yellow")
    failed = f["infra_errors"] + f["unscorable"]
    what = f"{f['infra_errors']:,} infrastructure errors, {f['unscorable']:,} unscorable"
    rows = [
        ("tasks", Text(f"{f['n']:,} held-out, greedy, in {seconds:.1f} s")),
        ("accuracy", accuracy),
        ("reward", Text(f"{f['reward']:.4f}")),
        ("replies", Text(f"{f['length']:.1f} tokens, {100 * f['truncated']:.1f} % truncated")),
        ("failed", Text(f"{what}; these count as not solved" if failed else what, "bold red" if failed else "")),
    ]
    screen = console()
    screen.print(Text.assemble((str(subject.model), "bold"), f" on {name}"))
    screen.print(labelled(rows))
