"""The folder that reinforcement learning starts from: the model itself, or the result of a warm-up, which is kept.

A warm-up is identified by everything that decides its result, so that the second run of a recipe finds it done.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tidemill import faults
from tidemill.build import TrainerSpec
from tidemill.config import dump
from tidemill.controller import ROLE
from tidemill.durable import put_in_place, write_json
from tidemill.evaluation import Evaluator
from tidemill.model_folder import NEW, ModelFolder
from tidemill.orchestration.placement import Placement
from tidemill.parts import start_parts
from tidemill.pool import PoolPublisher
from tidemill.recipe import RunConfig
from tidemill.rollout import Episodes
from tidemill.run_folder import RunFolder, read_json
from tidemill.trainer.settings import TrainerSettings
from tidemill.types import Task
from tidemill.warmup import WarmedUp, warm_up

RECORD = "warm_start.json"
RAMP_UPDATES = 20  # over which the warm-up's learning rate rises


@dataclass(frozen=True, slots=True)
class WarmStart:
    path: Path
    warmed: WarmedUp | None  # None: there was no warm-up
    cached: bool = False


def kept_start(initial: Path) -> WarmStart:
    """What a run that has begun started from."""
    record = initial / RECORD
    return WarmStart(initial, WarmedUp(**read_json(record)) if record.is_file() else None, cached=True)


async def warm_start(
    config: RunConfig,
    folder: RunFolder,
    placement: Placement,
    model: ModelFolder,
    tasks: Sequence[Task],
    episodes: Episodes,
    note: Callable[[str], None],
) -> WarmStart:
    if config.warmup.accuracy == 0:
        return WarmStart(model.path, None)
    kept = config.run_dir.parent / "warm-starts" / _digest(config, model, tasks)
    if (kept / RECORD).is_file():
        warmed = WarmedUp(**read_json(kept / RECORD))
        note(f"warm-up: as an earlier run left it, {kept}: accuracy {warmed.accuracy:.2f} on training tasks")
        return WarmStart(kept, warmed, cached=True)
    warmed = await _train(config, folder, placement, model, tasks, episodes, note, kept)
    return WarmStart(kept, warmed)


async def _train(
    config: RunConfig,
    folder: RunFolder,
    placement: Placement,
    model: ModelFolder,
    tasks: Sequence[Task],
    episodes: Episodes,
    note: Callable[[str], None],
    kept: Path,
) -> WarmedUp:
    settings = config.trainer.model_copy(
        update={"lr": config.warmup.lr, "warmup_steps": RAMP_UPDATES, "schedule": "constant", "min_lr_ratio": 0.0}
    )
    spec = TrainerSpec(
        model=model.path,
        trainer=TrainerSettings.model_validate(settings.model_dump()),
        steps=1,  # a constant rate has no end
        checkpoints=False,
        sync=config.placement.sync,
        folder=folder.weights,
        seed=config.seed,
    )
    async with start_parts(config.warming_up, spec, placement, lambda kind, detail: note(f"{kind}: {detail}")) as parts:
        publisher, evaluator = PoolPublisher(parts.trainer, parts.pool), Evaluator(parts.pool, episodes, config.seed)
        async with parts.watched():
            warmed = await warm_up(
                config.warmup, tasks, model.tokenizer, parts.trainer, publisher, evaluator, config.seed, note
            )
        beside = kept.with_name(f"{kept.name}.{config.run_dir.name}.partial")  # this run's own
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)  # cut off by a kill
        await parts.trainer.export(str(beside))
    write_json(beside / RECORD, asdict(warmed))
    faults.reach(ROLE, "warm-start", path=beside / RECORD)
    keep(beside, kept)
    return warmed


def keep(beside: Path, kept: Path) -> None:
    """Of two runs that warmed up at the same time, the first one's result is kept."""
    if (kept / RECORD).is_file():
        shutil.rmtree(beside)
    else:
        put_in_place(beside, kept)


def _digest(config: RunConfig, model: ModelFolder, tasks: Sequence[Task]) -> str:
    """Of everything that decides the result: settings, the model's files, every task's prompt and answer."""
    tree = dump(config)
    decides = {key: tree[key] for key in ("warmup", "seed", "trainer", "engine", "rollout")}
    decides["tasks"] = [(task.id, task.prompt, task.data.get("answer")) for task in tasks]
    if config.model.startswith(NEW):
        decides["model"] = config.model
    else:
        files = sorted(p for p in model.path.iterdir() if p.is_file())
        decides["model"] = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.blake2b(json.dumps(decides, sort_keys=True).encode(), digest_size=8).hexdigest()
