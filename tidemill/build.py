"""Where concrete classes are known: settings in, running parts out.

A role is described by a spec, plain data, so that the same function builds it in this process (`inline`) or in a process of
its own (`local`, by way of `remote_worker`). Heavy imports happen here, when a role is built, and nowhere on the way; the
process that roles are forked from does them before (`import_roles`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tidemill.algorithms.settings import CriticSettings, ReferenceSettings
from tidemill.config import Config, build
from tidemill.controller import first_cause
from tidemill.engine.settings import EngineSettings
from tidemill.orchestration.inline import Inline
from tidemill.orchestration.local import Local
from tidemill.orchestration.placement import Built, Handle, Liveness, Placement
from tidemill.orchestration.wire import PeerDied
from tidemill.pool import EnginePool
from tidemill.protocols import Engine, PolicyMismatch, Trainer
from tidemill.recipe import PlacementSettings, RunConfig, SuperviseSettings
from tidemill.supervision import Budget, Supervisor
from tidemill.sync.settings import SyncSettings
from tidemill.trainer.settings import TrainerSettings
from tidemill.types import Version

T = TypeVar("T")

UNPUBLISHED = Version(-1)  # what an engine holds before the first publication; nothing may be sampled from it
GRACE_S = 1.0  # for the news of a process's end to arrive
START_S = 300.0  # to import torch and read the weights
ENGINE_DEADLINES: dict[str, float] = {"generate": 3600.0, "score": 600.0, "update": 600.0}
TRAINER_DEADLINES: dict[str, float] = dict.fromkeys(
    ("forward", "forward_backward", "apply", "publish", "snapshot", "save", "load", "export"), 3600.0
)


class EngineSpec(Config):
    role: str = "engine"
    name: str = "engine-0"
    model: Path
    engine: EngineSettings
    carrier: str | None = None  # None: an engine that is never updated


class TrainerSpec(Config):
    role: str = "trainer"
    name: str = "trainer"
    model: Path
    trainer: TrainerSettings
    steps: int
    reference: ReferenceSettings | None = None
    critic: CriticSettings | None = None
    sync: SyncSettings
    folder: Path  # for carriers that need one
    seed: int = 0


def build_role(spec: dict[str, Any], offload: bool = False) -> Built:
    """The object that `spec` describes. offload: blocking work goes to a thread, so that the caller's loop stays free."""
    match spec["role"]:
        case "engine":
            return build_engine(build(EngineSpec, spec)), Engine
        case "trainer":
            return build_trainer(build(TrainerSpec, spec), offload), Trainer
    raise ValueError(f"role {spec['role']!r}: expected 'engine' or 'trainer'")


def build_engine(spec: EngineSpec) -> Engine:
    import torch

    from tidemill.engine.core import NativeEngine
    from tidemill.models.tokenizer import generation_config, stop_ids
    from tidemill.models.weights import load_folder
    from tidemill.sync.carriers import make_receiver

    decoder = load_folder(spec.model, dtype=getattr(torch, spec.engine.dtype))
    receiver, version = None, Version(0)
    if spec.carrier is not None:
        receiver, version = make_receiver(spec.carrier), UNPUBLISHED
    ends = stop_ids(None, decoder.arch, generation_config(spec.model))
    return NativeEngine(decoder, spec.engine, receiver=receiver, version=version, name=spec.name, eos_ids=ends)


def build_trainer(spec: TrainerSpec, offload: bool) -> Trainer:
    import torch

    from tidemill.models.weights import load_folder
    from tidemill.sync.carriers import make_sender
    from tidemill.trainer.native import NativeTrainer, inline

    torch.manual_seed(spec.seed)
    decoder = load_folder(spec.model, dtype=torch.float32)
    return NativeTrainer(
        decoder,
        spec.trainer,
        steps=spec.steps,
        reference=_reference(spec),
        critic=_critic(spec, decoder),
        sender=make_sender(spec.sync, spec.folder),
        source=spec.model,
        offload=one_thread() if offload else inline,
        process=spec.name,
    )


def _reference(spec: TrainerSpec) -> Any:
    """The `trainer.reference.Reference` that it describes, or None."""
    import torch

    from tidemill.models.weights import load_folder
    from tidemill.trainer.reference import Reference

    if (given := spec.reference) is None:
        return None
    folder = spec.model if given.model == "initial" else Path(given.model)
    return Reference(load_folder(folder, dtype=torch.float32), given.every, given.decay)


def _critic(spec: TrainerSpec, policy: Any) -> Any:
    """The `trainer.critic.Critic` that it describes, or None. policy: the decoder that is trained."""
    from tidemill.models.value import ValueModel, load_value_model
    from tidemill.trainer.critic import Critic

    if (given := spec.critic) is None:
        return None
    if given.model == "policy":
        model = ValueModel(policy, shared=True)
    else:
        model = load_value_model(spec.model if given.model == "initial" else given.model)
    return Critic(model, spec.trainer.model_copy(update={"lr": given.lr or spec.trainer.lr}), spec.steps)


def import_roles() -> None:
    """All that building a role and running it imports, so that a process forked from this one finds it done."""
    import torch._dynamo  # noqa: F401  (torch does, as soon as a decoder is made on the meta device: two seconds)

    import tidemill.engine.core
    import tidemill.models.tokenizer
    import tidemill.models.weights
    import tidemill.sync.carriers
    import tidemill.trainer.native  # noqa: F401
    from tidemill.kernels.library import native

    native()  # compiled, if ever, before the first child needs it


