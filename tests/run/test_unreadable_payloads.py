"""Recorded trajectories that cannot be read any more: a run goes on, says so, and never trains on what it cannot read."""

from __future__ import annotations

import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from letter_pairs import letter_model, train
from typer.testing import CliRunner

import tidemill
from tidemill.cli.main import app
from tidemill.controller.controller import Controller
from tidemill.core.errors import LedgerError
from tidemill.ledger import SqliteLedger

pytestmark = pytest.mark.runs

SAVED, CUT, LAST = 4, 7, 9  # steps: of the checkpoint, of the end by force, and of the end


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return letter_model(tmp_path_factory.mktemp("model") / "m")


def run(model: Path, folder: Path, **more: Any) -> tidemill.run.api.Run:
    settings: dict[str, Any] = {
        "rollout": {"groups": 2, "group_size": 2, "max_tokens": 3},
        "algorithm": {"name": "grpo", "zero_variance": "keep"},
        "eval": {"every": 2, "tasks": 2, "final_tasks": 2},
        "record": {"checkpoint_every": SAVED, "trace": False, "probe_every": 0},
        "scoring": {"accept": ["gold", "garbage"], "workers": 0},
    }
    return train(model, folder, LAST, settings | more)


def cut_off(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Path:
    """A run that ended by force when step `CUT` had been trained and the next ones were being sampled."""
    gather = Controller._gather

    async def until(self: Controller, step: int, publishing: Any) -> Any:
        if step == CUT:
            await self.buffer.settled()  # groups wait for the step
            raise KeyboardInterrupt
        return await gather(self, step, publishing)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Controller, "_gather", until)
        run(model, folder, **more)
    return folder


