"""The processes of a run: trainer, engines and engines of the reference, started, watched and stopped together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from tidemill.controller.device_turns import DeviceTurns
from tidemill.controller.engine_pool import EnginePool, Member
from tidemill.controller.engine_supervisor import Supervisor
from tidemill.controller.first_cause import first_cause, trainer_loss
from tidemill.controller.policy_pools import PolicyPools, Pool
from tidemill.controller.reference_pool import WithServedReference
from tidemill.core.interfaces import Capabilities, Engine, Trainer
from tidemill.core.token_extras import TokenExtra
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.run.capability_check import adapted, check_context, check_engine
from tidemill.run.planner.plan import RunPlan
from tidemill.run.recipe import RunConfig
from tidemill.run.replaceable_trainer import ReplaceableTrainer
from tidemill.run.roles import ENGINE_DEADLINES, REFERENCE_DEADLINES, budget_of, start_role, start_trainer
from tidemill.run.storage.run_folder import RunFolder
from tidemill.runtime.cpu_sharing import CoreBoard, CoreShare, core_board
from tidemill.runtime.placement import Handle, Placement, Resources, members_of
from tidemill.trainer.trainer_kinds import PolicySpec, TrainerSpec, folder_of

ENGINE, REFERENCE = "engine", "reference"  # roles


@dataclass(frozen=True, slots=True)
class Cluster:
    """The trainer and the engine pools of a run, with their supervisors."""

    trainer: Trainer
    process: ReplaceableTrainer  # the trainer's
    pool: Pool  # that rollouts are sampled from
    pools: dict[str, EnginePool]  # by role: those of rollouts, then a served reference's
    supervisors: dict[str, Supervisor]  # by role
    turns: DeviceTurns  # of trainer and rollout engines on one device; a reference's engines serve the trainer
    handles: Callable[[], list[Handle[Any]]]  # the present processes: the trainer's, then the engines'

    @property
    def capabilities(self) -> list[Capabilities]:
        """The capabilities of each present engine, as it said at its own start."""
        return [member.can for pool in self.pools.values() for member in pool.members]

    async def join(self) -> str:
        """Start one more engine for rollouts, in the pool with the most load.

        It samples once it serves the versions in force. Returns its name.
        """
        role = max((role for role in self.pools if role != REFERENCE), key=lambda role: self.pools[role].load)
        return await self.supervisors[role].add()

    async def drain(self, name: str, *, hand_over: bool = False) -> None:
        """Let an engine end its requests (hand_over: give them to others), leave the pool, and stop it."""
        role = name.rpartition("-")[0]
        if role not in self.supervisors or role == REFERENCE:
            known = ", ".join(member.name for own, pool in self.pools.items() if own != REFERENCE for member in pool.members)
            raise ValueError(f"drain({name!r}): no such engine samples rollouts; these do: {known or 'none'}")
        await self.supervisors[role].remove(name, hand_over=hand_over)

    @asynccontextmanager
    async def watched(self, trainer: bool = False) -> AsyncIterator[None]:
        """Restart engines that end while the body runs. It ends when one cannot be restarted.

        trainer: it also ends when the trainer does, which the body need not notice.
        """
        try:
            async with asyncio.TaskGroup() as group:
                works = [*(each.run() for each in self.supervisors.values()), *([self.process.ends()] if trainer else [])]
                watching = [group.create_task(work) for work in works]
                yield
                for each in watching:
                    each.cancel()
        except BaseExceptionGroup as failures:
            try:
                cause = await trainer_loss(failures, self.process.ends)
            except BaseExceptionGroup:
                cause = first_cause(failures)
            raise cause from failures


def trainer_specs(plan: RunPlan, model: Path, folder: RunFolder, board: CoreBoard) -> list[TrainerSpec]:
    """The specs of a run's trainer, one for each rank. model: the folder that it starts from."""
    names = ["trainer", *(f"trainer-{rank}" for rank in range(1, plan.config.trainer.ranks))]
    threads = plan.config.placement.trainer_threads
    return [trainer_spec(plan, model, folder, board.share(name, threads), name) for name in names]


