"""The processes of a run: started together, watched, and stopped together.

trainer + engines (+ engines that serve the reference) -> Parts: the proxies, and the supervisors that restart engines
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tidemill.controller.controller import first_cause
from tidemill.controller.engine_pool import EnginePool
from tidemill.controller.engine_supervisor import Supervisor
from tidemill.controller.reference_pool import WithServedReference
from tidemill.core.errors import PeerDied, PolicyMismatch
from tidemill.core.interfaces import Capabilities, Engine, Trainer
from tidemill.core.token_extras import TokenExtra
from tidemill.run.capability_check import adapted, check_engine
from tidemill.run.recipe import RunConfig
from tidemill.run.roles import (
    ENGINE_DEADLINES,
    REFERENCE_DEADLINES,
    TRAINER_DEADLINES,
    EngineSpec,
    TrainerSpec,
    budget_of,
    start_role,
)
from tidemill.runtime.cpu_sharing import seats
from tidemill.runtime.placement import Handle, Placement
from tidemill.trainer.trainer_kinds import folder_of

T = TypeVar("T")
GRACE_S = 1.0  # for the report of a process's end to arrive


@dataclass(frozen=True, slots=True)
class Parts:
    """The trainer and the engine pools of a run, with their supervisors."""

    trainer: Trainer
    pools: list[EnginePool]  # the rollouts' pool, then a served reference's
    supervisors: list[Supervisor]  # one for each pool
    capabilities: list[Capabilities]  # of every engine, as it said at its start
    handles: Callable[[], list[Handle[Any]]]  # the present processes: the trainer's, then the engines'

    @property
    def pool(self) -> EnginePool:
        """The engine pool that rollouts are sampled from."""
        return self.pools[0]

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Restart engines that end while the body runs.

        When an engine cannot be restarted, or the trainer ends, the body ends with that cause.
        """
        try:
            async with asyncio.TaskGroup() as group:
                works = [*(each.run() for each in self.supervisors), self._trainer_ends()]
                watching = [group.create_task(work) for work in works]
                yield
                for each in watching:
                    each.cancel()
        except BaseExceptionGroup as failures:
            cause = first_cause(failures)
            if isinstance(cause, PolicyMismatch):  # perhaps because the trainer ended
                ending = asyncio.ensure_future(self._trainer_ends())
                await asyncio.wait({ending}, timeout=GRACE_S)
                if ending.done():
                    cause = ending.exception() or cause
                ending.cancel()
            raise cause from failures

    async def _trainer_ends(self) -> None:
        handle = self.handles()[0]
        raise PeerDied(handle.name, await handle.wait())  # bounded: it watches, for as long as the run goes on


@asynccontextmanager
async def start_parts(
    config: RunConfig,
    trainer: TrainerSpec,
    placement: Placement,
    tell: Callable[[str, dict[str, Any]], None],
    extras: Sequence[TokenExtra] = (),
) -> AsyncIterator[Parts]:
    """Start trainer and engines side by side, and stop them at the end, however it comes.

    tell: called with (kind of event, details) for each engine that was lost or came back. extras: asked of engines.
    """
    settings, supervise = config.placement, config.supervise
    transport, threads = settings.sync.kind_name, settings.engine_threads
    cached = config.max_lag + 1  # an older episode cannot be trained on any more
    engine = EngineSpec(model=trainer.model, engine=config.engine, transport=transport, cached_versions=cached)
    specs = {"engine": engine.model_copy(update={"profile": trainer.profile})}
    counts, deadlines = {"engine": settings.engines}, {"engine": ENGINE_DEADLINES, "reference": REFERENCE_DEADLINES}
    if settings.reference_engines and (folder := folder_of(trainer.reference, trainer.model)) is not None:
        specs["reference"] = EngineSpec(model=folder, engine=config.engine)
        counts["reference"] = settings.reference_engines
        trainer = trainer.model_copy(update={"reference": None})

    started: list[Handle[Any]] = []
    capabilities, told = dict[str, Capabilities](), set[str]()

    async def kept(starting: Awaitable[Handle[T]]) -> Handle[T]:
        handle = await starting  # bounded: a start has a deadline
        started.append(handle)  # at once: a sibling's failure must not leave it running
        return handle

    async def start_engine(role: str, index: int) -> Handle[Engine]:
        name = f"{role}-{index}"
        spec = specs[role].model_copy(update={"seat": shared.get(name)})
        handle = await kept(start_role(placement, Engine, spec, name, threads, deadlines[role]))
        can = capabilities[name] = await handle.proxy.capabilities()
        for said in check_engine(config.engine.kind_name, can, config, role, extras):
            if said not in told:
                told.add(said)
                tell("engine_adapted", {"how": said})
        return adapted(handle, can)

    async with AsyncExitStack() as stack:
        wanted = {"trainer": settings.trainer_threads}
        wanted |= {f"{role}-{i}": threads for role in counts for i in range(counts[role])}
        shared = stack.enter_context(seats(wanted if config.shares_cores else {}))
        stack.push_async_callback(_stop_all, started)
        trainer = trainer.model_copy(update={"seat": shared.get("trainer"), "threads": config.lanes})
        starting = start_role(placement, Trainer, trainer, "trainer", settings.trainer_threads, TRAINER_DEADLINES)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(kept(starting))
            others = {role: [group.create_task(start_engine(role, i)) for i in range(counts[role])] for role in counts}
        handles = {role: [task.result() for task in tasks] for role, tasks in others.items()}
        pools = {role: EnginePool([handle.proxy for handle in of]) for role, of in handles.items()}
        budget = partial(budget_of, supervise)
        supervisors = [Supervisor(pools[role], handles[role], partial(start_engine, role), budget, tell) for role in counts]
        handle = first.result()
        learner = WithServedReference(handle.proxy, pools["reference"]) if "reference" in pools else handle.proxy
        yield Parts(
            *(learner, list(pools.values()), supervisors, list(capabilities.values())),
            lambda: [handle, *(each for supervisor in supervisors for each in supervisor.handles)],
        )


async def _stop_all(handles: list[Handle[Any]]) -> None:
    """Stop all processes side by side. Raises the first failure once all have been tried."""
    results = await asyncio.gather(*(handle.stop() for handle in handles), return_exceptions=True)
    if failed := [result for result in results if isinstance(result, BaseException)]:
        raise failed[0]