@pytest.fixture(scope="module")
def interrupted(model: Path, tmp_path_factory) -> dict[bool, Path]:
    """Whether it is deterministic -> its folder."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for exact in (False, True):
            folder = tmp_path_factory.mktemp("cut") / "run"
            found[exact] = cut_off(model, folder, patch, deterministic=exact)
    return found


def asked(folder: Path, sql: str) -> list[tuple]:
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        return db.execute(sql).fetchall()


def rows_of(folder: Path, which: str) -> list[tuple[int, int, int, int]]:
    """group, segment, offset, length of trajectories, in the order they were written."""
    sql = "SELECT group_id, segment, offset, length FROM trajectories JOIN groups ON id = group_id"
    return asked(folder, f"{sql} WHERE {which} ORDER BY segment, offset")


def flip(folder: Path, which: str) -> set[int]:
    """Damage one byte in the last trajectory of each such group."""
    last = {group: (segment, offset + 24 + length // 2) for group, segment, offset, length in rows_of(folder, which)}
    for segment, at in last.values():
        path = folder / "trajectories" / f"seg-{segment:06d}.bin"
        data = bytearray(path.read_bytes())
        data[at] ^= 0x10
        path.write_bytes(data)
    return set(last)


def truncate(folder: Path, which: str) -> set[int]:
    """Cut a segment off in the middle of the first such trajectory."""
    group, segment, offset, length = rows_of(folder, which)[0]
    path = folder / "trajectories" / f"seg-{segment:06d}.bin"
    path.write_bytes(path.read_bytes()[: offset + 24 + length // 2])
    return {group} | {g for g, s, o, _ in rows_of(folder, "1") if s == segment and o > offset}


def remove(folder: Path, which: str) -> set[int]:
    segment = rows_of(folder, which)[0][1]
    (folder / "trajectories" / f"seg-{segment:06d}.bin").unlink()
    return {g for g, s, _, _ in rows_of(folder, "1") if s == segment}


CASES = {
    "a byte of a step in the middle": (flip, "step = 5", 5),
    "a byte of the first step after the checkpoint": (flip, "step = 4", 4),
    "bytes of several steps": (flip, "step IN (5, 6)", 5),
    "a byte of the last step": (flip, "step = 6", 6),
    "bytes of what waits to be trained": (flip, "fate IS NULL", CUT),
    "the end of the segment": (truncate, "step = 6", None),
    "the segment": (remove, "step = 5", 4),
}


QUICK = ("a byte of the first step after the checkpoint", "bytes of what waits to be trained", "the segment")


@pytest.mark.parametrize("case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES])
def test_it_goes_on_from_before_the_step_that_cannot_be_read(model, interrupted, tmp_path, case, capfd):
    damage, which, first = CASES[case]
    folder = shutil.copytree(interrupted[False], tmp_path / "run", symlinks=True)
    lost = damage(folder, which)
    trained = dict(asked(folder, "SELECT id, step FROM groups WHERE fate = 'trained' AND step >= 4"))
    unreadable = lost & trained.keys()
    first = min((trained[g] for g in unreadable), default=CUT) if first is None else first
    ended = run(model, folder, quiet=False)
    said = capfd.readouterr()
    assert ended.complete and ended.report["steps"] == LAST

    fates = dict(asked(folder, "SELECT id, coalesce(reason, fate) FROM groups"))
    assert {g for g, fate in fates.items() if fate == "unreadable"} == unreadable
    undone = {g for g, step in trained.items() if step >= first} - unreadable
    assert undone <= {g for g, fate in fates.items() if fate == "undone"}, "the rest of these steps is in no weights"
    assert not {fates[g] for g, step in trained.items() if step < first} - {"trained"}
    ((admitted, n, dropped, pending, missing, twice),) = asked(folder, "SELECT * FROM conservation")
    assert (n, missing, twice) == (2 * LAST, 0, 0) and admitted == n + dropped + pending
    assert asked(folder, "SELECT count(*) FROM live_steps") == [(LAST,)]
    assert not asked(folder, "SELECT 1 FROM live_step_groups JOIN groups ON id = group_id WHERE reason = 'unreadable'")
    with SqliteLedger(folder, mode="read") as ledger:
        lives = {record.step: record.incarnation for record in ledger.steps()}
        assert {s for s, life in lives.items() if life == 0} == set(range(SAVED)), (
            "what the checkpoint holds stays as it was"
        )
        assert {s for s, _ in ledger.undone_steps()} == (set(range(first, CUT)) if unreadable else set())
        assert lives.keys() == set(range(LAST)) and {damage.group_id for damage in ledger.verify()} <= lost
        assert {e.step for e in ledger.evaluations()} == {0, 2, 4, 6, 8, 9}
    notes = " ".join((said.out + said.err).split())  # as one line
    assert notes.count("cannot be read (") == bool(unreadable)
    if unreadable:
        count = len(unreadable)
        assert re.search(
            rf"\b{count} groups? of steps? {first + 1}\b.*steps? ({first + 1} to )?{CUT} (is|are) undone", notes
        )
    every = ("why", "ledger", "samples --tokens", "parity") if damage is not flip or "middle" in case else ("why", "ledger")
    for command in every:
        name, *options = command.split()
        result = CliRunner().invoke(app, [name, str(folder), *options])
        nothing_left = command == "parity" and "nothing to replay" in result.output
        assert result.exit_code == nothing_left and "Traceback" not in result.output, (command, result.output)


def test_an_interruption_right_after_it_changes_nothing(model, interrupted, tmp_path, monkeypatch):
    """Damage before any step that could be trained again, and an end before any new step was begun."""
    folder = shutil.copytree(interrupted[False], tmp_path / "run", symlinks=True)
    flip(folder, "step = 4")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

        async def never(*_: Any) -> Any:
            raise KeyboardInterrupt

        patch.setattr(Controller, "_gather", never)
        run(model, folder)
    assert run(model, folder).complete
    ((_, n, _, _, missing, twice),) = asked(folder, "SELECT * FROM conservation")
    assert (n, missing, twice) == (2 * LAST, 0, 0)


def weights(folder: Path) -> bytes:
    return (folder / "final" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(model, interrupted, tmp_path_factory) -> bytes:
    folder = shutil.copytree(interrupted[True], tmp_path_factory.mktemp("whole") / "run", symlinks=True)
    run(model, folder, deterministic=True)
    return weights(folder)


@pytest.mark.parametrize("which", ["step = 5", "step = 6", "fate IS NULL"])
def test_a_deterministic_run_samples_the_same_again(model, interrupted, undisturbed, tmp_path, which):
    """What was sampled since the checkpoint is sampled again by the same weights with the same seeds: the same bits."""
    folder = shutil.copytree(interrupted[True], tmp_path / "run", symlinks=True)
    (position,) = asked(folder, "SELECT max(id) + 1 FROM groups WHERE step < 4")
    lost = flip(folder, f"{which} AND id >= {position[0] + 2}")
    assert lost
    assert run(model, folder, deterministic=True).complete
    assert weights(folder) == undisturbed
    assert asked(folder, "SELECT max(incarnation) FROM steps") == [(0,)]
    with SqliteLedger(folder, mode="read") as ledger:
        assert ledger.verify() == [] and ledger.counts().conserved and "unreadable" not in ledger.counts().dropped


def test_a_deterministic_run_says_where_its_bits_are_others(model, interrupted, undisturbed, tmp_path, capfd):
    """The weights that sampled a group of before the checkpoint are gone, so it cannot be sampled again as it was."""
    folder = shutil.copytree(interrupted[True], tmp_path / "run", symlinks=True)
    ((first_id,),) = asked(folder, "SELECT min(id) FROM groups WHERE step = 4")
    assert flip(folder, f"id = {first_id}")
    assert run(model, folder, deterministic=True, quiet=False).complete
    said = " ".join("".join(capfd.readouterr()).split())
    assert f"deterministic = true, but group {first_id} cannot be read and cannot be sampled again as it was" in said
    assert weights(folder) != undisturbed
    with SqliteLedger(folder, mode="read") as ledger:
        assert ledger.counts().conserved and ledger.counts().dropped["unreadable"] == 1
        assert len(ledger.events("not_repeated")) == 1


def test_a_group_that_becomes_another_is_not_called_the_same(model, interrupted, tmp_path, monkeypatch, capfd):
    """Where an environment is not deterministic: the run says so, and the next start does not try it again."""
    folder = shutil.copytree(interrupted[True], tmp_path / "run", symlinks=True)
    ((group_id,),) = asked(folder, "SELECT max(id) FROM groups WHERE step = 6")
    flip(folder, f"id = {group_id}")
    ((once,),) = asked(folder, "SELECT sql FROM sqlite_master WHERE name = 'outcomes_once'")
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        db.execute("DROP TRIGGER outcomes_once")
        db.execute("UPDATE outcomes SET reward = 0.125 WHERE group_id = ?", (group_id,))  # no score of this reward
        db.execute(once)
    db.close()
    with pytest.raises(
        LedgerError, match=f"group {group_id} cannot be read .* sampled again it is another: the run does not"
    ):
        run(model, folder, deterministic=True)
    assert run(model, folder, deterministic=True, quiet=False).complete
    assert "so the weights are not, to the last bit" in " ".join("".join(capfd.readouterr()).split())
    with SqliteLedger(folder, mode="read") as ledger:
        assert ledger.counts().conserved and ledger.fate(group_id) == "dropped: unreadable"


def test_a_group_of_weights_that_were_never_recorded_is_sampled_again(model, interrupted, tmp_path):
    """A kill may come between what an engine samples by new weights and the record of their publication."""
    folder = shutil.copytree(interrupted[False], tmp_path / "run", symlinks=True)
    ((latest,),) = asked(folder, "SELECT max(newest) FROM trajectories JOIN groups ON id = group_id WHERE fate IS NULL")
    waiting = {g for g, *_ in rows_of(folder, f"fate IS NULL AND newest = {latest}")}
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        db.execute("DELETE FROM versions WHERE step = ?", (latest,))
    db.close()
    assert run(model, folder).complete
    with SqliteLedger(folder, mode="read") as ledger:
        assert {e.detail["group"] for e in ledger.events("payload_lost")} == waiting != set()
        assert ledger.counts().conserved
