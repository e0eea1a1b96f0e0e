"""The processes of a run: started together, watched, and stopped together.

trainer + engines (+ engines that serve the reference) -> Parts: the proxies, and the supervisors that restart engines
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tidemill.controller.controller import first_cause
from tidemill.controller.engine_pool import EnginePool, Member
from tidemill.controller.engine_supervisor import Supervisor
from tidemill.controller.reference_pool import WithServedReference
from tidemill.core.errors import PeerDied, PolicyMismatch
from tidemill.core.interfaces import Capabilities, Engine, Trainer
from tidemill.core.token_extras import TokenExtra
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.run.capability_check import adapted, check_context, check_engine
from tidemill.run.planner.plan import RunPlan
from tidemill.run.roles import ENGINE_DEADLINES, REFERENCE_DEADLINES, TRAINER_DEADLINES, budget_of, start_role
from tidemill.run.storage.run_folder import RunFolder
from tidemill.runtime.cpu_sharing import CoreShare, core_board
from tidemill.runtime.placement import Handle, Placement
from tidemill.trainer.trainer_kinds import TrainerSpec, folder_of

T = TypeVar("T")
GRACE_S = 1.0  # for the report of a process's end to arrive


@dataclass(frozen=True, slots=True)
class Parts:
    """The trainer and the engine pools of a run, with their supervisors."""

    trainer: Trainer
    pools: list[EnginePool]  # the rollouts' pool, then a served reference's
    supervisors: list[Supervisor]  # one for each pool
    handles: Callable[[], list[Handle[Any]]]  # the present processes: the trainer's, then the engines'

    @property
    def pool(self) -> EnginePool:
        """The engine pool that rollouts are sampled from."""
        return self.pools[0]

    @property
    def capabilities(self) -> list[Capabilities]:
        """The capabilities of each present engine, as it said at its own start."""
        return [member.can for pool in self.pools for member in pool.members]

    async def join(self) -> str:
        """Start one more engine for rollouts. It samples once it serves the version in force. Returns its name."""
        return await self.supervisors[0].add()

    async def drain(self, name: str, *, hand_over: bool = False) -> None:
        """Let an engine end its requests (hand_over: give them to others), leave the pool, and stop it."""
        await self.supervisors[0].remove(name, hand_over=hand_over)

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


def trainer_spec(plan: RunPlan, model: Path, folder: RunFolder, share: CoreShare | None = None) -> TrainerSpec:
    """The spec of a run's trainer, or of its warm-up's. model: the folder that it starts from."""
    config = plan.config
    spec = TrainerSpec(
        model=model,
        trainer=config.trainer,
        steps=1,  # of a warm-up, whose constant rate has no end
        checkpoints=plan.saves_beside,
        sync=config.placement.sync,
        folder=folder.weights,
        seed=config.seed,
        core_share=share,
        threads=plan.lanes,
    )
    if plan.warm_up:
        return spec
    own = {
        "steps": config.steps * plan.updates,
        "reference": None if config.placement.reference_engines else config.reference,
        "critic": config.critic,
        "scores": config.scores,
        "profile": _profile(plan, folder),
    }
    return spec.model_copy(update=own)


def engine_specs(plan: RunPlan, model: Path, folder: RunFolder) -> dict[str, EngineSpec]:
    """The specs of a run's engines by role, before they have a name and a share of the cores."""
    config = plan.config
    specs = {
        "engine": EngineSpec(
            model=model,
            engine=config.engine,
            transport=config.placement.sync.kind_name,
            cached_versions=config.max_lag + 1,  # an older episode cannot be trained on any more
            profile=_profile(plan, folder),
        )
    }
    served = folder_of(config.reference, model)
    if config.placement.reference_engines and served is not None:
        specs["reference"] = EngineSpec(role="reference", model=served, engine=config.engine)
    return specs


def _profile(plan: RunPlan, folder: RunFolder) -> Path | None:
    return folder.profile if plan.config.profile and not plan.warm_up else None


@asynccontextmanager
async def start_parts(
    plan: RunPlan,
    model: Path,
    folder: RunFolder,
    placement: Placement,
    tell: Callable[[str, dict[str, Any]], None],
    extras: Sequence[TokenExtra] = (),
) -> AsyncIterator[Parts]:
    """Start trainer and engines side by side, and stop them at the end, however it comes.

    model: the folder that they start from. tell: called with (kind of event, details) for each engine that was lost or came
    back. extras: asked of engines.
    """
    config, settings = plan.config, plan.config.placement
    specs, deadlines = engine_specs(plan, model, folder), {"engine": ENGINE_DEADLINES, "reference": REFERENCE_DEADLINES}
    counts = {role: {"engine": settings.engines, "reference": settings.reference_engines}[role] for role in specs}
    threads, started = settings.engine_threads, list[Handle[Any]]()
    pools, told, limit = dict[str, EnginePool](), set[str](), 0

    async def start(protocol: type[T], *how: Any) -> Handle[T]:
        handle = await start_role(placement, protocol, *how)
        started.append(handle)  # at once: a sibling's failure must not leave it running
        return handle

    async def start_engine(role: str, name: str) -> Handle[Engine]:
        spec = specs[role].model_copy(update={"name": name, "core_share": board.share(name, threads)})
        return await start(Engine, spec, threads, deadlines[role])

    async def member_of(role: str, handle: Handle[Engine]) -> Member:
        can = await handle.proxy.capabilities()
        adaptations = check_engine(config.engine.kind_name, can, config, role, extras)
        if limit:  # of the engines that the run began with
            adaptations += check_context(handle.name, can, limit, config, role)
        for said in adaptations:
            if said not in told:
                told.add(said)
                tell("engine_adapted", {"how": said})
        return Member(handle.name, adapted(handle.proxy, can), can)

    async def begun(role: str, name: str) -> tuple[Handle[Engine], Member]:
        handle = await start_engine(role, name)
        return handle, await member_of(role, handle)

    async with AsyncExitStack() as stack:
        board = stack.enter_context(core_board(max(settings.trainer_threads, threads) if plan.shares_cores else 1))
        stack.push_async_callback(_stop_all, started)
        spec = trainer_spec(plan, model, folder, board.share("trainer", settings.trainer_threads))
        starting = start(Trainer, spec, settings.trainer_threads, TRAINER_DEADLINES)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(starting)
            others = {role: [group.create_task(begun(role, f"{role}-{i}")) for i in range(counts[role])] for role in counts}
        supervisors = list[Supervisor]()
        for role, tasks in others.items():
            handles, members = zip(*(task.result() for task in tasks), strict=True)
            pools[role] = EnginePool(members)
            how = partial(start_engine, role), partial(member_of, role), partial(budget_of, config.supervise), tell
            supervisors.append(Supervisor(pools[role], role, handles, *how))
        limit = min(pool.context for pool in pools.values())
        handle = first.result()
        learner: Trainer = handle.proxy
        if "reference" in pools:
            learner = WithServedReference(learner, pools["reference"])
        yield Parts(
            *(learner, list(pools.values()), supervisors),
            lambda: [handle, *(each for supervisor in supervisors for each in supervisor.handles.values())],
        )


async def _stop_all(handles: list[Handle[Any]]) -> None:
    """Stop all processes side by side. Raises the first failure once all have been tried."""
    results = await asyncio.gather(*(handle.stop() for handle in handles), return_exceptions=True)
    if failed := [result for result in results if isinstance(result, BaseException)]:
        raise failed[0]
