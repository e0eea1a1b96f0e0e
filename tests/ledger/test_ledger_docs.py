"""docs/ledger.md: every query runs and gives what the page says, and the page names every column."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_cases import group, task

from tidemill.core.types import Score
from tidemill.ledger import SqliteLedger

PAGE = (Path(__file__).parents[2] / "docs" / "ledger.md").read_text()
QUERIES = {re.sub(r"\W+", "-", title)[:40]: sql for title, sql in re.findall(r"([^\n]+)\n```sql\n(.*?)```", PAGE, re.S)}


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sqlite3.Connection]:
    folder = tmp_path_factory.mktemp("run")
    with SqliteLedger(folder, durability="process") as ledger:
        for i in range(8):
            ledger.admit(i, task(i))
            if i < 7:
                ledger.finish(group(i))
        ledger.begin_step(0, 0, [0, 1])
        ledger.end_step(0, 0, {"reward": 0.5})
        ledger.begin_step(1, 0, [2, 5])
        ledger.end_step(1, 0, {"reward": 0.75})
        ledger.replay_step(1, 1)
        ledger.drop(3, "zero_variance")
        ledger.drop(6, "infra_error")
        ledger.evaluation(1, {"accuracy": 0.5, "n": 4})
        ledger.event("checkpoint", {"step": 1})
        ledger.judge_again({2: {0: Score(0.0)}, 5: {1: Score(0.5)}, 0: {0: Score(1.0)}}, "new")
    reader = sqlite3.connect(f"{(folder / 'ledger.sqlite').as_uri()}?mode=ro", uri=True)
    yield reader
    reader.close()


def test_there_are_queries() -> None:
    assert len(QUERIES) >= 8 and PAGE.count("```sql") == len(QUERIES)


@pytest.mark.parametrize("title", QUERIES)
def test_every_query_of_the_page_answers(db: sqlite3.Connection, title: str) -> None:
    assert db.execute(QUERIES[title]).fetchall()


def answer(db: sqlite3.Connection, words: str) -> list[tuple]:
    (sql,) = [sql for title, sql in QUERIES.items() if words in title]
    return db.execute(sql).fetchall()


def test_some_answers_by_hand(db: sqlite3.Connection) -> None:
    assert answer(db, "missing") == [(1, 8, 4, 2, 2, 0, 0)]
    assert sorted(answer(db, "dropped")) == [("infra_error", 1, 1), ("zero_variance", 1, 1)]
    assert answer(db, "stale") == [(0, 3), (1, 1)]  # group 2 was sampled by weights 0 and trained at step 1
    assert [(r[0], r[1], r[3], r[4]) for r in answer(db, "Seconds")] == [(0, 0, 0.5, 0.5), (1, 1, None, None)]
    changed = [(2, 0, None, 0.0, "unscorable", "score"), (5, 1, 0.25, 0.5, "score", "score")]
    assert answer(db, "later-judgement") == changed
    assert [r[:2] for r in answer(db, "in-flight")] == [(4, "waiting"), (7, "in flight")]
    assert [r[1:] for r in answer(db, "happened")] == [("checkpoint", '{"step": 1}')]


def test_the_page_names_every_table_and_column(db: sqlite3.Connection) -> None:
    for name, kind in db.execute("SELECT name, type FROM sqlite_master WHERE type IN ('table', 'view')").fetchall():
        assert f"`{name}`" in PAGE, name
        if kind == "table":
            (line,) = [row for row in PAGE.splitlines() if row.startswith(f"| `{name}` | ")]
            assert set(re.findall(r"`(\w+)`", line.split("|")[3])) >= {
                c[1] for c in db.execute(f"PRAGMA table_info({name})")
            }
