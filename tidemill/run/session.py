"""One training run, from a recipe to a folder with the trained model and its report.

    folder -> environment -> model (made, or given) -> warm-up -> parts -> controller -> final/ and report.json

`tidemill train` and `tidemill.train()` call `run`. An interrupted run resumes where its ledger says it was, see `resume`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tidemill.controller.controller import first_cause
from tidemill.controller.engine_supervisor import Budget
from tidemill.controller.offline_groups import check_given
from tidemill.controller.run_monitor import Monitor
from tidemill.core.config import dump
from tidemill.core.errors import ConfigError, PeerLost, RunFolderGone
from tidemill.core.hardware import allow_files, usable_cores
from tidemill.core.hub import shown
from tidemill.core.interfaces import Environment
from tidemill.envs.bounded_await import bounded_call
from tidemill.envs.build_environment import make_environment
from tidemill.envs.environment_mixture import notes_of, parts_of
from tidemill.envs.episode_workers import in_workers
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.envs.task_order import task_order
from tidemill.ledger.database import has_ledger
from tidemill.ledger.ledger import SqliteLedger
from tidemill.models.conversations import check_prompts
from tidemill.models.tokenizer import import_tokenizers
from tidemill.observability.console import Display
from tidemill.observability.operator_profiler import LAST, merge
from tidemill.observability.sinks import Callback, open_sinks
from tidemill.observability.trace import Trace
from tidemill.run.build_controller import Session, context_cut, train
from tidemill.run.cluster import start_parts
from tidemill.run.hub_names import fetched
from tidemill.run.preflight.probe_process import Preparation
from tidemill.run.preflight.reward_audit import QUICK_TASKS, vouch
from tidemill.run.preflight.reward_code import tell_changes
from tidemill.run.recipe import RunConfig
from tidemill.run.report import make_report
from tidemill.run.roles import TrainerSpec, budget_of, placed, preparing
from tidemill.run.sft_warmup import check_answers
from tidemill.run.status_file import forget_end, record_failure
from tidemill.run.storage.model_folder import ModelFolder, expect_model, named_folder
from tidemill.run.storage.run_folder import RunFolder
from tidemill.run.warm_start import Warming, WarmStart, kept_start, warm_start
from tidemill.runtime.placement import Placement
from tidemill.runtime.process_logs import warnings_to
from tidemill.runtime.workers import keeper

T = TypeVar("T")
FETCH_S = 7 * 86_400.0  # deadline of a download; a stalled connection ends long before
LOOKED_AT = 64  # groups whose tasks are compared when a run goes on


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The result of a run: steps done, whether it is complete, and the report."""

    steps: int
    complete: bool
    report: dict[str, Any]


EnvironmentMaker = Callable[[RewardPool, Path], Environment]
"""Makes the environment from the scoring workers, and a folder for the source that they import."""


async def run(
    config: RunConfig, display: Display, callbacks: Sequence[Callback] = (), make: EnvironmentMaker | None = None
) -> RunEnded:
    """Train. Raises ConfigError for mistakes that the user can mend, else the first cause.

    callbacks: called with (step, metrics). make: makes the environment from Python objects instead of `config.env`.
    """
    try:
        return await _in_folder(config, display, callbacks, make)
    finally:
        display.close()