def trainer_spec(
    plan: RunPlan, model: Path, folder: RunFolder, share: CoreShare | None = None, name: str = "trainer"
) -> TrainerSpec:
    """The spec of a run's trainer, or of its warm-up's, or of one of its ranks. model: the folder that it starts from."""
    config, warm_up = plan.config, plan.warm_up
    return TrainerSpec(
        name=name,
        model=model,
        trainer=config.trainer,
        steps=1 if warm_up else config.steps * plan.updates,  # the constant rate of a warm-up has no end
        checkpoints=plan.saves_beside,
        sync=config.placement.sync,
        folder=folder.weights,
        seed=config.seed,
        core_share=share,
        threads=plan.lanes,
        reference=None if warm_up or config.placement.reference_engines else config.reference,
        critic=None if warm_up else config.critic,
        policies={name: _policy_spec(config, name) for name in config.trained_policies} if config.policies else {},
        scores=not warm_up and config.scores,
        profile=_profile(plan, folder),
    )


def _policy_spec(config: RunConfig, name: str) -> PolicySpec:
    """The spec of one of several trained policies."""
    updates = max(each.updates.count for each in config.policy_algorithms[name].values())
    lr = config.policies[name].lr or config.trainer.lr
    return PolicySpec(lr=lr, lora=config.adapters.get(name), steps=config.steps * updates)


def engine_specs(plan: RunPlan, model: Path, folder: RunFolder) -> dict[str, EngineSpec]:
    """The specs of a run's engines by role, before they have a name and a share of the cores."""
    config = plan.config
    common = EngineSpec(
        model=model,
        engine=config.engine,
        transport=config.placement.sync.kind_name,
        cached_versions=config.max_lag + 1,  # an older episode cannot be trained on any more
        sleeps=plan.takes_turns,
        profile=_profile(plan, folder),
        logs=folder.logs,
    )
    own = {"adapter_rank": config.adapter_rank, "base_dtype": config.adapter_base}
    specs = _of_policies(config, common) if config.policies else {ENGINE: common.model_copy(update=own)}
    served = folder_of(config.reference, model)
    if config.placement.reference_engines and served is not None:
        specs[REFERENCE] = EngineSpec(role=REFERENCE, model=served, engine=config.serves_reference, logs=folder.logs)
    return specs


def _of_policies(config: RunConfig, common: EngineSpec) -> dict[str, EngineSpec]:
    """The specs of the engines of several policies: of all adapters, then of each whole model."""
    specs, folders, never = dict[str, EngineSpec](), config.frozen_folders, {"transport": None, "profile": None}
    if config.side_by_side:
        trained = tuple(config.adapters)
        frozen = {name: folders[name] for name in config.side_by_side if name in folders}
        own = {"policies": trained, "frozen": frozen, "adapter_rank": config.adapter_rank}
        own |= {"base_dtype": config.adapter_base}
        specs[ENGINE] = common.model_copy(update=own if trained else own | never)
    for name in config.whole_policies:
        own = {"role": role_of(name), "serves": name}
        if name in folders:
            own |= never | {"model": folders[name], "proves": True}
        specs[role_of(name)] = common.model_copy(update=own)
    return specs


def role_of(policy: str) -> str:
    """The role of the engines that serve a policy which is a whole model."""
    return f"{ENGINE}-{policy}"


def _profile(plan: RunPlan, folder: RunFolder) -> Path | None:
    return folder.profile if plan.config.profile and not plan.warm_up else None


