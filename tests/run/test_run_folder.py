"""What a start that is killed leaves in the run folder, and that the next start takes it up."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tidemill.core import fault_injection
from tidemill.core.atomic_files import put_in_place, write_json
from tidemill.core.config import build, dump
from tidemill.core.errors import ConfigError, RunFolderError
from tidemill.core.fault_injection import Fault, FaultError, Faults
from tidemill.ledger import lock
from tidemill.run import warm_start
from tidemill.run.recipe import RunConfig
from tidemill.run.sft_warmup import WarmedUp
from tidemill.run.storage import run_folder
from tidemill.run.storage.run_folder import RunFolder
from tidemill.run.warm_start import WarmStartCache, record


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return build(RunConfig, {"env": "guess", "model": "new:0.1m", "run_dir": str(tmp_path / "run")})


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "start", "weights")


def folder_of(path: Path, text: str) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(text)
    return path


def killed_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, point: str) -> None:
    """Where a kill would come, an exception that nobody handles comes once: it leaves the same files."""
    monkeypatch.setattr(fault_injection, "_armed", Faults([Fault.parse(f"{point}:*:raise")], tmp_path / "log", 0))


def test_a_start_that_is_killed_before_the_folder_is_a_runs_is_begun_anew(config, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json.partial").write_text('{"mod')
    killed_at(monkeypatch, tmp_path, "controller:config")
    with pytest.raises(FaultError):
        RunFolder.open(config)
    folder = RunFolder.open(config)
    assert folder.recipe() == dump(config) and folder.logs.is_dir() and folder.checkpoints.is_dir()
    assert not (tmp_path / "run" / "config.json.partial").exists()


def test_somebody_elses_folder_is_refused(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="not empty and holds no run"):
        RunFolder.open(config)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.txt"]


def test_only_what_this_start_made_is_withdrawn(config, tmp_path):
    """And never what another writer has, or would be left with."""
    run = tmp_path / "run"
    for name in ("thesis.txt", "logs/trainer.log", "trajectories/seg-000001.bin", "initial/config.json"):
        folder = RunFolder.open(config)
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("work")
        folder.withdraw()
        assert (run / name).exists()
        shutil.rmtree(run)
    folder = RunFolder.open(config)
    held = lock.FolderLock(run)
    folder.withdraw()
    held.release()
    RunFolder.open(config).withdraw()  # it was there
    assert folder.config.exists()
    folder.withdraw()
    assert not list(tmp_path.iterdir())


def test_a_lock_that_was_waited_for_is_none_when_the_folder_went(tmp_path, monkeypatch):
    """Two that begin at once: one is refused and takes its folder away, while the other has opened the lock's file in it."""
    folder, aside, real = tmp_path / "run", tmp_path / "aside", lock.fcntl.lockf

    def removed_before(descriptor: int, how: int) -> None:
        folder.rename(aside)
        folder.mkdir()
        real(descriptor, how)

    folder.mkdir()
    monkeypatch.setattr(lock.fcntl, "lockf", removed_before)
    with pytest.raises(RunFolderError, match="was removed meanwhile: start it again"):
        lock.FolderLock(folder)
    monkeypatch.undo()
    lock.FolderLock(folder).release()


def test_initial_is_whole_or_not_there(config, tmp_path, start, monkeypatch):
    folder = RunFolder.open(config)
    killed_at(monkeypatch, tmp_path, "controller:initial")
    with pytest.raises(FaultError):
        folder.keep_initial(start, copy=True)
    assert not folder.initial.exists()
    folder = RunFolder.open(config)
    folder.claim(config, begun=False)
    folder.keep_initial(start, copy=True)
    assert (folder.initial / "config.json").read_text() == "weights"
    (start / "config.json").write_text("other weights")
    folder.claim(config, begun=True)
    folder.keep_initial(start, copy=True)
    assert (folder.initial / "config.json").read_text() == "weights", "a run that has begun keeps what it began with"
    folder.claim(config, begun=False)
    folder.keep_initial(start, copy=False)
    assert folder.initial.is_symlink() and (folder.initial / "config.json").read_text() == "other weights"
    folder.claim(config, begun=False)
    assert (start / "config.json").exists() and not folder.initial.is_symlink()
    assert not [p for p in folder.path.iterdir() if "partial" in p.name]