async def _in_folder(
    config: RunConfig, display: Display, callbacks: Sequence[Callback], make: EnvironmentMaker | None
) -> RunEnded:
    _expect_files(config)
    folder = RunFolder.open(config)
    with _ledger(folder) as ledger:  # from here on this process is the folder's only writer
        folder.claim(config, begun=ledger.next_group_id() > 0)
        if (report := folder.summary()) is not None and report["steps"] >= config.steps:
            display.note(
                f"{folder.path} is complete: {report['steps']} steps were done; give another run_dir, or more steps"
            )
            return RunEnded(report["steps"], True, report)
        for doubt in ledger.doubts:
            display.note(f"warning: {doubt}")
        begun = (ledger.last_step() or 0) + 1
        if begun > config.steps:
            raise ConfigError(f"steps = {config.steps}: {folder.path} has begun step {begun} already; give more steps")
        forget_end(folder.path)
        folder.interrupted.unlink(missing_ok=True)
        try:
            config = await bounded_call(partial(fetched, config, folder.path, display.note), FETCH_S)
            async with placed(config.placement, folder.logs, config.supervise) as placement:
                with warnings_to(folder.warnings, lambda path: display.note(f"warnings with their tracebacks go to {path}")):
                    return await _with_environment(config, folder, ledger, placement, display, callbacks, make)
        except BaseException as error:
            if folder.gone:
                folder.sweep()
                raise RunFolderGone(_GONE.format(folder=folder.path)) from None
            cause = first_cause(error) if isinstance(error, BaseExceptionGroup) else error
            record_failure(folder.path, cause)
            if cause is error:
                raise
            raise cause from None  # the other exceptions are only cancellations


_GONE = "{folder} was renamed or deleted while its run went on: put it back and start the same command again, or begin anew"
FILES, FILES_EACH = 40, 4  # open files of a controller, and for each process that it starts


def _expect_files(config: RunConfig) -> None:
    """Raise ConfigError if this process may not open as many files as the run needs."""
    placed_at, scorers = config.placement, config.scoring.workers if config.judged else 0
    players = usable_cores() if placed_at.environment.workers is None else placed_at.environment.workers
    count = placed_at.engines + placed_at.reference_engines + players + scorers + 2
    needed = FILES + FILES_EACH * count
    if (allowed := allow_files(needed)) < needed:
        raise ConfigError(
            f"{allowed} open files are allowed here, and this run needs {needed}: allow more (`ulimit -n 1024`, or the hard "
            "limit, which is an administrator's to raise), or start fewer engines and workers"
        )


async def _with_environment(
    config: RunConfig,
    folder: RunFolder,
    ledger: SqliteLedger,
    placement: Placement,
    display: Display,
    callbacks: Sequence[Callback],
    make: EnvironmentMaker | None,
) -> RunEnded:
    scorer = RewardPool(**config.scoring.workers_as())
    sinks = open_sinks(config.record, folder.path, config=dump(config), callbacks=callbacks, report=display.note)
    monitor = Monitor(sinks, display, Trace(config.record.trace_events))
    try:
        environment = make(scorer, folder.source) if make else make_environment(config.env, scorer)
        for note in notes_of(environment):
            display.note(note)
        lost, written = _lost_worker(config, ledger, display.note), None if make else config.env
        workers = config.placement.environment
        environment = in_workers(environment, workers, lost, display.note, written, folder.source)
        if not keeper.KEEPERS:
            display.note(keeper.UNKEPT)
        try:
            expect_model(config.model)
            import_tokenizers()  # now, while the fork server imports its modules
            async with preparing(config, placement) as preparation:
                model = await _open_model(config, folder, preparation)
                session = Session(config, folder, ledger, environment, model, monitor, placement, display.note)
                await _describe(session, preparation)
            tell_changes(config.env, ledger, display.note)
            if ledger.next_group_id() > 0:
                _expect_same_tasks(session)
            elif config.judged:
                await _vouch(session)
            return await _run(session)
        finally:
            await environment.close()
    finally:
        await scorer.close()
        monitor.close()


async def _open_model(config: RunConfig, folder: RunFolder, preparation: Preparation) -> ModelFolder:
    with _in_one_sentence():
        of_class = await preparation.open_model(str(folder.path))
    return ModelFolder.open(named_folder(config.model, folder.path, config.seed), of_class)


