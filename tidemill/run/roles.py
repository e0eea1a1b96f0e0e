"""Builders of a run's roles from plain specs: engine, trainer and preparation.

A spec is a settings object that travels as plain data. The same function builds a role in this process (`inline`) or in one
of its own (`local`, `role_main`), which is forked from one that has done the heavy imports (`import_roles`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tidemill.controller.engine_supervisor import Budget
from tidemill.controller.trainer_group import TrainerGroup
from tidemill.core.config import Config, build
from tidemill.core.interfaces import Engine, Trainer
from tidemill.core.registry import Registry
from tidemill.engine.engine_kinds import ENGINES, EngineSpec
from tidemill.observability.operator_profiler import attach
from tidemill.run.placement_kinds import PLACEMENTS, BasePlacementSettings, PlacementSetup
from tidemill.run.preflight.probe_process import Preparation
from tidemill.run.recipe import RunConfig
from tidemill.run.recipe_tables import SuperviseSettings
from tidemill.runtime.cpu_sharing import Cores, CoreShare, SharedCores
from tidemill.runtime.placement import Built, Handle, Liveness, Placement, Resources
from tidemill.trainer.trainer_kinds import TRAINERS, TrainerSpec
from tidemill.weight_sync.sync_settings import TRANSPORTS

if TYPE_CHECKING:
    from tidemill.trainer.telemetry import Offload

T = TypeVar("T")

START_S = 300.0  # to import torch and read the weights
READY_S = 3600.0  # for an engine to say what it can do: it waits for a server, whose start has a limit of its own
ENGINE_DEADLINES: dict[str, float] = {"generate": 3600.0, "score": 600.0, "update": 600.0, "sleep": 3600.0, "wake": 600.0}
ENGINE_DEADLINES["capabilities"] = READY_S
REFERENCE_DEADLINES: dict[str, float] = {"score": 3600.0, "capabilities": READY_S}  # a row waits for all those of its step
PREPARATION_DEADLINES: dict[str, float] = dict.fromkeys(("open_model", "place", "check_memory", "frozen", "extras"), START_S)
TRAINER_DEADLINES: dict[str, float] = dict.fromkeys(
    (
        *("forward", "forward_backward", "apply", "publish", "send", "snapshot"),
        *("save", "load", "export", "sleep", "wake"),
    ),
    3600.0,
)


class PreparationSpec(Config):
    role: str = "preparation"
    name: str = "preparation"
    recipe: RunConfig


REGISTRIES: dict[str, Registry] = {each.what: each for each in (ENGINES, TRAINERS, TRANSPORTS, PLACEMENTS)}


def build_role(spec: dict[str, Any], offload: bool = False) -> Built:
    """Build what `spec` describes, with a thread for blocking work if `offload`."""
    kinds = spec.get("kinds", {})  # of the process that asks: it may have registered more than is built in
    for what, table in kinds.items():
        REGISTRIES[what].learn(table)
    spec = {key: value for key, value in spec.items() if key != "kinds"}
    match spec["role"].partition("-")[0]:  # engines of one of several policies are "engine-NAME"
        case "engine" | "reference":
            return build_engine(build(EngineSpec, spec)), Engine
        case "trainer":
            return build_trainer(build(TrainerSpec, spec), offload), Trainer
        case "preparation":
            return Preparation(build(PreparationSpec, spec).recipe, _calls(offload)), Preparation
    raise ValueError(f"role {spec['role']!r}: expected 'engine', 'reference', 'trainer' or 'preparation'")


def build_engine(spec: EngineSpec) -> Engine:
    from tidemill.weight_sync.transport import make_receiver

    receiver = None if spec.transport is None else make_receiver(spec.transport)
    engine = ENGINES.builder_of(spec.engine.kind_name)(spec, receiver, _cores(spec.core_share, spec.engine.device))
    if spec.profile is not None:
        attach(engine, "update", spec.name, spec.profile, max(1, len(spec.policies)))
    return engine


def build_trainer(spec: TrainerSpec, offload: bool) -> Trainer:
    from tidemill.weight_sync.transport import make_sender

    several, cores = spec.trainer.ranks > 1, _cores(spec.core_share, spec.trainer.device)
    if spec.policies:
        from tidemill.trainer.build_native_trainer import build_policies

        senders = {name: make_sender(spec.sync, spec.folder / name) for name in spec.policies}
        trainer = build_policies(spec, senders, cores, _calls(offload))
    else:
        sender = make_sender(spec.sync, spec.folder / f"rank-{spec.rank}" if several else spec.folder, partial=several)
        trainer = TRAINERS.builder_of(spec.trainer.kind_name)(spec, sender, cores, _calls(offload))
    if spec.profile is not None:
        attach(trainer, "publish", spec.name, spec.profile, max(1, len(spec.policies)))
    return trainer


def _calls(offload: bool) -> Offload:
    """The way to call blocking functions: in a thread of their own, or directly."""
    from tidemill.trainer.native_trainer import inline

    return one_thread() if offload else inline


def _cores(share: CoreShare | None, device: str) -> Cores:
    """The role's share of the cores. A role on a GPU needs few of them and does not take turns."""
    from tidemill.engine.native.cache_size import device_of

    if share is None or device_of(device) != "cpu":
        return Cores()
    try:
        return SharedCores(share, use_threads)
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
    """The placement on which roles are started. It begins to start processes at once."""
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
async def start_engine(
    config: RunConfig,
    model: Path,
    logs: Path,
    threads: int,
    frozen: Mapping[str, Path] | None = None,
    serves: str | None = None,
) -> AsyncIterator[Engine]:
    """Start one engine that serves a folder's weights as version 0 and is never updated.

    frozen: PEFT folders by the name of the policy, which it serves in place of the folder's weights alone. serves: the
    policy that the folder's weights are, whose version then has their fingerprint.
    """
    base_dtype = config.adapter_base if frozen else "float32"  # of a model that stands for itself
    spec = EngineSpec(model=model, engine=config.engine, logs=logs, frozen=dict(frozen or {}), base_dtype=base_dtype)
    if serves is not None:
        spec = spec.model_copy(update={"serves": serves, "proves": True})
    async with placed(config.placement, logs, config.supervise) as placement:
        handle = await start_role(placement, Engine, spec, Resources(threads), ENGINE_DEADLINES)
        try:
            yield handle.proxy
        finally:
            await handle.stop()


