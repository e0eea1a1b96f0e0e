"""`tidemill eval`: greedy accuracy on held-out tasks, of a run or a model folder."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.text import Text

from tidemill.cli.commands.judging import in_its_workers, recipe_of, scoring_workers, with_sources, working
from tidemill.cli.commands.run_state import is_run, state_of
from tidemill.cli.commands.screen import Row, print_json, show_rows
from tidemill.controller.engine_pool import EnginePool, Member
from tidemill.controller.evaluation import Evaluator, Unscored, interval
from tidemill.controller.policy_pools import PolicyPools, Pool
from tidemill.controller.rollout import EpisodeSetup
from tidemill.core.amounts import amount
from tidemill.core.errors import ConfigError
from tidemill.core.hardware import usable_cores
from tidemill.core.hub import fetch, is_name, shown
from tidemill.core.interfaces import Environment
from tidemill.core.types import Metrics
from tidemill.envs.build_environment import make_environment
from tidemill.models.conversations import check_prompts
from tidemill.observability.safe_text import visible
from tidemill.run.build_controller import make_episodes
from tidemill.run.frozen_folders import frozen_version
from tidemill.run.hub_names import fetched
from tidemill.run.recipe import RunConfig, load_recipe
from tidemill.run.roles import start_engine
from tidemill.run.storage.model_folder import ModelFolder
from tidemill.run.storage.run_folder import RunFolder

Which = Literal["final", "initial"]
MATTERS = ("env", "rollout", "engine", "eval", "scoring", "placement", "seed")  # tables that an evaluation reads
MOST_REASONS = 5  # for which attempts have no score, that are shown
SAME_FIGURES = {"placement", "scoring"}  # those of them that cannot change its result


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to evaluate, with its settings and the number of tasks."""

    model: Path
    config: RunConfig
    tasks: int
    recorded: tuple[int, float] | None = None  # tasks and accuracy in the run's own report
    logs: Path | None = None  # of the run
    adapters: Mapping[str, Path] = field(default_factory=dict[str, Path])  # of a run of several policies
    models: Mapping[str, Path] = field(default_factory=dict[str, Path])  # those of its policies that are whole models
    base: Path | None = None  # the model to which adapters are added, and whose tokens all read


def evaluate(
    target: Path, recipe: Path | None, tasks: int | None, which: Which | None, overrides: Sequence[str], as_json: bool
) -> int:
    subject = find_subject(target, recipe, tasks, which, overrides)
    if not subject.config.judged:
        raise ConfigError(
            f"nothing judges the tasks of {target}: give env.reward=..., or read held_out_given in its report.json"
        )
    with working("eval", f"{subject.model}: greedy, {subject.tasks:,} held-out tasks", as_json, subject.logs):
        environment, results, unscored, seconds = asyncio.run(_run(subject))
    known = subject.recorded
    recorded = known[1] if known is not None and known[0] == results["n"] else None
    if as_json:
        about = {"model": str(subject.model), "environment": environment}
        reasons = dict(unscored.reasons.most_common(MOST_REASONS))
        print_json({**about, **as_figures(results), "reasons": reasons, "recorded_accuracy": recorded})
    else:
        rows = [*_rows(as_figures(results), seconds, recorded), *_reasons(unscored)]
        show_rows(Text.assemble((shown(subject.model), "bold"), f" on {environment}"), rows)
    return 0