@contextmanager
def _in_one_sentence() -> Iterator[None]:
    """Turn a ValueError into a ConfigError, so that the user sees no traceback."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _lost_worker(config: RunConfig, ledger: SqliteLedger, note: Callable[[str], None]) -> Callable[[str], float]:
    """The handler of a lost environment worker: it tells, records, and spends a restart."""
    budget = budget_of(config.supervise)

    def lost(reason: str) -> float:
        ledger.event("environment_worker_lost", {"reason": reason})
        note(f"environment worker lost: {reason}")
        return budget.spend(reason)

    return lost


async def _describe(session: Session, preparation: Preparation) -> None:
    """Check the tasks and the memory before anything is started, and show what is about to run."""
    config, environment, architecture = session.config, session.environment, session.model.architecture
    train, held_out = environment.tasks("train"), session.held_out(max(config.eval.final_tasks, config.eval.tasks))
    tokenizer, given = session.model.tokenizer, config.given
    longest = check_prompts([*train, *held_out], tokenizer, session.context, architecture.vocab)
    if config.warmup.accuracy and session.ledger.next_group_id() == 0:
        check_answers(train, tokenizer, architecture.vocab)
    longest_row = longest + config.rollout.max_tokens
    if given:
        longest_row = check_given(given, [*train, *held_out], tokenizer, session.context, architecture.vocab)
    with _in_one_sentence():
        await preparation.check_memory(str(session.model.path), min(longest_row, session.context))
        session.extras = await preparation.extras()
    per_step = config.rollout.groups * config.rollout.group_size
    synchronous = "synchronous" if config.max_lag == 0 else "asynchronous"
    algorithms = " + ".join(dict.fromkeys(each.name for each in config.algorithms.values()))
    how = f"{synchronous}, max_lag {config.max_lag}: {config.steps} steps of {config.rollout.groups} groups × "
    rows = f"prompts up to {longest} tokens, replies up to {config.rollout.max_tokens}"
    if longest_row > session.context:
        rows += f", which end where a row has {session.context}"
    if config.data.replay.share:
        rows += f"; groups of the {config.data.replay.within} steps before may be trained once more, whatever max_lag"
    if given:
        how = f"nothing is sampled: {config.steps} steps of {config.rollout.groups} tasks × "
        rows = f"rows up to {longest_row} tokens"
    session.monitor.header(
        [
            f"task: {environment.name}, {len(train):,} training and {len(held_out):,} held-out tasks, disjoint",
            f"policy: {architecture.family}, {architecture.layers} layers of {architecture.hidden}, {shown(config.model)}",
            f"training: {algorithms}, {how}{config.rollout.group_size} = {per_step} samples",
            f"rows: {rows}",
            *filter(None, [context_cut(config, architecture)]),
        ]
    )


def _expect_same_tasks(session: Session) -> None:
    """Raise ConfigError if the tasks are not those that the run was begun with.

    A group's task follows from its number and the tasks, so other tasks would repeat some and leave out others. If the order
    follows from results, the tasks are compared by name: each must still be there, unchanged.
    """
    ledger, admitted, curriculum = session.ledger, session.ledger.next_group_id(), session.curriculum()
    looked_at = {*range(0, admitted, -(-admitted // LOOKED_AT)), admitted - 1}
    if not curriculum.by_number:
        looked_at |= {group_id for group_id, env, name, _ in ledger.history() if curriculum.task_of(env, name) is None}
    for group_id in sorted(looked_at):
        before = ledger.task_of(group_id)
        now = curriculum.choose(group_id) if curriculum.by_number else curriculum.task_of(before.env, before.id)
        if now is None or not ledger.is_task_of(group_id, now):
            what = "none of that name" if now is None else f"{now.id!r}"
            what = "one of that name with other contents" if now is not None and now.id == before.id else what
            raise ConfigError(
                f"the tasks are not those that {session.folder.path} was begun with (group {group_id} was to solve "
                f"{before.id!r}, and would now get {what}): put the data back as it was, or give another run_dir"
            )


async def _vouch(session: Session) -> None:
    """Check the reward of each environment by itself, because each has its own verifier."""
    config = session.config
    for environment in parts_of(session.environment):
        tasks = environment.tasks("train")
        await vouch(
            environment,
            [tasks[task_order(len(tasks), config.seed, position)] for position in range(min(len(tasks), QUICK_TASKS))],
            limit_s=config.rollout.episode_s,
            accepted=config.scoring.accept,
            record=session.ledger.event,
            note=session.note,
        )


async def _run(session: Session) -> RunEnded:
    config, begin, budget = session.config, time.monotonic(), budget_of(session.config.supervise)
    before = session.ledger.next_step()
    start = await _despite_losses(session, budget, partial(_start, session))
    done = await _despite_losses(session, budget, partial(_attempt, session, start))
    wall_s = time.monotonic() - begin
    measured, policy = session.monitor, session.model.architecture
    report = make_report(measured.totals, session.ledger, start, config, policy, before, wall_s)
    if config.record.trace:
        session.monitor.trace.write(session.folder.trace)
    if config.profile:
        recorded = merge(session.folder.profile, session.monitor.trace, session.folder.profiled)
        where = f"{session.folder.profiled}, for https://ui.perfetto.dev"
        session.note(f"profile: {where if recorded else f'nothing: no process saw {LAST} publications'}")
    session.folder.write_report(report, complete=done == config.steps)
    return RunEnded(done, done == config.steps, report)


async def _despite_losses(session: Session, budget: Budget, work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`, which is repeated when the trainer is lost, within a restart budget."""
    while True:
        try:
            return await work()
        except PeerLost as lost:
            task = asyncio.current_task()
            if not session.config.supervise.resume or (task and task.cancelling()):  # the group hides a cancellation
                raise
            cause = str(lost).partition("\n")[0]
            session.ledger.event("run_resumed", {"cause": cause})
            pause = budget.spend(cause)
            session.note(f"{cause}; going on by itself" + (f" in {pause:g} s" if pause else ""))
            await asyncio.sleep(pause)  # bounded: by the budget


