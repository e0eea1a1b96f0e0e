"""Builds a run's roles from plain specs: engine, trainer and preparation.

A role is described by a spec, plain data, so that the same function builds it in this process (`inline`) or in a process of
its own (`local`, by way of `role_main`). Heavy imports happen here, when a role is built. The process that roles are forked
from does them before (`import_roles`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from tidemill.algorithms.algorithm_settings import CriticSettings, ReferenceSettings
from tidemill.controller.engine_supervisor import Budget
from tidemill.core.config import Config, build
from tidemill.core.interfaces import Engine, Trainer
from tidemill.core.registry import Registry
from tidemill.core.types import Version
from tidemill.engine.engine_kinds import ENGINES, BaseEngineSettings, EngineSetup
from tidemill.observability.operator_profiler import attach
from tidemill.run.placement_kinds import PLACEMENTS, BasePlacementSettings, PlacementSetup
from tidemill.run.preflight.probe_process import Preparation, Preparer
from tidemill.run.recipe import RunConfig
from tidemill.run.recipe_tables import SuperviseSettings
from tidemill.runtime.cpu_sharing import Cores, Seat, SharedCores
from tidemill.runtime.placement import Built, Handle, Liveness, Placement
from tidemill.trainer.trainer_kinds import TRAINERS, BaseTrainerSettings, TrainerSetup
from tidemill.weight_sync.sync_settings import TRANSPORTS, BaseSyncSettings

T = TypeVar("T")

UNPUBLISHED = Version(-1)  # an engine's version before the first publication; nothing may be sampled from it
START_S = 300.0  # to import torch and read the weights
ENGINE_DEADLINES: dict[str, float] = {"generate": 3600.0, "score": 600.0, "update": 600.0}
REFERENCE_DEADLINES: dict[str, float] = {"score": 3600.0}  # a row waits for all those of its step
PREPARATION_DEADLINES: dict[str, float] = dict.fromkeys(("open_model", "check_memory", "extras"), START_S)
TRAINER_DEADLINES: dict[str, float] = dict.fromkeys(
    ("forward", "forward_backward", "apply", "publish", "snapshot", "save", "load", "export"), 3600.0
)


class EngineSpec(Config):
    """Spec of an engine that samples, or that serves a reference."""

    role: str = "engine"
    name: str = "engine-0"
    model: Path
    engine: BaseEngineSettings
    transport: str | None = None  # None: an engine that is never updated
    cached_versions: int = 2  # see `NativeEngine`
    seat: Seat | None = None  # None: its cores are its own
    profile: Path | None = None  # folder for `operator_profiler`


class TrainerSpec(Config):
    """Spec of the trainer."""

    role: str = "trainer"
    name: str = "trainer"
    model: Path
    trainer: BaseTrainerSettings
    steps: int
    reference: ReferenceSettings | None = None
    critic: CriticSettings | None = None
    scores: bool = False  # the critic is exported, as a reward model
    checkpoints: bool = True  # written beside training: see `NativeTrainer`
    sync: BaseSyncSettings
    folder: Path  # for transports that need one
    seed: int = 0
    seat: Seat | None = None
    threads: int = 1  # parallel micro-batches
    profile: Path | None = None


class PreparationSpec(Config):
    """Spec of the process that prepares a run."""

    role: str = "preparation"
    name: str = "preparation"
    recipe: RunConfig


REGISTRIES: dict[str, Registry] = {each.what: each for each in (ENGINES, TRAINERS, TRANSPORTS, PLACEMENTS)}


def build_role(spec: dict[str, Any], offload: bool = False) -> Built:
    """Build the object that `spec` describes.

    offload: do blocking work in a thread, so that the caller's event loop stays free. Raises ValueError for an unknown role.
    """
    kinds = spec.get("kinds", {})  # of the process that asks: it may have registered more than is built in
    for what, table in kinds.items():
        REGISTRIES[what].learn(table)
    spec = {key: value for key, value in spec.items() if key != "kinds"}
    match spec["role"]:
        case "engine" | "reference":
            return build_engine(build(EngineSpec, spec)), Engine
        case "trainer":
            return build_trainer(build(TrainerSpec, spec), offload), Trainer
        case "preparation":
            return build_preparer(build(PreparationSpec, spec), offload), Preparation
    raise ValueError(f"role {spec['role']!r}: expected 'engine', 'reference', 'trainer' or 'preparation'")


def build_engine(spec: EngineSpec) -> Engine:
    """The engine of the kind that its settings name."""
    receiver, version = None, Version(0)
    if spec.transport is not None:
        from tidemill.weight_sync.transport import make_receiver

        receiver, version = make_receiver(spec.transport), UNPUBLISHED
    cores = _cores(spec.seat, spec.engine.device)
    setup = EngineSetup(spec.model, spec.name, receiver, version, cores, spec.cached_versions)
    engine = ENGINES.builder_of(spec.engine.kind_name)(spec.engine, setup)
    if spec.profile is not None:
        attach(engine, "update", spec.name, spec.profile)
    return engine


def build_trainer(spec: TrainerSpec, offload: bool) -> Trainer:
    """The trainer of the kind that its settings name."""
    from tidemill.weight_sync.transport import make_sender

    setup = TrainerSetup(
        model=spec.model,
        name=spec.name,
        steps=spec.steps,
        reference=spec.reference,
        critic=spec.critic,
        scores=spec.scores,
        checkpoints=spec.checkpoints,
        sender=make_sender(spec.sync, spec.folder),
        seed=spec.seed,
        cores=_cores(spec.seat, spec.trainer.device),
        threads=spec.threads,
        offload=one_thread() if offload else None,
    )
    trainer = TRAINERS.builder_of(spec.trainer.kind_name)(spec.trainer, setup)
    if spec.profile is not None:
        attach(trainer, "publish", spec.name, spec.profile)
    return trainer


def build_preparer(spec: PreparationSpec, offload: bool) -> Preparer:
    from tidemill.trainer.native_trainer import inline

    return Preparer(spec.recipe, one_thread() if offload else inline)


def _cores(seat: Seat | None, device: str) -> Cores:
    """The role's share of the cores. A role on a GPU needs few of them and does not take turns."""
    from tidemill.engine.native.cache_size import device_of

    if seat is None or device_of(device) != "cpu":
        return Cores()
    try:
        return SharedCores(seat, use_threads)
    except OSError:  # it may not open the shared memory, so it does without
        return Cores()