def find_subject(
    target: Path, recipe: Path | None, tasks: int | None, which: Which | None, overrides: Sequence[str]
) -> Subject:
    """The model and the settings for `target`, a run or a model. Raises ConfigError."""
    if tasks is not None and tasks < 1:
        raise ConfigError(f"--tasks {tasks}: expected how many to evaluate on, at least 1")
    changed = [o.lstrip("-").partition("=")[0].partition(".")[0] for o in overrides]
    for key in changed:
        if key in RunConfig.model_fields and key not in MATTERS:
            raise ConfigError(f"{key}=... changes nothing in an evaluation, which reads {', '.join(MATTERS)}: leave it out")
    if is_name(str(target)):
        target = fetch(str(target), "model")
    if not target.is_dir():
        raise ConfigError(f"{target} does not exist: give the folder of a run, or a Hugging Face model folder")
    if is_run(target):
        if recipe is not None:
            raise ConfigError(
                f"{target} is a run, which is evaluated by its own recipe: leave out --recipe, or give a model"
            )
        return _of_run(RunFolder.existing(target), tasks, which or "final", overrides, changed)
    if not (target / "config.json").is_file():
        raise ConfigError(f"{target} is neither a run nor a model: there is no ledger.sqlite and no config.json in it")
    if which is not None:
        raise ConfigError(f"--which {which} is for runs, and {target} is a model")
    if recipe is None and "env" not in changed:
        raise ConfigError(f"{target} is a model: say what to evaluate it on, with --recipe FILE or env=...")
    base = {"run_dir": str(target), "model": str(target)}
    config = fetched(load_recipe([recipe] if recipe else [], overrides, base))
    return Subject(target, config, tasks or config.eval.final_tasks)


def _of_run(folder: RunFolder, tasks: int | None, which: Which, overrides: Sequence[str], changed: Sequence[str]) -> Subject:
    config = recipe_of(folder, overrides)
    model = folder.final if which == "final" else folder.initial
    if not model.is_dir():
        when = "its last step" if which == "final" else "its warm-up"
        other = "; its initial/ can be evaluated with --which initial" if folder.initial.is_dir() else ""
        now = state_of(folder).what_to_do()
        raise ConfigError(f"{folder.path} has no {which}/, which is written after {when}: {now}{other}")
    policies = _policies(config, folder) if which == "final" else {}
    if which == "initial" and (begun := _begun_otherwise(config)):
        raise ConfigError(
            f"--which initial is the model alone, and {folder.path} began with other weights of {', '.join(begun)}: leave "
            "--which out"
        )
    adapters = {name: each for name, each in policies.items() if name in config.side_by_side}
    models = {name: each for name, each in policies.items() if name not in adapters}
    base = folder.initial if policies else None
    config = fetched(with_sources(config, folder).model_copy(update={"model": str(base or model)}), folder.path)
    recorded = _recorded(folder, which, changed)
    return Subject(model, config, tasks or config.eval.final_tasks, recorded, folder.logs, adapters, models, base)


def _begun_otherwise(config: RunConfig) -> list[str]:
    """The policies of a run of several that were something else than the model when it began."""
    started = [name for name, each in config.adapters.items() if each.start is not None]
    return [*started, *config.frozen_policies] if config.policies else []


def _policies(config: RunConfig, folder: RunFolder) -> dict[str, Path]:
    """The folders of the policies that a run of several ended with, and of its frozen ones; none if it had one policy."""
    end = "-adapter" if config.adapters else ""
    trained = {name: folder.final / f"{name}{end}" for name in config.trained_policies if config.policies}
    return trained | config.frozen_folders


def _recorded(folder: RunFolder, which: Which, changed: Sequence[str]) -> tuple[int, float] | None:
    report = folder.summary()
    accuracy = None if report is None else report["accuracy_after" if which == "final" else "accuracy_before"]
    if report is None or accuracy is None or not set(changed) <= SAME_FIGURES:
        return None
    return report["held_out"], accuracy


async def _run(subject: Subject) -> tuple[str, Metrics, Unscored, float]:
    """The environment's name, the results, why attempts have no score, and the seconds that it took."""
    config, begin, told = subject.config, time.monotonic(), list[Unscored]()
    async with (
        scoring_workers(config) as scorer,
        in_its_workers(config, make_environment(config.env, scorer), config.env) as environment,
    ):
        model = ModelFolder.open(subject.base or subject.model)
        tasks = environment.tasks("eval")[: subject.tasks]
        known = model.architecture
        check_prompts(tasks, model.tokenizer, config.engine.context_of(known.context), known.vocab)
        with tempfile.TemporaryDirectory(prefix="tidemill-eval-") as logs:
            async with _serving(subject, model.path, Path(logs)) as pool:
                evaluator = Evaluator(pool, _episodes(subject, environment, model), config.seed, told.append)
                results = await evaluator(tasks)
        return environment.name, results, told[0], time.monotonic() - begin


