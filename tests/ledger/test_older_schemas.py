"""Ledgers of older schemas: read as they are, migrated when a run goes on, and whole wherever a migration is killed."""

from __future__ import annotations

import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from ledger_cases import OLDER, assert_same, group, older_ledger, task

from tidemill.core.errors import LedgerError
from tidemill.ledger import SqliteLedger
from tidemill.ledger import ledger as module
from tidemill.ledger.older_schemas import DIGESTS, definitions_of, digest_of
from tidemill.ledger.schema import VERSION

COPIED = ("tasks", "steps", "groups", "step_groups", "versions", "evals", "events")
OLD_ROWS = """
INSERT INTO trajectories SELECT t.group_id, place, t.sample, t.seat, segment, offset, length, crc, gone_at, tokens, sampled,
t.turns, reward, outcome, reason, parts, finish, oldest, newest, temperature, mean_logprob, text
FROM new.trajectories AS t LEFT JOIN new.outcomes USING (group_id, sample)
"""


def filled(folder: Path) -> Path:
    """A ledger of the present schema with a row in most tables, and every kind of outcome."""
    with SqliteLedger(folder, durability="process") as ledger:
        for i in range(9):
            ledger.admit(i, task(i))
            if i < 8:
                ledger.finish(group(i))
        for step in range(2):
            ledger.begin_step(step, 0, [2 * step, 2 * step + 1])
            ledger.end_step(step, 0, {"reward": 0.5})
            ledger.evaluation(step, {"accuracy": 0.5})
        ledger.replay_step(1, 1)
        ledger.drop(4, "zero_variance")
    return folder


def older(new: Path, folder: Path, schema: Path) -> Path:
    """The same record as a ledger of an older schema."""
    older_ledger(folder, schema)
    os.rename(new / "trajectories", folder / "moved")
    os.rmdir(folder / "trajectories")
    os.rename(folder / "moved", folder / "trajectories")
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        triggers = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        db.execute("ATTACH ? AS new", (str(new / "ledger.sqlite"),))
        for name, _ in triggers:
            db.execute(f"DROP TRIGGER {name}")
        for table in COPIED:
            db.execute(f"INSERT INTO {table} SELECT * FROM new.{table}")
        db.execute(OLD_ROWS)
        for _, sql in triggers:
            db.execute(sql)
    db.close()
    return folder


def everything(folder: Path) -> dict[str, Any]:
    """What a reader sees of a ledger, but for who judged: older ledgers do not say."""
    with SqliteLedger(folder, mode="read") as ledger:
        rows = ledger.samples(limit=99, order="recent")
        outcomes = "group_id, sample, judgement, at, outcome, reward, reason, parts FROM outcomes ORDER BY 1, 2"
        return {
            "samples": [(r.task, r.reward, r.outcome, r.outcome_reason, r.later, r.text) for r in rows],
            "counts": ledger.counts(),
            "history": repr(list(ledger.history())),
            "experience": ledger.experience(0, 2),
            "earned": ledger.earned(),
            "steps": ledger.steps(live=False),
            "composition": [(ledger.groups_of(step), ledger.trained_again(step)) for step in range(2)],
            "undone": (ledger.undone_steps(), ledger.incarnation()),
            "evaluations": ledger.evaluations(),
            "outcomes": [tuple(row) for row in ledger._rows(f"SELECT {outcomes}")],
        }


def schema_of(folder: Path) -> str:
    with SqliteLedger(folder, mode="read") as ledger:
        return ledger.meta()["schema"]


@pytest.mark.parametrize("schema", OLDER, ids=lambda path: path.stem)
def test_it_is_read_as_it_is_and_migrated_when_it_is_gone_on_with(tmp_path: Path, schema: Path) -> None:
    expected = everything(filled(tmp_path / "new"))
    assert {outcome for _, _, outcome, *_ in expected["samples"]} == {"score", "unscorable", "infra_error", None}
    folder, name = older(tmp_path / "new", tmp_path / "old", schema), schema.stem.replace("_", " ")
    bytes_before = (folder / "ledger.sqlite").read_bytes()
    assert everything(folder) == expected and (folder / "ledger.sqlite").read_bytes() == bytes_before
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        assert digest_of(definitions_of(db)) == DIGESTS[name]
    db.close()
    with SqliteLedger(folder, mode="open", durability="process") as ledger:
        assert ledger.meta()["schema"] == str(VERSION) and ledger.doubts == [] and ledger.verify() == []
        assert_same(ledger.load(0), group(0))
    assert everything(folder) == expected
    with SqliteLedger(folder, mode="open", durability="process") as ledger:
        ledger.begin_step(2, 1, [5, 6], again=[0])
        ledger.undo_steps(2, [5])
        assert ledger.counts().conserved and ledger.trained_again(2, 1) == [0]


def test_tables_that_somebody_changed_are_damage(tmp_path: Path) -> None:
    folder = older(filled(tmp_path / "new"), tmp_path / "old", OLDER[-1])
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        db.execute("DROP TRIGGER groups_keep")
    db.close()
    for mode in ("read", "open"):
        with pytest.raises(LedgerError, match="its tables are not those that were made"):
            SqliteLedger(folder, mode=mode)


@pytest.mark.parametrize("schema", [OLDER[0], pytest.param(OLDER[-1], marks=pytest.mark.slow)], ids=lambda path: path.stem)
@pytest.mark.runs
def test_a_migration_that_is_killed_leaves_the_old_ledger_or_the_new_one(tmp_path: Path, schema: Path) -> None:
    """Killed before each of its statements, in a process of its own; then the next start goes on."""
    expected = everything(filled(tmp_path / "new"))
    folder = older(tmp_path / "new", tmp_path / "old", schema)
    seen, statement = list[str](), 0
    while (ended := _opened_until(folder, statement)) == -signal.SIGKILL:
        seen.append(schema_of(folder))
        assert everything(folder) == expected, f"killed at statement {statement}"
        statement += 1
        if seen[-1] == str(VERSION):
            break
    assert ended in (0, -signal.SIGKILL) and schema_of(folder) == str(VERSION)
    assert seen.count(schema.stem.replace("_", " ")) > 20, "a kill for each statement"


def _opened_until(folder: Path, statement: int) -> int:
    """Open a ledger in a child that kills itself at its n-th statement of the migration; returns how it ended."""
    child = os.fork()
    if child == 0:
        left, connect = [statement], module.connect

        def traced(*args: Any) -> sqlite3.Connection:
            db, begun = connect(*args), []

            def look(sql: str) -> None:
                begun.extend([sql] if sql.startswith("BEGIN") else [])
                if begun:
                    left[0] -= 1
                    if left[0] < 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            db.set_trace_callback(look)
            return db

        try:
            module.connect = traced  # only in this process
            SqliteLedger(folder, mode="open").close()
        except BaseException:
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
