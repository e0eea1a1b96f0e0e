"""The weights that a run starts from: the model, or a warm-up's cached result.

    runs/warm-starts/DIGEST/   the model, its record, and a manifest as a checkpoint has

The digest is of everything that decides a warm-up's result. Only one that reached its target is kept. One that was
interrupted resumes from its own checkpoint in the run's folder. An entry becomes a policy, so it is read only if folder and
files belong to this user, no one else may write to them, and every byte is as it was written.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.controller.controller import ROLE
from tidemill.controller.engine_pool import PoolPublisher
from tidemill.controller.evaluation import Evaluator
from tidemill.core import fault_injection
from tidemill.core.atomic_files import put_in_place, write_json
from tidemill.core.config import dump
from tidemill.core.errors import CheckpointError, ConfigError
from tidemill.core.executors import in_thread
from tidemill.core.types import Task
from tidemill.run.build_controller import make_episodes
from tidemill.run.cluster import Cluster, start_cluster
from tidemill.run.planner.plan import warm_up_plan
from tidemill.run.recipe import RunConfig
from tidemill.run.recipe_files import OF_RANKS
from tidemill.run.sft_warmup import WarmedUp, WarmUp, failures_noted
from tidemill.run.storage.checkpoint_manifest import Position, seal, verify
from tidemill.run.storage.checkpoints import Checkpoints
from tidemill.run.storage.model_folder import NEW, ModelFolder
from tidemill.run.storage.run_files import read_json

if TYPE_CHECKING:
    from tidemill.run.session import Session

RESULT = "result"  # folder of the result, beside the warm-up's checkpoints
RECORD = "warm_start.json"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The folder that reinforcement learning starts from, and the warm-up that made it."""

    path: Path
    warmed: WarmedUp | None  # None: there was no warm-up
    cached: bool = False


async def first_weights(session: Session) -> WarmStart:
    """The weights that reinforcement learning begins with; a run that has begun has them in `initial`."""
    folder = session.folder
    if session.ledger.next_group_id() > 0:
        record = folder.initial / RECORD
        warmed = WarmedUp(**read_json(record)) if record.is_file() else None
        return WarmStart(folder.initial, warmed, cached=True)
    start = await warm_start(session)
    folder.keep_initial(start.path, copy=start.warmed is not None)
    return start if start.warmed is None else replace(start, path=folder.initial)  # the cache may be deleted


async def warm_start(session: Session) -> WarmStart:
    """Find or make the weights to start from. Raises RunFailed if the warm-up misses its target."""
    config, folder, note = session.config, session.folder, session.note
    if config.warmup.accuracy == 0:
        return WarmStart(session.model.path, None)
    name = _digest(config, session.model, session.environment.tasks("train"))
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
    warmed = await _warm_up(session, own, made)
    await in_thread(record, made, warmed)
    return WarmStart(await in_thread(cache.keep, made, name) if usable else made, warmed)


async def _warm_up(session: Session, own: Path, made: Path) -> WarmedUp:
    """Warm up, from the newest checkpoint in `own`, and export the model to `made`."""
    config, model, note, plan = (
        session.config,
        session.model,
        session.note,
        warm_up_plan(session.config, session.plan.devices),
    )
    async with start_cluster(
        plan, model.path, session.folder, session.placement, lambda kind, about: note(f"{kind}: {about}")
    ) as cluster:
        async with cluster.watched(trainer=True):
            checkpoints = Checkpoints(own, None, note)

            async def save(step: int) -> Coroutine[Any, Any, None]:
                return await checkpoints.begin(cluster.trainer, Position(step, 0, 0))

            warmed = await WarmUp(
                config.warmup,
                session.environment.tasks("train"),
                model.tokenizer,
                cluster.trainer,
                PoolPublisher(cluster.trainer, cluster.pool),
                Evaluator(
                    *(cluster.pool, make_episodes(plan.config, session.environment, model), config.seed),
                    failures_noted(note),
                    "the warm-up's training tasks",
                ),
                config.seed,
                note,
                cluster.turns,
                save=save if plan.saves_beside else None,
                step=await _taken_up(checkpoints, cluster, own, note),
            ).run()
        await cluster.trainer.export(str(made))
    return warmed


