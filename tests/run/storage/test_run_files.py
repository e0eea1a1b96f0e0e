"""Files of a run that were made by hand or damaged, a folder that went away, and too few open files."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.cli.commands.why import standing
from tidemill.core import hardware
from tidemill.core.errors import ConfigError, RunFolderGone
from tidemill.ledger.ledger import SqliteLedger
from tidemill.observability.console import ProgressDisplay
from tidemill.run import session
from tidemill.run.recipe import RunConfig, load_recipe
from tidemill.run.resume import take_up
from tidemill.run.storage.checkpoint_manifest import Position
from tidemill.run.storage.run_folder import RunFolder
from tidemill.runtime.process_logs import Log

STATUS = {"pid": 1, "at": 1.0, "waits": [], "processes": []}
FAILURE = {"at": 1.0, "kind": "E", "message": "m", "trace": "t"}


def recipe(folder: Path) -> RunConfig:
    return load_recipe([], ["placement=inline", "steps=2"], {"run_dir": str(folder), "model": "new:0.1m", "env": "guess"})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.open(recipe(tmp_path / "run"))
    SqliteLedger(made.path, mode="create").close()
    return made


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("status.json", value) for value in ({}, [], None, {"pid": 1}, STATUS | {"at": "soon"}, STATUS | {"waits": [{}]})),
        ("status.json", STATUS | {"processes": [{"name": 3}]}),
        *(("failure.json", value) for value in ({}, [], FAILURE | {"kind": 3}, FAILURE | {"message": None})),
        *(("report.json", value) for value in ({}, {"steps": "2"}, {"steps": 2})),
        *(("config.json", value) for value in ({}, {"steps": "2"})),
    ],
)
def test_a_file_that_no_run_wrote_is_one_sentence(folder: RunFolder, name: str, value: Any):
    if name == "config.json":
        report = {"steps": 2, "wall_s": 1.0, "accuracy_before": None, "accuracy_after": None, "held_out": None}
        groups = {"admitted": 1, "trained": 1, "dropped": {}, "pending": 0, "lost": 0}
        (folder.path / "report.json").write_text(json.dumps(report | {"groups": groups}))
    folder.final.mkdir()
    (folder.path / name).write_text(json.dumps(value))
    with pytest.raises(ConfigError) as error:
        standing(folder)
    assert str(folder.path / name) in str(error.value) and "\n" not in str(error.value)


def test_files_as_a_run_writes_them_are_read(folder: RunFolder):
    assert standing(folder)["state"] == "killed"
    wait = {"peer": "p", "what": "w", "count": 1, "since": 1.0, "limit_s": None}
    process = {"name": "trainer", "pid": 1, "alive": True, "heard": 0.1, "busy": [["train", 0.1]], "more": 1}
    (folder.path / "status.json").write_text(json.dumps(STATUS | {"waits": [wait], "processes": [process], "step": 3}))
    (folder.path / "failure.json").write_text(json.dumps(FAILURE | {"pid": 4}))
    found = standing(folder)
    assert found["state"] == "failed" and found["status"]["step"] == 3


@pytest.mark.parametrize("how", ["renamed", "deleted"])
async def test_a_folder_that_goes_away_is_one_sentence_and_leaves_no_husk(tmp_path: Path, monkeypatch, how: str):
    path = tmp_path / "run"

    async def goes_away(*_: object) -> None:
        os.rename(path, tmp_path / "elsewhere") if how == "renamed" else shutil.rmtree(path)
        (path / "checkpoints" / "step-000001.partial").mkdir(parents=True)  # as a trainer that is writing one does
        (path / "status.json").write_text("{}")
        raise FileNotFoundError(2, "No such file or directory", str(path / "logs"))

    monkeypatch.setattr(session.Session, "prepare", goes_away)
    with pytest.raises(RunFolderGone, match=f"^{path} was renamed or deleted while its run went on: [^\n]*$"):
        await asyncio.wait_for(session.run(recipe(path), ProgressDisplay(2, mode="quiet")), 60)
    assert not path.exists() and (tmp_path / "elsewhere").exists() is (how == "renamed")


def test_what_is_not_ours_is_not_swept_away(folder: RunFolder):
    folder.config.unlink()
    (folder.path / "notes.txt").write_text("mine")
    folder.sweep()
    assert (folder.path / "notes.txt").exists()


def test_a_log_that_is_gone_hides_nothing(tmp_path: Path):
    assert (
        Log.at(tmp_path / "gone.log").tail()
        == f"its log: {tmp_path / 'gone.log'} (cannot be read: No such file or directory)"
    )


async def test_too_few_open_files_are_said_at_the_start(tmp_path: Path, monkeypatch):
    limits = [32, 32]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.__setitem__(slice(None), pair))
    with pytest.raises(ConfigError, match=r"^32 open files are allowed here, and this run needs \d+: allow more"):
        await session.run(recipe(tmp_path / "run"), ProgressDisplay(2, mode="quiet"))
    assert not (tmp_path / "run").exists()
    limits[:] = [32, 4096]
    assert hardware.allow_files(100) == 100 and limits == [100, 4096]  # no further than is needed
    limits[:] = [32, resource.RLIM_INFINITY]
    assert hardware.allow_files(100) == 100
    limits[:] = [200, 300]
    assert hardware.allow_files(100) == 200 and limits == [200, 300]


async def test_what_is_doubted_of_a_ledger_is_said_at_the_start(tmp_path: Path, monkeypatch):
    class Lost(SimpleNamespace):
        def next_group_id(self) -> int:
            return 0

        def last_step(self) -> None:
            return None

    class Begun(Exception): ...

    async def begun(_: session.Session) -> None:
        raise Begun

    notes = list[str]()
    display: Any = SimpleNamespace(note=notes.append, close=lambda: None)
    monkeypatch.setattr(session, "_ledger", lambda folder: nullcontext(Lost(doubts=["its log was lost"])))
    monkeypatch.setattr(session.Session, "prepare", begun)
    with pytest.raises(Begun):
        await session.run(recipe(tmp_path / "run"), display)
    assert "warning: its log was lost" in notes


@pytest.mark.parametrize(("step", "lost"), [(2, False), (3, False), (4, True)])
async def test_a_checkpoint_of_more_steps_than_the_ledger_knows_is_not_gone_on_from(tmp_path: Path, step: int, lost: bool):
    class Loaded(Exception):
        pass

    async def newest() -> tuple[Path, Position]:
        return tmp_path, Position(step, 0, 0)

    async def load(_: str) -> None:
        raise Loaded

    parts: Any = SimpleNamespace(next_step=lambda: 3, newest=newest, load=load)
    reason = pytest.raises(ConfigError, match=r"knows 3 steps, but .* is a checkpoint of step 4: .* log .* was lost")
    with reason if lost else pytest.raises(Loaded):
        await take_up(parts, parts, parts, parts, print, newest)  # type: ignore[arg-type]
