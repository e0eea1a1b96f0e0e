"""Where concrete classes are known: settings in, running parts out.

A role is described by a spec, plain data, so that the same function builds it in this process (`inline`) or in a process of
its own (`local`, by way of `remote_worker`). Heavy imports happen here, when a role is built, and nowhere on the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tidemill.config import Config, build
from tidemill.engine.settings import EngineSettings
from tidemill.orchestration.inline import Inline
from tidemill.orchestration.local import Local
from tidemill.orchestration.placement import Built, Placement
from tidemill.protocols import Engine, Trainer
from tidemill.recipe import PlacementSettings
from tidemill.sync.settings import SyncSettings
from tidemill.trainer.settings import TrainerSettings
from tidemill.types import Version

T = TypeVar("T")

UNPUBLISHED = Version(-1)  # what an engine holds before the first publication; nothing may be sampled from it
START_S = 300.0  # to import torch and read the weights
ENGINE_DEADLINES = {"generate": 3600.0, "score": 600.0, "update": 600.0}
TRAINER_DEADLINES = dict.fromkeys(("forward", "forward_backward", "apply", "publish", "save", "load", "export"), 3600.0)


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
        sender=make_sender(spec.sync, spec.folder),
        source=spec.model,
        offload=in_thread() if offload else inline,
        process=spec.name,
    )


def in_thread() -> Callable[[Callable[[], T]], asyncio.Future[T]]:
    """Runs blocking functions one after another in one thread."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="compute")
    return lambda function: asyncio.get_running_loop().run_in_executor(executor, function)


@dataclass(frozen=True, slots=True)
class Parts:
    trainer: Trainer
    engines: list[Engine]


def make_placement(settings: PlacementSettings, logs: Path) -> Placement:
    return Inline(build_role) if settings.kind == "inline" else Local(logs, start_deadline=START_S)


@asynccontextmanager
async def start_parts(
    settings: PlacementSettings, engine: EngineSettings, trainer: TrainerSpec, logs: Path
) -> AsyncIterator[Parts]:
    """Trainer and engines, started at the same time where they are processes, and stopped at the end however it comes."""
    placement = make_placement(settings, logs)
    served = EngineSpec(model=trainer.model, engine=engine, carrier=settings.sync.carrier)
    async with AsyncExitStack() as stack:
        start = partial(_start, placement, stack)
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(start(Trainer, trainer, "trainer", settings.trainer_threads, TRAINER_DEADLINES))
            engines = [
                group.create_task(start(Engine, served, f"engine-{i}", settings.engine_threads, ENGINE_DEADLINES))
                for i in range(settings.engines)
            ]
        yield Parts(starting.result(), [task.result() for task in engines])


@asynccontextmanager
async def start_engine(
    settings: PlacementSettings, engine: EngineSettings, model: Path, logs: Path, threads: int
) -> AsyncIterator[Engine]:
    """One engine that serves a folder's weights as they are, as version 0, and is never updated."""
    async with AsyncExitStack() as stack:
        spec = EngineSpec(model=model, engine=engine)
        yield await _start(make_placement(settings, logs), stack, Engine, spec, "engine-0", threads, ENGINE_DEADLINES)


async def _start(
    placement: Placement,
    stack: AsyncExitStack,
    protocol: type[T],
    spec: Config,
    name: str,
    threads: int,
    deadlines: dict[str, float],
) -> T:
    """Start a role that ends with `stack`."""
    tree = spec.model_dump(mode="json", exclude={"role", "name"})
    handle = await placement.start(protocol, name.split("-")[0], name, tree, threads, deadlines)
    stack.push_async_callback(handle.stop)
    return handle.proxy