@asynccontextmanager
async def _serving(subject: Subject, model: Path, logs: Path) -> AsyncIterator[Pool]:
    """The engines of an evaluation: one of the model or all adapters, and one of each policy that is a whole model."""
    config, adapters, pools = subject.config, subject.adapters, dict[str, EnginePool]()
    async with AsyncExitStack() as stack:

        async def pool(folder: Path, frozen: Mapping[str, Path] | None = None, serves: str | None = None) -> EnginePool:
            started = start_engine(config, folder, logs, usable_cores(), frozen, serves)
            engine = await stack.enter_async_context(started)
            return EnginePool([Member("engine-0", engine, await engine.capabilities())])

        if adapters or not subject.models:
            only = await pool(model, adapters)
            if not subject.models:
                yield only
                return
            pools |= dict.fromkeys(adapters, only)
        for name, folder in subject.models.items():
            pools[name] = await pool(folder, serves=name)
        yield PolicyPools(pools)


def _episodes(subject: Subject, environment: Environment, model: ModelFolder) -> EpisodeSetup:
    """The episodes of an evaluation: each policy plays its own environments, and any may be asked."""
    config = subject.config
    if not subject.adapters and not subject.models:  # one model plays them all
        return make_episodes(config.model_copy(update={"policies": {}}), environment, model)
    served = {name: frozen_version(name, each, config.engine.dtype) for name, each in config.frozen_policies.items()}
    return make_episodes(config, environment, model, served)


def as_figures(results: Metrics) -> dict[str, Any]:
    low, high = interval(results["accuracy"], results["n"])
    counts = {name: int(results[name]) for name in ("n", "infra_errors", "unscorable")}
    return {**results, **counts, "accuracy_ci95": [low, high]}


def _rows(f: Mapping[str, Any], seconds: float, recorded: float | None) -> list[Row]:
    low, high = f["accuracy_ci95"]
    accuracy = Text.assemble(
        (f"{f['accuracy']:.4f}", "bold green"), f" ± {f['accuracy_se']:.4f}   95 % CI {low:.3f} to {high:.3f}"
    )
    if recorded is not None:
        same = recorded == f["accuracy"]
        said = "the run's report says the same" if same else f"the run's report says {recorded:.4f}"
        accuracy.append(f"   {said}", "dim" if same else "bold yellow")
    failed = f["infra_errors"] + f["unscorable"]
    what = f"{amount(f['infra_errors'], 'infrastructure error')}, {f['unscorable']:,} unscorable"
    return [
        ("tasks", f"{f['n']:,} held-out, greedy, in {seconds:.1f} s"),
        ("accuracy", accuracy),
        ("reward", f"{f['reward']:.4f}"),
        ("replies", f"{f['length']:.1f} tokens, {100 * f['truncated']:.1f} % truncated"),
        *((key.removesuffix("/accuracy"), _share(f, key)) for key in f if key.endswith("/accuracy")),
        ("failed", Text(f"{what}; these count as not solved" if failed else what, "bold red" if failed else "")),
    ]


def _reasons(unscored: Unscored) -> list[Row]:
    """The commonest reasons for which attempts have no score, each with its number."""
    rows: list[Row] = [("", f"{visible(reason)} × {n:,}") for reason, n in unscored.reasons.most_common(MOST_REASONS)]
    others = sum(n for _, n in unscored.reasons.most_common()[MOST_REASONS:])
    return [*rows, ("", f"other reasons × {others:,}")] if others else rows


def _share(figures: Mapping[str, Any], key: str) -> str:
    return f"{figures[key]:.4f} of {int(figures[key.replace('/accuracy', '/n')]):,}"
