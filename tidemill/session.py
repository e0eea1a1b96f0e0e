"""One training run, from a recipe to a folder: what `tidemill train` and `tidemill.train()` do.

    folder -> environment -> model (made, or given) -> warm-up -> parts -> controller -> final/ and report.json

A run that was interrupted goes on where its ledger says it was, see `resume`.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tidemill.algorithms.prepare import Algorithm
from tidemill.buffer import Buffer
from tidemill.build import Parts, TrainerSpec, start_parts
from tidemill.checkpoints import Checkpoints, Position
from tidemill.config import ConfigError, dump
from tidemill.controller import Controller, Hooks, Schedule, first_cause
from tidemill.envs.make import make_environment
from tidemill.envs.order import task_order
from tidemill.envs.template import check_prompts
from tidemill.evaluation import Evaluator
from tidemill.ledger.ledger import SqliteLedger, has_ledger
from tidemill.model_folder import ModelFolder, resolve_model
from tidemill.monitor import Monitor
from tidemill.observability.display import Display
from tidemill.observability.sinks import Callback, open_sinks
from tidemill.observability.trace import Trace
from tidemill.pool import EnginePool, PoolPublisher
from tidemill.protocols import Environment
from tidemill.recipe import RunConfig
from tidemill.report import make_report
from tidemill.resume import Standing, take_up
from tidemill.rollout import Episodes, Rollout
from tidemill.run_folder import RunFolder
from tidemill.scoring.pool import WorkerPool
from tidemill.types import Metrics, SamplingParams, Task, Version
from tidemill.warm_start import WarmStart, kept_start, warm_start


@dataclass(slots=True)
class Session:
    """A run's parts that need no process of their own."""

    config: RunConfig
    folder: RunFolder
    ledger: SqliteLedger
    environment: Environment
    model: ModelFolder
    monitor: Monitor
    note: Callable[[str], None]

    def task_at(self, group_id: int) -> Task:
        tasks = self.environment.tasks("train")
        return tasks[task_order(len(tasks), self.config.seed, group_id)]

    def held_out(self, count: int) -> Sequence[Task]:
        return self.environment.tasks("eval")[:count]

    def episodes(self) -> Episodes:
        return make_episodes(self.config, self.environment, self.model)

    @property
    def context(self) -> int:
        return context_of(self.config, self.model)


def make_episodes(config: RunConfig, environment: Environment, model: ModelFolder) -> Episodes:
    """How this recipe plays an episode with this model: the same in training and in every evaluation."""
    r = config.rollout
    params = SamplingParams(r.temperature, r.top_p, r.top_k, r.min_p, r.max_tokens, model.stop_ids)
    return Episodes(environment, model.tokenizer, params, context_of(config, model), r.episode_s)


