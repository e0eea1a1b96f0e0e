"""One training run, from a recipe to the trained model and its report."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from tidemill.controller.controller import Controller
from tidemill.controller.first_cause import first_cause
from tidemill.controller.run_monitor import Monitor
from tidemill.core.bounded_await import bounded_call
from tidemill.core.config import dump
from tidemill.core.errors import ConfigError, PeerLost, RunFolderGone
from tidemill.core.interfaces import Environment
from tidemill.core.token_extras import TokenExtra
from tidemill.core.types import Version
from tidemill.envs.build_environment import make_environment
from tidemill.envs.curriculum import Curriculum
from tidemill.envs.environment_mixture import notes_of, sandboxes_of
from tidemill.envs.episode_workers import in_workers
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.ledger.database import has_ledger
from tidemill.ledger.ledger import SqliteLedger
from tidemill.models.tokenizer import import_tokenizers
from tidemill.observability.console import Display
from tidemill.observability.events import worded
from tidemill.observability.operator_profiler import LAST, merge
from tidemill.observability.sinks import Callback, open_sinks
from tidemill.observability.trace import Trace
from tidemill.run.build_controller import build_controller, end_on_sigterm, position, stop_on_signals
from tidemill.run.cluster import Cluster, start_cluster
from tidemill.run.hub_names import fetched
from tidemill.run.planner.device_plan import given_in
from tidemill.run.planner.plan import plan_of
from tidemill.run.pool_requests import answering
from tidemill.run.preflight.start_checks import (
    audit_rewards,
    describe,
    expect_files,
    expect_same_tasks,
    in_one_sentence,
    note_changed_code,
)
from tidemill.run.recipe import RunConfig
from tidemill.run.report import attempts, engine_share, make_report
from tidemill.run.roles import budget_of, placed, preparing
from tidemill.run.status_file import forget_end, record_failure, reporting
from tidemill.run.storage.model_folder import ModelFolder, expect_model, named_folder
from tidemill.run.storage.run_folder import RunFolder
from tidemill.run.task_source import curriculum_of
from tidemill.run.warm_start import WarmStart, first_weights
from tidemill.runtime.process_logs import warnings_to
from tidemill.runtime.workers import keeper

SHARE_S = 60.0  # between two computations of the engines' share, which take up to 0.2 s
FETCH_S = 7 * 86_400.0  # deadline of a download; a stalled connection ends long before
GONE = "{folder} was renamed or deleted while its run went on: put it back and start the same command again, or begin anew"


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
    """Train. Raises ConfigError for the user's mistakes, else the first cause.

    callbacks: called with (step, metrics). make: makes the environment from Python objects instead of `config.env`. When the
    trainer is lost, the run begins again where it was, within a restart budget.
    """
    async with AsyncExitStack() as stack:
        session = Session(config, display, callbacks, make, stack)
        if (ended := session.open()) is not None:
            return ended
        with end_on_sigterm(session.note):
            await session.prepare()
        while True:
            try:
                with end_on_sigterm(session.note):
                    await session.start()
                await session.train()
                return await session.finish()
            except PeerLost as lost:
                await session.recover(lost)


class Session:
    """One run in five verbs: open, prepare, start, train, finish. Closing its stack ends everything it began."""

    folder: RunFolder
    ledger: SqliteLedger
    environment: Environment
    model: ModelFolder
    cluster: Cluster
    extras: tuple[TokenExtra, ...] = ()  # that the losses read

    def __init__(
        self,
        config: RunConfig,
        display: Display,
        callbacks: Sequence[Callback],
        make: EnvironmentMaker | None,
        stack: AsyncExitStack,
    ) -> None:
        """Nothing is begun before `open`. stack: gets everything that is to be ended."""
        self.config, self.display, self.note = config, display, display.note
        self._callbacks, self._make = callbacks, make
        self.stopping = False  # the user asked the run to end after its step
        self.done = 0  # steps, of the whole run
        self.frozen: Mapping[str, Version] = {}  # versions of the frozen policies, by name
        self.weights: WarmStart | None = None  # which training begins with
        self.curriculum: Curriculum | None = None  # with what the ledger recorded; read once, as that can take seconds
        self._began, self._steps_before = 0.0, 0
        self._budget = budget_of(config.supervise)
        self._whole, self._processes = stack, AsyncExitStack()  # the latter: trainer and engines
        stack.callback(display.close)

    def open(self) -> RunEnded | None:
        """Open the folder and the ledger; its lock makes this process the only writer.

        Returns the result of a run that was complete before. Raises ConfigError if the folder is another run's.
        """
        config = self.config
        expect_files(config)
        self.folder = folder = RunFolder.open(config)
        self.ledger = ledger = self._whole.enter_context(_ledger(folder))
        folder.claim(config, begun=ledger.next_group_id() > 0)
        if (report := folder.summary()) is not None and report["steps"] >= config.steps:
            steps = report["steps"]
            self.note(f"{folder.path} is complete: {steps} steps were done; give another run_dir, or more steps")
            return RunEnded(steps, True, report)
        for doubt in ledger.doubts:
            self.note(f"warning: {doubt}")
        begun = (ledger.last_step() or 0) + 1
        if begun > config.steps:
            raise ConfigError(f"steps = {config.steps}: {folder.path} has begun step {begun} already; give more steps")
        forget_end(folder.path)
        folder.interrupted.unlink(missing_ok=True)
        self._whole.push(self._record_end)
        return None

    async def prepare(self) -> None:
        """Make the environment, open the model, and check what can be checked before the run starts."""
        folder, ledger, whole = self.folder, self.ledger, self._whole
        self.config = config = await bounded_call(partial(fetched, self.config, folder.path, self.note), FETCH_S)
        self.placement = await whole.enter_async_context(placed(config.placement, folder.logs, config.supervise))
        said = "warnings with their tracebacks go to"
        whole.enter_context(warnings_to(folder.warnings, lambda path: self.note(f"{said} {path}")))
        sinks = open_sinks(config.record, folder.path, config=dump(config), callbacks=self._callbacks, report=self.note)
        self.monitor = Monitor(sinks, self.display, Trace(config.record.trace_events))
        whole.callback(self.monitor.close)
        scorer = RewardPool(**config.scoring.workers_as())
        whole.push_async_callback(scorer.close)
        self.environment = environment = self._make_environment(scorer)
        ledger.judged_by(environment.name)
        whole.push_async_callback(environment.close)
        if not keeper.KEEPERS:
            self.note(keeper.UNKEPT)
        expect_model(config.model)
        import_tokenizers()  # now, while the fork server imports its modules
        async with preparing(config, self.placement) as preparation:
            with in_one_sentence():
                of_class = await preparation.open_model(str(folder.path))
            self.model = ModelFolder.open(named_folder(config.model, folder.path, config.seed), of_class)
            with in_one_sentence():
                devices = await preparation.place(str(self.model.path), given_in(config))
            self.plan = plan_of(config, self.model.architecture, devices)
            self.config = config = self.plan.config
            await describe(self, preparation)
        note_changed_code(config.env, ledger, self.note)
        if ledger.next_group_id() > 0:
            expect_same_tasks(curriculum_of(config, environment), ledger, folder.path)
        elif config.judged:
            await audit_rewards(self)
        self._began, self._steps_before = time.monotonic(), ledger.next_step()
        await whole.enter_async_context(self._processes)

    async def start(self) -> None:
        """Warm up, unless this was done, and start trainer and engines with the weights that training begins with."""
        if self.weights is None:
            self.weights = await first_weights(self)
        starting = start_cluster(self.plan, self.weights.path, self.folder, self.placement, self.record_event, self.extras)
        self.cluster = await self._processes.enter_async_context(starting)

    async def train(self) -> None:
        """Train from where the record stands to the end, or until the user stops the run."""
        async with self.cluster.watched():
            with end_on_sigterm(self.note):
                controller = await build_controller(self, self.cluster)
            folder = self.folder.path
            async with (
                stop_on_signals(self, controller.stop),
                reporting(folder, self.cluster.handles, partial(self._now, controller)),
                answering(folder, self.cluster, os.getpid()),
            ):
                self.done = await controller.run()

    async def finish(self) -> RunEnded:
        """Write the trained model, end the processes, and write the report."""
        folder, config, complete = self.folder, self.config, self.done == self.config.steps
        if complete:
            await folder.write_final(self.cluster.trainer.export)
        await self._processes.aclose()
        report = make_report(self, self._steps_before, time.monotonic() - self._began)
        if config.record.trace:
            self.monitor.trace.write(folder.trace)
        if config.profile:
            recorded = merge(folder.profile, self.monitor.trace, folder.profiled)
            where = f"{folder.profiled}, for https://ui.perfetto.dev"
            self.note(f"profile: {where if recorded else f'nothing: no process saw {LAST} publications'}")
        folder.write_report(report, complete=complete)
        return RunEnded(self.done, complete, report)

    async def recover(self, lost: PeerLost) -> None:
        """End what a lost trainer left, and wait as the restart budget says. Raises `lost` if the run is to end."""
        await self._processes.aclose()
        task = asyncio.current_task()
        if not self.config.supervise.resume or (task and task.cancelling()):  # the group hides a cancellation
            raise lost
        await self.begin_again("all processes", lost)

    async def begin_again(self, what: str, lost: Exception) -> None:
        """Record that `what` starts again, and wait as the restart budget says. Raises RunFailed when it is spent."""
        cause = str(lost).partition("\n")[0]
        self.ledger.event("run_resumed", {"cause": cause, "restarted": what})
        pause = self._budget.spend(cause)
        self.note(f"{cause}; going on by itself with {what} started again" + (f" in {pause:g} s" if pause else ""))
        await asyncio.sleep(pause)

    def record_event(self, kind: str, detail: dict[str, Any]) -> None:
        self.ledger.event(kind, detail)
        self.note(worded(kind, detail).partition("\n")[0])

    def _make_environment(self, scorer: RewardPool) -> Environment:
        config, source, budget = self.config, self.folder.source, budget_of(self.config.supervise)

        def lost(reason: str) -> float:
            self.ledger.event("environment_worker_lost", {"reason": reason})
            self.note(f"environment worker lost: {reason}")
            return budget.spend(reason)

        environment = self._make(scorer, source) if self._make else make_environment(config.env, scorer)
        for note in notes_of(environment):
            self.note(note)
        for name, level in sandboxes_of(environment).items():
            self.record_event("sandbox", {"environment": name, "level": level})
        written = None if self._make else config.env
        return in_workers(environment, config.placement.environment, lost, self.note, written, source)

    def _now(self, controller: Controller) -> dict[str, Any]:
        """Entries of `status.json`."""
        of = self.monitor.engines, self.monitor.totals, self.plan, self.model.architecture
        share = engine_share(*of, older_s=SHARE_S)
        return {**position(controller, self.config.steps), **attempts(self.monitor.totals), "engine_share": share}

    def _record_end(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Record the failure that ends the run, and raise its first cause."""
        if error is None:
            return
        if self.folder.gone:
            self.folder.sweep()
            raise RunFolderGone(GONE.format(folder=self.folder.path)) from None
        cause = first_cause(error) if isinstance(error, BaseExceptionGroup) else error
        record_failure(self.folder.path, cause)
        if cause is not error:
            raise cause from None  # the other exceptions are only cancellations


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