def test_an_initial_that_is_being_removed_is_never_half_there(config, start, monkeypatch):
    folder = RunFolder.open(config)
    folder.keep_initial(start, copy=True)
    monkeypatch.setattr(run_folder.shutil, "rmtree", lambda path, **_: killed(folder.initial) if path.exists() else None)

    def killed(initial: Path) -> None:
        assert not initial.exists()
        raise FaultError

    with pytest.raises(FaultError):
        folder.claim(config, begun=False)


def export_of(text: str):
    async def export(target: str) -> None:
        put_in_place(folder_of(Path(target).with_name(".final.partial"), text), Path(target))

    return export


def report_of(steps: int) -> dict:
    groups = {"admitted": steps, "trained": steps, "dropped": {}, "pending": 0, "lost": 0}
    return {"steps": steps, "wall_s": 1.0, "groups": groups, "accuracy_before": 0.0, "accuracy_after": 1.0, "held_out": 4}


@pytest.mark.parametrize("point", ["controller:final", "controller:report"])
def test_a_run_that_is_killed_while_it_ends_is_not_complete(config, tmp_path, monkeypatch, point):
    folder = RunFolder.open(config)
    folder.write_report(report_of(4), complete=False)
    killed_at(monkeypatch, tmp_path, point)
    with pytest.raises(FaultError):
        asyncio.run(folder.write_final(export_of("1")))
    assert folder.summary() is None
    asyncio.run(folder.write_final(export_of("2")))
    folder.write_report(report_of(8), complete=True)
    assert folder.summary() == report_of(8) and (folder.final / "config.json").read_text() == "2"
    assert not (folder.path / "interrupted.json").exists()


def test_between_its_two_renames_the_old_folder_is_whole_and_the_next_one_clears_it_away(tmp_path, monkeypatch):
    target = folder_of(tmp_path / "final", "old")
    real, calls = run_folder.os.replace, []

    def replace(a, b):
        calls.append(Path(b).name)
        if len(calls) == 2:
            raise FaultError
        real(a, b)

    with monkeypatch.context() as patch:
        patch.setattr("tidemill.core.atomic_files.os.replace", replace)
        with pytest.raises(FaultError):
            put_in_place(folder_of(tmp_path / ".final.partial", "new"), target)
    assert calls == [".final.replaced", "final"] and not target.exists()
    assert (tmp_path / ".final.replaced" / "config.json").read_text() == "old"
    put_in_place(tmp_path / ".final.partial", target)
    assert (target / "config.json").read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["final"]


def test_a_file_of_json_is_the_old_one_or_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    write_json(path, {"a": 1})
    with monkeypatch.context() as patch:
        patch.setattr("tidemill.core.atomic_files.os.replace", lambda a, b: (_ for _ in ()).throw(FaultError()))
        with pytest.raises(FaultError):
            write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    write_json(path, {"a": 3})
    assert json.loads(path.read_text()) == {"a": 3} and [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_two_runs_that_warm_up_at_once_keep_one_result(tmp_path):
    cache = WarmStartCache(tmp_path / "warm-starts", [].append)
    assert cache.prepare()
    for name in ("one", "two"):
        beside = folder_of(cache.folder / f"abc.{name}.partial", name)
        record(beside, WarmedUp(9.0, 40, 0.5))
        kept = cache.keep(beside, "abc")
    assert (kept / "config.json").read_text() == "one" and [p.name for p in cache.folder.iterdir()] == ["abc"]


async def test_a_warm_up_of_an_earlier_run_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr(warm_start, "_digest", lambda *_: "abc")
    kept = folder_of(tmp_path / "warm-starts" / "abc", "weights")
    record(kept, WarmedUp(9.0, 40, 0.5))
    config = SimpleNamespace(run_dir=tmp_path / "run", warmup=SimpleNamespace(accuracy=0.4))
    told, environment = list[str](), SimpleNamespace(tasks=lambda split: [])
    parts = {"folder": RunFolder(tmp_path / "run"), "model": SimpleNamespace(path=kept), "environment": environment}
    start = await warm_start.warm_start(cast(Any, SimpleNamespace(config=config, note=told.append, **parts)))
    assert start.path == kept and start.cached
    assert told == [f"warm-up: as an earlier run left it, {kept}: accuracy 0.50 on training tasks"]


def test_a_recipe_of_an_older_version_is_read_without_what_it_knew_alone(config, tmp_path):
    folder = RunFolder.open(config)
    tree = dump(config)
    write_json(folder.config, tree | {"warmup": tree["warmup"] | {"seconds": 55.0}})
    assert folder.recipe() == tree and build(RunConfig, folder.recipe()) == config
    folder.claim(config, begun=True)  # it goes on