def context_of(config: RunConfig, model: ModelFolder) -> int:
    """Tokens that a sequence may hold."""
    return min(config.engine.context or model.architecture.context, model.architecture.context)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended."""

    steps: int
    complete: bool
    report: dict[str, Any]


EnvironmentMaker = Callable[[WorkerPool], Environment]


async def run(
    config: RunConfig, display: Display, callbacks: Sequence[Callback] = (), make: EnvironmentMaker | None = None
) -> Ended:
    """Train. Raises ConfigError for what the user can mend, and the first cause of anything else.

    callbacks: called with (step, metrics). make: an environment from Python objects instead of `config.env`.
    """
    folder = RunFolder.open(config)
    with _ledger(folder) as ledger:  # from here on this process is the folder's only writer
        folder.claim(config, begun=ledger.next_group_id() > 0)
        if (report := folder.summary()) is not None and report["steps"] >= config.steps:
            display.note(
                f"{folder.path} is complete: {report['steps']} steps were done; give another run_dir, or more steps"
            )
            return Ended(report["steps"], True, report)
        begun = (ledger.last_step() or 0) + 1
        if begun > config.steps:
            raise ConfigError(f"steps = {config.steps}: {folder.path} has begun step {begun} already; give more steps")
        scorer = WorkerPool(**config.scoring.model_dump())
        sinks = open_sinks(config.record, folder.path, config=dump(config), callbacks=callbacks, report=display.note)
        monitor = Monitor(sinks, display, Trace(config.record.trace_events))
        try:
            environment = make(scorer) if make else make_environment(config.env, scorer)
            try:
                model = ModelFolder.open(resolve_model(config.model, folder.path, config.seed))
                session = Session(config, folder, ledger, environment, model, monitor, display.note)
                _describe(session)
                return await _run(session)
            finally:
                await environment.close()
        except BaseExceptionGroup as failures:
            raise first_cause(failures) from failures
        finally:
            await scorer.close()
            monitor.close()


def _describe(session: Session) -> None:
    """Check what can be checked before anything is started, and say what is about to run."""
    config, environment, architecture = session.config, session.environment, session.model.architecture
    train, held_out = environment.tasks("train"), session.held_out(config.eval.final_tasks)
    longest = check_prompts([*train, *held_out], session.model.tokenizer, session.context)
    if (config.rollout.top_p, config.rollout.top_k, config.rollout.min_p) != (1.0, 0, 0.0):
        session.note(
            "top_p, top_k and min_p: the trainer's logprobs are of the whole distribution (the sampled support is recorded, "
            "not yet used), so importance ratios are biased and the mismatch at lag 0 is not 0"
        )
    per_step = config.rollout.groups * config.rollout.group_size
    synchronous = "synchronous" if config.max_lag == 0 else "asynchronous"
    session.monitor.header(
        [
            f"task: {environment.name}   {len(train):,} training and {len(held_out):,} held-out tasks, disjoint",
            f"policy: {architecture.family}, {architecture.layers} layers of {architecture.hidden}, {config.model}",
            f"{config.algorithm.name}, {synchronous}, max_lag {config.max_lag}: {config.steps} steps of "
            f"{config.rollout.groups} groups x {config.rollout.group_size} = {per_step} samples",
            f"prompts up to {longest} tokens, replies up to {config.rollout.max_tokens}",
        ]
    )


async def _run(session: Session) -> Ended:
    config, folder, ledger = session.config, session.folder, session.ledger
    begin = time.monotonic()
    start = await _start(session)
    spec = TrainerSpec(
        model=start.path,
        trainer=config.trainer,
        steps=config.steps,
        sync=config.placement.sync,
        folder=folder.weights,
        seed=config.seed,
    )
    async with start_parts(config.placement, config.engine, spec, folder.logs) as parts:
        done = await _train(session, parts)
        if done == config.steps:
            await folder.write_final(parts.trainer.export)
    report = make_report(session.monitor.totals, session.monitor.trace, ledger, start, config, time.monotonic() - begin)
    if config.record.trace:
        session.monitor.trace.write(folder.trace)
    folder.write_report(report, complete=done == config.steps)
    return Ended(done, done == config.steps, report)


async def _start(session: Session) -> WarmStart:
    """The weights that reinforcement learning begins with; those of a run that has begun are its own `initial`."""
    config, folder = session.config, session.folder
    if session.ledger.next_group_id() > 0:
        return kept_start(folder.initial)
    tasks = session.environment.tasks("train")
    start = await warm_start(config, folder, session.model, tasks, session.episodes(), session.note)
    folder.keep_initial(start.path, copy=start.warmed is not None)
    return start


async def _train(session: Session, parts: Parts) -> int:
    config, ledger = session.config, session.ledger
    pool = EnginePool(parts.engines)
    algorithm = Algorithm(config.algorithm.with_fixed_length(config.rollout.max_tokens))
    checkpoints = Checkpoints(session.folder.checkpoints, config.record.checkpoints)
    standing = await take_up(ledger, checkpoints, parts.trainer, algorithm, session.note)
    contexts = [(await engine.capabilities()).context for engine in parts.engines]  # less than the model's where KV is short
    episodes = replace(session.episodes(), context=min(contexts))
    roller = Rollout(pool, episodes, config.rollout.group_size, config.seed)
    session.monitor.attach(parts.trainer, parts.engines, roller.spans, config.rollout.groups)
    controller = Controller(
        _schedule(config, standing),
        _buffer(config, standing),
        session.task_at,
        roller,
        parts.trainer,
        PoolPublisher(parts.trainer, pool),
        ledger,
        algorithm,
        session.monitor,
        _hooks(session, parts, checkpoints, Evaluator(pool, episodes, config.seed), standing),
        restored=standing.left,
        versions=standing.versions,
    )
    async with _stop_on_signals(controller.stop, session.note):
        return await controller.run()


def _schedule(config: RunConfig, standing: Standing) -> Schedule:
    return Schedule(
        steps=config.steps,
        first=standing.step,
        incarnation=standing.incarnation,
        eval_every=config.eval.every or config.steps,
        checkpoint_every=config.record.checkpoint_every,
        probe_every=config.record.probe_every,
    )


def _buffer(config: RunConfig, standing: Standing) -> Buffer:
    return Buffer(
        batch=config.rollout.groups,
        max_lag=config.max_lag,
        window=config.rollout.window,
        total=(config.steps - standing.step) * config.rollout.groups,
        next_id=standing.next_id,
        live=standing.live,
    )


def _hooks(session: Session, parts: Parts, checkpoints: Checkpoints, evaluator: Evaluator, standing: Standing) -> Hooks:
    config = session.config

    async def evaluate(version: Version) -> Metrics:
        ends = version.step in (0, config.steps)
        return await evaluator(session.held_out(config.eval.final_tasks if ends else config.eval.tasks), version)

    async def checkpoint(step: int, next_id: int) -> None:
        await checkpoints.save(parts.trainer, Position(step, standing.incarnation, next_id))
        session.ledger.retain(checkpoint=step)  # what a resume can still need stays

    return Hooks(evaluate, checkpoint, partial(session.monitor.probe, engine=parts.engines[0]))


@contextmanager
def _ledger(folder: RunFolder) -> Iterator[SqliteLedger]:
    ledger = SqliteLedger(folder.path, mode="open" if has_ledger(folder.path) else "create")
    try:
        yield ledger
    finally:
        ledger.close()


@asynccontextmanager
async def _stop_on_signals(stop: Callable[[], None], note: Callable[[str], None]) -> AsyncIterator[None]:
    """The first Ctrl-C or SIGTERM ends the run after its step, with a checkpoint; the second one ends it now."""
    if threading.current_thread() is not threading.main_thread():  # there the signals are somebody else's
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    asked = False

    def handle(name: str) -> None:
        nonlocal asked
        if asked:
            task.cancel(f"{name} again")
            return
        asked = True
        note(f"{name}: the run ends after this step; once more stops it now (the same command goes on later)")
        stop()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, handle, number.name)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
