"""The weights that a run starts from: the model itself, or a cached warm-up's result.

A warm-up is identified by everything that decides its result, so that the second run of a recipe finds it done. Only one
that reached its target is kept. One that was interrupted resumes from its own checkpoint in the run's folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.controller.engine_pool import PoolPublisher
from tidemill.controller.evaluation import Evaluator
from tidemill.controller.rollout import EpisodeSetup
from tidemill.core.config import dump
from tidemill.core.errors import CheckpointError
from tidemill.core.executors import in_thread
from tidemill.core.types import Task
from tidemill.ledger.records import Event
from tidemill.run.cluster import Parts, start_parts
from tidemill.run.recipe import RunConfig
from tidemill.run.roles import TrainerSpec
from tidemill.run.sft_warmup import WarmedUp, WarmUp
from tidemill.run.storage.checkpoint_manifest import Position
from tidemill.run.storage.checkpoints import Checkpoints
from tidemill.run.storage.model_folder import NEW, ModelFolder
from tidemill.run.storage.run_folder import RunFolder, read_json
from tidemill.run.warmup_cache import RECORD, WarmStartCache, record
from tidemill.runtime.placement import Placement

RAMP_UPDATES = 20  # updates over which the warm-up's learning rate rises
RESULT = "result"  # folder of the result, beside the warm-up's checkpoints


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The folder that reinforcement learning starts from, and the warm-up that made it."""

    path: Path
    warmed: WarmedUp | None  # None: there was no warm-up
    cached: bool = False


@dataclass(frozen=True, slots=True)
class Warming:
    """The parts of a session that a warm-up needs."""

    config: RunConfig
    folder: RunFolder
    placement: Placement
    model: ModelFolder
    tasks: Sequence[Task]
    episodes: EpisodeSetup
    note: Callable[[str], None]


def kept_start(initial: Path) -> WarmStart:
    """The start of a run that has already begun."""
    record = initial / RECORD
    return WarmStart(initial, WarmedUp(**read_json(record)) if record.is_file() else None, cached=True)


async def warm_start(warming: Warming) -> WarmStart:
    """Find or make the weights to start from. Raises RunFailed if the warm-up misses its target."""
    config, folder, note = warming.config, warming.folder, warming.note
    if config.warmup.accuracy == 0:
        return WarmStart(warming.model.path, None)
    name = _digest(config, warming.model, warming.tasks)
    cache = WarmStartCache(config.run_dir.parent / "warm-starts", note)
    usable = cache.prepare()
    if usable and (warmed := await in_thread(cache.find, name)) is not None:
        kept = cache.folder / name
        note(f"warm-up: as an earlier run left it, {kept}: accuracy {warmed.accuracy:.2f} on training tasks")
        return WarmStart(kept, warmed, cached=True)
    own = folder.warm_up / name
    for other in folder.warm_up.glob("*"):
        if other != own:  # left by another recipe
            shutil.rmtree(other)
    made = cache.folder / f"{name}.{config.run_dir.name}.partial" if usable else own / RESULT  # this run's own
    shutil.rmtree(made, ignore_errors=True)  # cut off by a kill
    warmed = await _train(warming, own, made)
    await in_thread(record, made, warmed)
    return WarmStart(await in_thread(cache.keep, made, name) if usable else made, warmed)


async def _train(warming: Warming, own: Path, made: Path) -> WarmedUp:
    """Warm up, from the newest checkpoint in `own`, and export the model to `made`."""
    config, model, tell = warming.config, warming.model, warming.note
    spec = _spec(config, model, warming.folder)
    async with start_parts(config.warming_up, spec, warming.placement, lambda k, detail: tell(f"{k}: {detail}")) as parts:
        async with parts.watched():
            checkpoints = Checkpoints(own, _Unrecorded(), tell)

            async def save(step: int) -> Coroutine[Any, Any, None]:
                return await checkpoints.begin(parts.trainer, Position(step, 0, 0))

            warmed = await WarmUp(
                config.warmup,
                warming.tasks,
                model.tokenizer,
                parts.trainer,
                PoolPublisher(parts.trainer, parts.pool),
                Evaluator(parts.pool, warming.episodes, config.seed),
                config.seed,
                tell,
                save=save if config.record.checkpoint_every else None,
                step=await _taken_up(checkpoints, parts, own, tell),
            ).run()
        await parts.trainer.export(str(made))
    return warmed


def _spec(config: RunConfig, model: ModelFolder, folder: RunFolder) -> TrainerSpec:
    how = {"lr": config.warmup.lr, "warmup_steps": RAMP_UPDATES, "schedule": "constant", "min_lr_ratio": 0.0}
    settings = {**config.trainer.model_dump(), **{k: v for k, v in how.items() if k in type(config.trainer).model_fields}}
    return TrainerSpec(
        model=model.path,
        trainer=type(config.trainer).model_validate(settings),
        steps=1,  # a constant rate has no end
        checkpoints=config.record.checkpoint_every > 0,
        sync=config.placement.sync,
        folder=folder.weights,
        seed=config.seed,
    )


async def _taken_up(checkpoints: Checkpoints, parts: Parts, own: Path, tell: Callable[[str], None]) -> int:
    """Load the newest checkpoint of this warm-up, and return its step; 0 if none can be used."""
    try:
        latest = await checkpoints.newest()
        if latest is None:
            return 0
        await parts.trainer.load(str(latest[0] / "trainer"))
    except CheckpointError as error:
        tell(f"the warm-up begins anew: {error}")
        shutil.rmtree(own)
        return 0
    tell(f"warm-up: going on from step {latest[1].step}")
    return latest[1].step


class _Unrecorded:
    """Stand-in for a ledger: the warm-up's checkpoints are no part of the run's record."""

    def event(self, kind: str, detail: dict[str, Any]) -> None:
        pass

    def events(self, kind: str | None = None) -> list[Event]:
        return []

    def retain(self, *, checkpoint: int) -> None:
        pass


def _digest(config: RunConfig, model: ModelFolder, tasks: Sequence[Task]) -> str:
    """Digest of everything that decides the result: settings, model files, prompts and answers.

    The limit of steps is left out: a warm-up that reached it resumes under a higher one.
    """
    tree = dump(config)
    decides = {key: tree[key] for key in ("seed", "trainer", "engine", "rollout", "env", "deterministic")}
    for role in ("trainer", "engine"):  # the kind that was the only one once is not named: what is cached stays valid
        decides[role] = {key: value for key, value in tree[role].items() if (key, value) != ("kind", "native")}
    decides["warmup"] = {key: value for key, value in tree["warmup"].items() if key != "steps"}
    if config.deterministic:
        decides["threads"] = [config.placement.trainer_threads, config.placement.engine_threads]
    decides["tasks"] = [(task.id, task.prompt, task.data.get("answer")) for task in tasks]
    if config.model.startswith(NEW):
        decides["model"] = config.model
    else:
        files = sorted(p for p in model.path.iterdir() if p.is_file())
        decides["model"] = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.blake2b(json.dumps(decides, sort_keys=True).encode(), digest_size=8).hexdigest()