@dataclass(slots=True)
class _Starter:
    """Starts the processes of a run, and checks what its engines can do."""

    plan: RunPlan
    placement: Placement
    engines: dict[str, EngineSpec]  # by role
    board: CoreBoard
    extras: Sequence[TokenExtra]
    on_event: Callable[[str, dict[str, Any]], None]
    context: int = 0  # tokens, of the engines that the run began with; 0: they are being started
    told: set[str] = field(default_factory=set)  # adaptations
    started: list[Handle[Any]] = field(default_factory=list)

    async def trainer(self, specs: Sequence[TrainerSpec]) -> Handle[Trainer]:
        threads = self.plan.config.placement.trainer_threads
        handle = await start_trainer(self.placement, specs, [Resources(threads, each) for each in self.plan.devices.trainer])
        self.started.append(handle)  # at once: a sibling's failure must not leave it running
        return handle

    async def engine(self, role: str, name: str) -> Handle[Engine]:
        threads = self.plan.config.placement.engine_threads
        spec = self.engines[role].model_copy(update={"name": name, "core_share": self.board.share(name, threads)})
        deadlines = REFERENCE_DEADLINES if role == REFERENCE else ENGINE_DEADLINES
        resources = Resources(threads, self.plan.devices.of(role, name))
        handle = await start_role(self.placement, Engine, spec, resources, deadlines)
        self.started.append(handle)
        return handle

    async def member(self, role: str, handle: Handle[Engine]) -> Member:
        can, config = await handle.proxy.capabilities(), self.plan.config
        spec = self.engines[role]
        kind, updated = spec.engine.kind_name, spec.transport is not None
        adaptations = check_engine(kind, can, config, role, self.extras, self.plan.takes_turns, updated)
        if self.context:
            adaptations += check_context(handle.name, can, self.context, config, role)
        for said in adaptations:
            if said not in self.told:
                self.told.add(said)
                self.on_event("engine_adapted", {"how": said})
        return Member(handle.name, adapted(handle.proxy, can), can)

    async def first(self, role: str, name: str) -> tuple[Handle[Engine], Member]:
        handle = await self.engine(role, name)
        return handle, await self.member(role, handle)


@asynccontextmanager
async def start_cluster(
    plan: RunPlan,
    model: Path,
    folder: RunFolder,
    placement: Placement,
    on_event: Callable[[str, dict[str, Any]], None],
    extras: Sequence[TokenExtra] = (),
) -> AsyncIterator[Cluster]:
    """Start trainer and engines side by side, and stop them at the end, however it comes.

    model: the folder that they start from. on_event: called with (kind, details) for each engine that was lost, came back or
    is adapted to. extras: asked of engines.
    """
    config, settings, specs = plan.config, plan.config.placement, engine_specs(plan, model, folder)
    counts = {role: settings.reference_engines if role == REFERENCE else settings.engines for role in specs}
    names = {role: [f"{role}-{i}" for i in range(count)] for role, count in counts.items()}
    threads = settings.trainer_threads
    async with AsyncExitStack() as stack:
        board = stack.enter_context(core_board(max(threads, settings.engine_threads) if plan.shares_cores else 1))
        starter = _Starter(plan, placement, specs, board, extras, on_event)
        stack.push_async_callback(_stop_all, starter.started)
        learners = trainer_specs(plan, model, folder, board)
        async with asyncio.TaskGroup() as group:
            learning = group.create_task(starter.trainer(learners))
            serving = {role: [group.create_task(starter.first(role, name)) for name in names[role]] for role in specs}
        pools, supervisors = dict[str, EnginePool](), dict[str, Supervisor]()
        for role, tasks in serving.items():
            handles, members = zip(*(task.result() for task in tasks), strict=True)
            pools[role] = EnginePool(members)
            start, member = partial(starter.engine, role), partial(starter.member, role)
            budget = partial(budget_of, config.supervise)
            supervisors[role] = Supervisor(pools[role], role, handles, start, member, budget, on_event)
        starter.context = min(pool.context for pool in pools.values())
        process = ReplaceableTrainer(learning.result(), partial(starter.trainer, learners))
        trainer = cast(Trainer, process)
        if REFERENCE in pools:
            trainer = cast(Trainer, WithServedReference(trainer, pools[REFERENCE]))
        yield Cluster(
            *(trainer, process, _sampled(specs, pools), pools, supervisors),
            DeviceTurns(trainer, pools[ENGINE]) if plan.takes_turns else DeviceTurns(),
            lambda: [*members_of(process.handle), *(h for each in supervisors.values() for h in each.handles.values())],
        )


def _sampled(specs: dict[str, EngineSpec], pools: dict[str, EnginePool]) -> Pool:
    """The pool that rollouts are sampled from: the only one, or that of each policy."""
    found = dict[str, EnginePool]()
    for role, pool in pools.items():
        if role != REFERENCE:
            found |= dict.fromkeys(specs[role].names or (specs[role].serves,), pool)
    return next(iter(found.values())) if len({*found.values()}) == 1 else PolicyPools(found)


async def _stop_all(handles: list[Handle[Any]]) -> None:
    """Stop all processes side by side. Raises the first failure once all have been tried."""
    results = await asyncio.gather(*(handle.stop() for handle in handles), return_exceptions=True)
    if failed := [result for result in results if isinstance(result, BaseException)]:
        raise failed[0]