@asynccontextmanager
async def preparing(config: RunConfig, placement: Placement) -> AsyncIterator[Preparation]:
    """Start the process that prepares a run; the end kills it, as it holds nothing."""
    handle = await start_role(placement, Preparation, PreparationSpec(recipe=config), Resources(), PREPARATION_DEADLINES)
    try:
        yield handle.proxy
    finally:
        handle.kill("is not needed any more")
        await handle.stop()


async def start_trainer(
    placement: Placement, specs: Sequence[TrainerSpec], resources: Sequence[Resources]
) -> Handle[Trainer]:
    """Start a trainer, or all its ranks as one. specs, resources: one for each rank."""
    if len(specs) == 1:
        return await start_role(placement, Trainer, specs[0], resources[0], TRAINER_DEADLINES)
    trees = {spec.name: _tree(spec) for spec in specs}
    group = await placement.start_group(Trainer, specs[0].role, trees, resources, TRAINER_DEADLINES)
    group.proxy = TrainerGroup([handle.proxy for handle in group.handles], group.kill)
    return group


async def start_role(
    placement: Placement,
    protocol: type[T],
    spec: EngineSpec | TrainerSpec | PreparationSpec,
    resources: Resources,
    deadlines: dict[str, float],
) -> Handle[T]:
    """Start a role. deadlines: seconds by method of `protocol`."""
    return await placement.start(protocol, spec.role, spec.name, _tree(spec), resources, deadlines)


def _tree(spec: EngineSpec | TrainerSpec | PreparationSpec) -> dict[str, Any]:
    """A spec as plain data, with the kinds that this process knows."""
    kinds = {what: registry.table() for what, registry in REGISTRIES.items()}
    return spec.model_dump(mode="json", exclude={"role", "name"}) | {"kinds": kinds}