def import_roles() -> None:
    """Import everything that roles need, so that processes forked from this one find it done."""
    import tidemill.engine.native.build_native_engine
    import tidemill.trainer.build_native_trainer
    import tidemill.weight_sync.transport  # noqa: F401
    from tidemill.models.kernels.library import native

    native()  # compile them, if need be, before the first child needs them


def use_threads(count: int) -> None:
    """Compute with `count` threads. After `import_roles` the environment variables have no effect."""
    import torch

    torch.set_num_threads(count)


def one_thread() -> Callable[[Callable[[], T]], asyncio.Future[T]]:
    """An executor that runs blocking functions one after another in one thread."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="compute")
    return lambda function: asyncio.get_running_loop().run_in_executor(executor, function)


def budget_of(supervise: SuperviseSettings) -> Budget:
    """A new restart budget by the recipe's `supervise`."""
    return Budget(supervise.restarts, supervise.window_s, supervise.backoff_s)


@asynccontextmanager
async def placed(settings: BasePlacementSettings, logs: Path, supervise: SuperviseSettings) -> AsyncIterator[Placement]:
    """The placement on which roles are started.

    The preparation of the first start begins at once, beside the caller's own work.
    """
    liveness = Liveness(supervise.heartbeat_s, supervise.silent_s, supervise.stuck_s)
    placement: Placement = PLACEMENTS.builder_of(settings.kind_name)(
        settings, PlacementSetup(build_role, logs, liveness, START_S)
    )
    placement.begin()
    try:
        yield placement
    finally:
        await placement.close()


@asynccontextmanager
async def start_engine(config: RunConfig, model: Path, logs: Path, threads: int) -> AsyncIterator[Engine]:
    """Start one engine that serves a folder's weights as version 0 and is never updated."""
    spec = EngineSpec(model=model, engine=config.engine)
    async with placed(config.placement, logs, config.supervise) as placement:
        handle = await start_role(placement, Engine, spec, "engine-0", threads, ENGINE_DEADLINES)
        try:
            yield handle.proxy
        finally:
            await handle.stop()


@asynccontextmanager
async def preparing(config: RunConfig, placement: Placement) -> AsyncIterator[Preparation]:
    """Start the process that prepares a run.

    It holds nothing, so it is killed at the end: an orderly exit takes longer than its start and its work.
    """
    spec = PreparationSpec(recipe=config)
    handle = await start_role(placement, Preparation, spec, "preparation", None, PREPARATION_DEADLINES)
    try:
        yield handle.proxy
    finally:
        handle.kill("is not needed any more")
        await handle.stop()


async def start_role(
    placement: Placement, protocol: type[T], spec: Config, name: str, threads: int | None, deadlines: dict[str, float]
) -> Handle[T]:
    """Start a role. deadlines: seconds by method of `protocol`. threads: CPU threads, or None."""
    tree = spec.model_dump(mode="json", exclude={"role", "name"})
    tree["kinds"] = {what: registry.table() for what, registry in REGISTRIES.items()}
    return await placement.start(protocol, name.split("-")[0], name, tree, threads, deadlines)
