"""One training run, from a recipe to a folder: what `tidemill train` and `tidemill.train()` do.

    folder -> environment -> model (made, or given) -> warm-up -> parts -> controller -> final/ and report.json

A run that was interrupted goes on where its ledger says it was, see `resume`.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tidemill.agreement import Agreement
from tidemill.algorithms.prepare import Algorithm
from tidemill.breaker import Breaker, Change, Gate
from tidemill.buffer import Buffer
from tidemill.build import Parts, TrainerSpec, start_parts
from tidemill.checkpoint_manifest import Position
from tidemill.checkpoints import Checkpoints
from tidemill.config import ConfigError, dump
from tidemill.controller import Controller, Hooks, Schedule, first_cause
from tidemill.envs.make import make_environment
from tidemill.envs.order import task_order
from tidemill.envs.template import check_prompts
from tidemill.envs.workers import in_workers
from tidemill.evaluation import Evaluator
from tidemill.exact import Recorded, take_up_exactly
from tidemill.health import forget_failure, record_failure, reporting
from tidemill.ledger.ledger import SqliteLedger, has_ledger
from tidemill.model_folder import ModelFolder, resolve_model
from tidemill.monitor import Monitor
from tidemill.observability.display import Display
from tidemill.observability.sinks import Callback, open_sinks
from tidemill.observability.trace import Trace
from tidemill.pool import PoolPublisher
from tidemill.protocols import Environment, PeerLost
from tidemill.recipe import RunConfig
from tidemill.report import make_report
from tidemill.resume import Standing, take_up
from tidemill.reward_check import QUICK_TASKS, vouch
from tidemill.rollout import Episodes, Rollout
from tidemill.run_folder import RunFolder
from tidemill.scoring.pool import WorkerPool
from tidemill.supervision import Budget
from tidemill.types import Array, Metrics, Sample, SamplingParams, Task, Version
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

    def tell(self, kind: str, detail: dict[str, Any]) -> None:
        """An event that the user should see, and the ledger keep."""
        self.ledger.event(kind, detail)
        self.note(f"{kind.replace('_', ' ')}: {', '.join(str(value) for value in detail.values())}".partition("\n")[0])

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
    supervise = config.supervise
    budget = Budget(supervise.restarts, supervise.window_s, supervise.backoff_s)
    try:
        while True:
            try:
                return await _once(config, display, callbacks, make)
            except PeerLost as lost:
                if not supervise.resume:
                    raise
                cause = str(lost).partition("\n")[0]
                pause = budget.spend(cause)
                display.note(f"{cause}; going on by itself in {pause:g} s")
                await asyncio.sleep(pause)  # bounded: by the budget
    finally:
        display.close()


async def _once(config: RunConfig, display: Display, callbacks: Sequence[Callback], make: EnvironmentMaker | None) -> Ended:
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
        forget_failure(folder.path)
        try:
            return await _with_environment(config, folder, ledger, display, callbacks, make)
        except BaseException as error:
            cause = first_cause(error) if isinstance(error, BaseExceptionGroup) else error
            record_failure(folder.path, cause)
            if cause is error:
                raise
            raise cause from error


async def _with_environment(
    config: RunConfig,
    folder: RunFolder,
    ledger: SqliteLedger,
    display: Display,
    callbacks: Sequence[Callback],
    make: EnvironmentMaker | None,
) -> Ended:
    scorer = WorkerPool(**config.scoring.workers_as())
    sinks = open_sinks(config.record, folder.path, config=dump(config), callbacks=callbacks, report=display.note)
    monitor = Monitor(sinks, display, Trace(config.record.trace_events))
    try:
        environment = make(scorer) if make else make_environment(config.env, scorer)
        lost, written = _lost_worker(config, ledger, display.note), None if make else config.env
        environment = in_workers(environment, config.placement.environment, lost, display.note, written)
        try:
            model = ModelFolder.open(resolve_model(config.model, folder.path, config.seed))
            session = Session(config, folder, ledger, environment, model, monitor, display.note)
            _describe(session)
            if ledger.next_group_id() == 0:
                await _vouch(session)
            return await _run(session)
        finally:
            await environment.close()
    finally:
        await scorer.close()
        monitor.close()


def _lost_worker(config: RunConfig, ledger: SqliteLedger, note: Callable[[str], None]) -> Callable[[str], float]:
    """What is done when an environment worker was lost: say it, record it, and pay for another."""
    budget = Budget(config.supervise.restarts, config.supervise.window_s, config.supervise.backoff_s)

    def lost(reason: str) -> float:
        ledger.event("environment_worker_lost", {"reason": reason})
        note(f"environment worker lost: {reason}")
        return budget.spend(reason)

    return lost


def _describe(session: Session) -> None:
    """Check what can be checked before anything is started, and say what is about to run."""
    config, environment, architecture = session.config, session.environment, session.model.architecture
    train, held_out = environment.tasks("train"), session.held_out(config.eval.final_tasks)
    longest = check_prompts([*train, *held_out], session.model.tokenizer, session.context)
    if config.rollout.truncated:
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


async def _vouch(session: Session) -> None:
    config, there_are = session.config, len(session.environment.tasks("train"))
    await vouch(
        session.environment,
        [session.task_at(position) for position in range(min(there_are, QUICK_TASKS))],
        limit_s=config.rollout.episode_s,
        accepted=config.scoring.accept,
        record=session.ledger.event,
        note=session.note,
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
    async with start_parts(config, spec, folder.logs, session.tell) as parts:
        async with parts.watched():
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
    pool = parts.pool
    algorithm = Algorithm(config.algorithm.with_fixed_length(config.rollout.max_tokens))
    kept = {"keep": config.record.checkpoints, "keep_every": config.record.keep_every}
    checkpoints = Checkpoints(session.folder.checkpoints, ledger, session.note, **kept)
    if config.deterministic:
        standing = await take_up_exactly(ledger, checkpoints, parts.trainer, session.note)
    else:
        standing = await take_up(ledger, checkpoints, parts.trainer, algorithm, session.note)
    contexts = [(await engine.capabilities()).context for engine in pool.engines]  # less than the model's where KV is short
    episodes = replace(session.episodes(), context=min(contexts))
    roller = Rollout(pool, episodes, config.rollout.group_size, config.seed)
    recorded = Recorded(ledger, roller) if config.deterministic else None
    session.monitor.attach(parts.trainer, pool, roller.spans, config.rollout.groups)

    def unchanged(version: Version, why: str) -> None:
        session.tell("weights_unchanged", {"version": str(version), "why": why})

    controller = Controller(
        _schedule(config, standing),
        _buffer(config, standing),
        session.task_at,
        recorded or roller,
        parts.trainer,
        PoolPublisher(parts.trainer, pool, unchanged),
        recorded or ledger,
        algorithm,
        session.monitor,
        _hooks(session, parts, checkpoints, Evaluator(pool, episodes, config.seed), standing),
        gate=_gate(session),
        restored=standing.left,
        versions=standing.versions,
    )

    def now() -> dict[str, Any]:
        buffer = controller.buffer
        versions = [version.step for version in controller.versions.values()]
        slots = {"slots": buffer.slots, "used": buffer.used, "finished": buffer.ready}
        return {"step": controller.step, "steps": config.steps, "version": max(versions, default=None), "buffer": slots}

    async with _stop_on_signals(controller.stop, session.note), reporting(session.folder.path, parts.handles, now):
        return await controller.run()


def _gate(session: Session) -> Gate:
    scoring = session.config.scoring

    def tell(change: Change) -> None:
        detail = {"verifier": change.verifier, "share": change.share, "reason": change.reason, "seconds": change.seconds}
        session.ledger.event(f"judging_{change.kind}", detail)
        session.monitor.judging(change)

    return Gate(Breaker(scoring.max_error_share, scoring.pause_s), session.environment.name, tell)


def _schedule(config: RunConfig, standing: Standing) -> Schedule:
    return Schedule(
        steps=config.steps,
        first=standing.step,
        saved=standing.saved,
        incarnation=standing.incarnation,
        eval_every=config.eval.every or config.steps,
        checkpoint_every=config.record.checkpoint_every,
        probe_every=config.record.probe_every,
        deterministic=config.deterministic,
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

    async def checkpoint(step: int, next_id: int) -> Coroutine[Any, Any, None]:
        return await checkpoints.begin(parts.trainer, Position(step, standing.incarnation, next_id))

    agreement = Agreement(parts.trainer, config.coarsest, config.rollout.truncated)

    async def probe(version: Version, samples: Sequence[Sample], logprobs: Sequence[Array]) -> None:
        agreement.check_probe(version, await session.monitor.probe(version, samples, logprobs, parts.pool))

    return Hooks(evaluate, checkpoint, agreement, probe)


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