def use_threads(count: int) -> None:
    """Compute with so many: after `import_roles` the environment is not read any more."""
    import torch

    torch.set_num_threads(count)


def one_thread() -> Callable[[Callable[[], T]], asyncio.Future[T]]:
    """Runs blocking functions one after another in one thread."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="compute")
    return lambda function: asyncio.get_running_loop().run_in_executor(executor, function)


@dataclass(frozen=True, slots=True)
class Parts:
    trainer: Trainer
    pool: EnginePool
    supervisor: Supervisor
    handles: Callable[[], list[Handle[Any]]]  # of the processes there are now: the trainer's, then the engines'

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Engines that end are started again; when one cannot be, or the trainer ends, so does the body: with that cause."""
        try:
            async with asyncio.TaskGroup() as group:
                watching = [group.create_task(self.supervisor.run()), group.create_task(self._trainer_ends())]
                yield
                for each in watching:
                    each.cancel()
        except BaseExceptionGroup as failures:
            cause = first_cause(failures)
            if isinstance(cause, PolicyMismatch):  # an engine may be the first to notice: then the weights are gone
                ending = asyncio.ensure_future(self._trainer_ends())
                await asyncio.wait({ending}, timeout=GRACE_S)
                if ending.done():
                    cause = ending.exception() or cause
                ending.cancel()
            raise cause from failures

    async def _trainer_ends(self) -> None:
        handle = self.handles()[0]
        raise PeerDied(handle.name, await handle.wait())  # bounded: it watches, for as long as the run goes on


def budget_of(supervise: SuperviseSettings) -> Budget:
    """A new one, of whatever may be started again."""
    return Budget(supervise.restarts, supervise.window_s, supervise.backoff_s)


@asynccontextmanager
async def placed(settings: PlacementSettings, logs: Path, supervise: SuperviseSettings) -> AsyncIterator[Placement]:
    """Where roles are started. What the first start needs is begun at once, beside whatever the caller does until then."""
    if settings.kind == "inline":
        placement: Placement = Inline(build_role)
    else:
        liveness = Liveness(supervise.heartbeat_s, supervise.silent_s, supervise.stuck_s)
        placement = Local(logs, start_deadline=START_S, liveness=liveness)
    placement.begin()
    try:
        yield placement
    finally:
        await placement.close()


@asynccontextmanager
async def start_parts(
    config: RunConfig, trainer: TrainerSpec, placement: Placement, tell: Callable[[str, dict[str, Any]], None]
) -> AsyncIterator[Parts]:
    """Trainer and engines, started at the same time where they are processes, and stopped at the end however it comes.

    tell: is told of engines that were lost and that came back (kind of event, details).
    """
    settings, supervise = config.placement, config.supervise
    served = EngineSpec(model=trainer.model, engine=config.engine, carrier=settings.sync.carrier)

    async def start_trainer() -> Handle[Trainer]:
        return await _start(placement, Trainer, trainer, "trainer", settings.trainer_threads, TRAINER_DEADLINES)

    async def start_engine(index: int) -> Handle[Engine]:
        return await _start(placement, Engine, served, f"engine-{index}", settings.engine_threads, ENGINE_DEADLINES)

    started: list[Handle[Any]] = []

    async def kept(starting: Awaitable[Handle[T]]) -> Handle[T]:
        handle = await starting  # bounded: a start has a deadline
        started.append(handle)  # at once: a sibling's failure must not leave it running
        return handle

    async with AsyncExitStack() as stack:
        stack.push_async_callback(_stop_all, started)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(kept(start_trainer()))
            others = [group.create_task(kept(start_engine(i))) for i in range(settings.engines)]
        trainer_handle, engines = first.result(), [task.result() for task in others]
        pool = EnginePool([handle.proxy for handle in engines])
        supervisor = Supervisor(pool, engines, lambda index: kept(start_engine(index)), partial(budget_of, supervise), tell)
        yield Parts(trainer_handle.proxy, pool, supervisor, lambda: [trainer_handle, *supervisor.handles])


async def _stop_all(handles: list[Handle[Any]]) -> None:
    """Side by side; those that have ended are done at once."""
    results = await asyncio.gather(*(handle.stop() for handle in handles), return_exceptions=True)
    if failed := [result for result in results if isinstance(result, BaseException)]:
        raise failed[0]


@asynccontextmanager
async def start_engine(config: RunConfig, model: Path, logs: Path, threads: int) -> AsyncIterator[Engine]:
    """One engine that serves a folder's weights as they are, as version 0, and is never updated."""
    spec = EngineSpec(model=model, engine=config.engine)
    async with placed(config.placement, logs, config.supervise) as placement:
        handle = await _start(placement, Engine, spec, "engine-0", threads, ENGINE_DEADLINES)
        try:
            yield handle.proxy
        finally:
            await handle.stop()


async def _start(
    placement: Placement, protocol: type[T], spec: Config, name: str, threads: int, deadlines: dict[str, float]
) -> Handle[T]:
    tree = spec.model_dump(mode="json", exclude={"role", "name"})
    return await placement.start(protocol, name.split("-")[0], name, tree, threads, deadlines)