async def _attempt(session: Session, start: WarmStart) -> int:
    """Start the processes, train from where the record stands, and stop the processes.

    Returns the number of steps done.
    """
    config, folder = session.config, session.folder
    spec = TrainerSpec(
        model=start.path,
        trainer=config.trainer,
        steps=config.steps * config.updates,
        reference=config.reference,
        critic=config.critic,
        scores=config.scores,
        checkpoints=0 < config.record.checkpoint_every < config.steps,  # the last is not beside training
        sync=config.placement.sync,
        folder=folder.weights,
        seed=config.seed,
        profile=folder.profile if config.profile else None,
    )
    async with start_parts(config, spec, session.placement, session.tell, session.extras) as parts:
        async with parts.watched():
            done = await train(session, parts)
        if done == config.steps:
            await folder.write_final(parts.trainer.export)
    return done


async def _start(session: Session) -> WarmStart:
    """The weights that reinforcement learning begins with; a resumed run has them in `initial`."""
    config, folder = session.config, session.folder
    if session.ledger.next_group_id() > 0:
        return kept_start(folder.initial)
    tasks = session.environment.tasks("train")
    start = await warm_start(
        Warming(config, folder, session.placement, session.model, tasks, session.episodes(), session.note)
    )
    folder.keep_initial(start.path, copy=start.warmed is not None)
    return start if start.warmed is None else replace(start, path=folder.initial)  # the cache may be deleted


@contextmanager
def _ledger(folder: RunFolder) -> Iterator[SqliteLedger]:
    """Open the ledger. If the start is refused, its folder is removed, unless events were recorded."""
    ledger, refused = SqliteLedger(folder.path, mode="open" if has_ledger(folder.path) else "create"), False
    try:
        yield ledger
    except ConfigError:
        refused = not ledger.events()
        raise
    finally:
        ledger.close()
        if refused:
            folder.withdraw()