async def _taken_up(checkpoints: Checkpoints, cluster: Cluster, own: Path, tell: Callable[[str], None]) -> int:
    """Load the newest checkpoint of this warm-up, and return its step; 0 if none can be used."""
    try:
        latest = await checkpoints.newest()
        if latest is None:
            return 0
        await cluster.trainer.load(str(latest[0] / "trainer"))
    except CheckpointError as error:
        tell(f"the warm-up begins anew: {error}")
        shutil.rmtree(own)
        return 0
    tell(f"warm-up: going on from step {latest[1].step}")
    return latest[1].step


def _digest(config: RunConfig, model: ModelFolder, tasks: Sequence[Task]) -> str:
    """Digest of what decides a warm-up's result, so not of its limit of steps."""
    tree = dump(config)
    decides = {key: tree[key] for key in ("seed", "trainer", "engine", "rollout", "env", "deterministic")}
    decides["env"] = _without_policy(tree["env"])
    decides["trainer"] = {key: value for key, value in decides["trainer"].items() if key != "lora"}  # it has none
    for role in ("trainer", "engine"):  # the kind that was the only one once is not named: what is cached stays valid
        decides[role] = {k: v for k, v in tree[role].items() if (k, v) != ("kind", "native") and k not in OF_RANKS}
    decides["warmup"] = {key: value for key, value in tree["warmup"].items() if key != "steps"}
    if config.deterministic:
        decides["threads"] = [config.placement.trainer_threads, config.placement.engine_threads]
        decides |= {key: tree["trainer"].get(key) for key in OF_RANKS if config.trainer.ranks > 1}
    decides["tasks"] = [(task.id, task.prompt, task.data.get("answer")) for task in tasks]
    if config.model.startswith(NEW):
        decides["model"] = config.model
    else:
        files = sorted(p for p in model.path.iterdir() if p.is_file())
        decides["model"] = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.blake2b(json.dumps(decides, sort_keys=True).encode(), digest_size=8).hexdigest()


def _without_policy(env: Any) -> Any:
    """The environments' tables without the policy that plays them: a warm-up has one, and what is cached stays valid."""
    if isinstance(env, list):
        return [_without_policy(each) for each in env]
    return {key: value for key, value in env.items() if key != "policy"}


@dataclass(frozen=True, slots=True)
class WarmStartCache:
    """The folder of cached warm-ups."""

    folder: Path
    note: Callable[[str], None]

    def prepare(self) -> bool:
        """Make the folder, private. Returns False, with a note, if it cannot be trusted or written."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _expect_own(self.folder, self.folder.stat())
            self.folder.chmod(0o700)
        except (OSError, CheckpointError) as error:
            self.note(f"the cache of warm-ups is not used: {error}")
            return False
        return True

    def find(self, name: str) -> WarmedUp | None:
        """The record of a usable entry, or None. An unusable entry is removed."""
        entry = self.folder / name
        if not os.path.lexists(entry):
            return None
        try:
            return read_kept(entry)
        except CheckpointError as error:
            self.note(f"the warm-up kept in {entry} cannot be used, and is made again: {error}")
            entry.unlink() if entry.is_symlink() or entry.is_file() else shutil.rmtree(entry, ignore_errors=True)
            return None

    def keep(self, made: Path, name: str) -> Path:
        """Move a result into the cache, if another run has not, and return the entry."""
        entry = self.folder / name
        if (entry / RECORD).is_file():
            shutil.rmtree(made)
        else:
            put_in_place(made, entry)
        return entry


def record(folder: Path, warmed: WarmedUp) -> None:
    """Write the result's record beside the model in `folder`, seal it, and make all of it private."""
    write_json(folder / RECORD, asdict(warmed))
    fault_injection.reach(ROLE, "warm-start", path=folder / RECORD)
    seal(folder, Position(warmed.steps, 0, 0), threading.Event())
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)


def read_kept(folder: Path) -> WarmedUp:
    """The record of a result that is whole and this user's own. Raises CheckpointError."""
    try:
        for path in (folder, *folder.rglob("*")):
            _expect_own(path, path.lstat())
        warmed = WarmedUp(**read_json(folder / RECORD))
    except (OSError, ConfigError, TypeError) as error:
        raise CheckpointError(str(error)) from None
    verify(folder, warmed.steps)
    return warmed


def _expect_own(path: Path, found: os.stat_result) -> None:
    if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        raise CheckpointError(f"{path} is neither a folder nor a file")
    if found.st_uid != os.geteuid():
        raise CheckpointError(f"{path} belongs to another user (number {found.st_uid})")
    if found.st_mode & _OTHERS_WRITE:
        raise CheckpointError(f"{path} may be written by others (mode {stat.S_IMODE(found.st_mode):o})")
