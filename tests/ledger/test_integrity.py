"""Damage of `ledger.sqlite` itself: each is told in one sentence that names it and says what to do."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
from pathlib import Path

import pytest
from ledger_cases import group, task
from typer.testing import CliRunner

from tidemill.cli.main import app
from tidemill.core.errors import LedgerError, RunFolderError
from tidemill.ledger import SqliteLedger, database, has_ledger
from tidemill.ledger.schema import SCHEMA

PAGE = 4096
MEND = r"put back a copy of it from before the damage, .*\.recover`, or give another run_dir"


@pytest.fixture(scope="module")  # nobody has it open: a test takes a copy
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that ended in good order, with rows in every table."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with SqliteLedger(folder, durability="process") as ledger:
        for i in range(60):
            ledger.admit(i, task(i))
            ledger.finish(group(i))
        for step in range(10):
            ledger.begin_step(step, 0, list(range(4 * step, 4 * step + 4)), [0] if step else [])
            ledger.end_step(step, 0, {"reward": 1.0})
            ledger.publish(next(iter(group(4 * step).trajectories[0].sources)))
            ledger.evaluation(step, {"accuracy": 0.5})
        ledger.undo_steps(9, [36])
    return folder


def roots(folder: Path) -> dict[str, int]:
    with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as db:
        return dict(db.execute("SELECT name, rootpage FROM sqlite_master WHERE rootpage > 1").fetchall())


NAMES = re.findall(r"^CREATE (?:TABLE|INDEX) (\w+)", SCHEMA, re.M)


def zeros(data: bytearray, at: int) -> None:
    data[at : at + PAGE] = bytes(PAGE)


def noise(data: bytearray, at: int) -> None:
    data[at : at + PAGE] = bytes((7 * i * i + 31) % 251 for i in range(PAGE))


def another_page(data: bytearray, at: int) -> None:
    other = PAGE if at != PAGE else 2 * PAGE
    data[at : at + PAGE], data[other : other + PAGE] = data[other : other + PAGE], data[at : at + PAGE]


def a_bit_of_its_header(data: bytearray, at: int) -> None:
    data[at] ^= 0x04  # what kind of page it is


@pytest.mark.parametrize("damage", [zeros, noise, another_page, a_bit_of_its_header])
def test_a_damaged_page_of_any_table_or_index_is_named_before_anything_is_done(whole: Path, tmp_path: Path, damage) -> None:
    found = roots(whole)
    assert set(NAMES) <= found.keys() and "undone_steps" in NAMES
    for name, page in found.items():
        folder = shutil.copytree(whole, tmp_path / name)
        data = bytearray((folder / "ledger.sqlite").read_bytes())
        damage(data, (page - 1) * PAGE)
        (folder / "ledger.sqlite").write_bytes(data)
        with pytest.raises(LedgerError, match=rf"ledger.sqlite is (damaged|no whole database) \(.*\); {MEND}") as caught:
            SqliteLedger(folder, mode="open")
        assert "\n" not in str(caught.value), name
        shutil.rmtree(folder)


def test_rows_that_name_rows_which_are_gone(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        db.execute("DELETE FROM tasks WHERE key = 3")
    db.close()
    with pytest.raises(LedgerError, match=rf"a row of groups names a row of tasks that is not there and .* {MEND}"):
        SqliteLedger(folder, mode="open")


def test_a_file_that_takes_too_long_to_check_is_taken_as_it_is(whole: Path, tmp_path: Path, monkeypatch) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as db:
        db.execute("DELETE FROM tasks WHERE key = 3")
        with pytest.raises(LedgerError):
            database.check_pages(db, folder)
        monkeypatch.setattr(database, "CHECK_S", -1.0)
        monkeypatch.setattr(database, "_INSTRUCTIONS", 1)
        database.check_pages(db, folder)
        assert db.execute("SELECT count(*) FROM groups").fetchone() == (60,), "later statements have no deadline"


@pytest.mark.parametrize("size", ["half", "a part of a page", "the head of the file"])
def test_a_file_that_was_cut_off(whole: Path, tmp_path: Path, size: str) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    path = folder / "ledger.sqlite"
    pages = path.stat().st_size // PAGE
    os.truncate(path, {"half": pages // 2 * PAGE, "a part of a page": pages * PAGE - 100, "the head of the file": 100}[size])
    with pytest.raises(LedgerError, match=MEND) as caught:
        SqliteLedger(folder, mode="open")
    assert "\n" not in str(caught.value)


def test_every_command_says_so_in_one_sentence(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / "config.json").write_text("{}")
    for contents in (b"no database" * 1000, (folder / "ledger.sqlite").read_bytes()[: 5 * PAGE]):
        (folder / "ledger.sqlite").write_bytes(contents)
        for command in ("ledger", "why", "samples"):
            error = CliRunner().invoke(app, [command, str(folder)]).exception
            assert isinstance(error, LedgerError) and "is no whole database" in str(error), (command, error)


def crashed(folder: Path, copy: Path, *left_out: str) -> Path:
    """What a process that was killed leaves behind, without some of it."""
    return shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.lock", "*-shm", *left_out))


def test_a_lost_log_is_told_and_the_run_goes_on_from_what_is_there(tmp_path: Path) -> None:
    with SqliteLedger(tmp_path / "run") as ledger:
        for i in range(5):
            ledger.admit(i, task(i))
            ledger.finish(group(i))
        ledger.begin_step(0, 0, [0])
        ledger.retain(checkpoint=1)  # which is called with each checkpoint
        for i in range(5, 12):
            ledger.admit(i, task(i))
            ledger.finish(group(i))
        for step in range(1, 8):
            ledger.begin_step(step, 0, [step])
        kept, lost = crashed(ledger.folder, tmp_path / "kept"), crashed(ledger.folder, tmp_path / "lost", "*-wal")
    with SqliteLedger(kept, mode="open") as ledger:
        assert ledger.last_step() == 7 and not ledger.doubts
    with SqliteLedger(lost, mode="open") as ledger:
        (doubt,) = ledger.doubts
        assert "ledger.sqlite knows 1 steps, but trajectories/ holds what the weights of step 3 sampled" in doubt
        assert "its log ledger.sqlite-wal was lost" in doubt and ledger.events("ledger_doubted")
        assert ledger.counts().conserved and ledger.next_group_id() == 5
        ledger.admit(5, task(5))
        ledger.finish(group(5))
        ledger.begin_step(1, 0, [5])
        assert ledger.verify() == []


def test_a_power_cut_that_took_admissions_is_no_lost_log(tmp_path: Path) -> None:
    with SqliteLedger(tmp_path / "run") as ledger:
        ledger.admit(0, task(0))
        ledger.finish(group(0))
        ledger.begin_step(0, 0, [0])
        before = crashed(ledger.folder, tmp_path / "before")
        ledger.admit(1, task(1))
        ledger.finish(group(1))
        shutil.copytree(tmp_path / "run" / "trajectories", before / "trajectories", dirs_exist_ok=True)
    with SqliteLedger(before, mode="open") as ledger:
        assert not ledger.doubts and ledger.next_group_id() == 1


@pytest.mark.parametrize("gone", ["*-wal", "ledger.sqlite*"])
def test_a_run_whose_whole_ledger_is_lost_is_not_begun_again_in_silence(tmp_path: Path, gone: str) -> None:
    with SqliteLedger(tmp_path / "run") as ledger:
        ledger.admit(0, task(0))
        ledger.finish(group(0))
        folder = crashed(ledger.folder, tmp_path / "copy", gone)
    assert not has_ledger(folder)
    before = sorted(p.name for p in folder.iterdir())
    with pytest.raises(
        RunFolderError, match=r"is (empty|not there), but trajectories hold a run: .*-wal was lost .*put both"
    ):
        SqliteLedger(folder)
    assert sorted(p.name for p in folder.iterdir() if not p.name.startswith("ledger.lock")) == before


def test_what_was_recovered_in_part_is_gone_on_with_and_said(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        db.execute("DELETE FROM step_groups WHERE step = 3")
        db.execute("CREATE TABLE lost_and_found (rootpgno INTEGER, pgno INTEGER)")  # as `.recover` makes it
    db.close()
    with SqliteLedger(folder, mode="open") as ledger:
        (doubt,) = ledger.doubts
        assert "does not add up: 4 groups lost, 0 trained twice" in doubt and not ledger.counts().conserved


@pytest.mark.parametrize(("lost", "twice"), [(4, 0), (0, 2), (1, 1)])
def test_either_sum_alone_is_a_doubt(lost: int, twice: int) -> None:
    said = database.sums_doubt(lost, twice)
    assert f"does not add up: {lost} groups lost, {twice} trained twice" in said and not database.sums_doubt(0, 0)


def test_a_file_that_cannot_be_written(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    with SqliteLedger(folder, mode="open") as ledger:
        ledger._db.execute("PRAGMA query_only = 1")  # as of a medium that is mounted read-only
        with pytest.raises(LedgerError, match=r"no permission to write .* check the owner and the mount of the folder"):
            ledger.event("anything", {})
        ledger._db.execute("PRAGMA query_only = 0")
        ledger.event("anything", {})
