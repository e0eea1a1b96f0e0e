"""Ledgers of older schemas: read through views of the present one, and migrated to it when a run goes on.

    3 knows offline replies, 4 groups that are trained again, 5 undone steps, 6 outcomes as rows of their own

"5 from 2" is a ledger of schema 2 in which a step was undone. A migration is one transaction, so a kill leaves either the
old ledger or the new one.
"""

from __future__ import annotations

import sqlite3
from hashlib import blake2b

from tidemill.ledger.schema import VERSION

DIGESTS = {
    "2": "209ac13ef3b2b13ec0ea2cd1c9716af9",
    "3": "9c840be154fa5e6cc31b5e078c836611",
    "4": "e3db3172f173c1226b83ef34fa806b16",
    "5": "2463151962bb1af0b222eede7a2cf7a0",
    "5 from 2": "9935768f94cc4bb14109fdb858ed72c9",
}
"""Digest of the definitions of each older schema, see `digest_of`. They do not change any more."""

Definitions = list[tuple[str, str, str, str]]
_INDEX = """
group_id, place, sample, seat, segment, offset, length, crc, gone_at, tokens, sampled, turns, finish, oldest, newest,
temperature, mean_logprob, text
"""  # columns of `trajectories`
_OUTCOMES = """
SELECT group_id, sample, 0 AS judgement, (SELECT finished_at FROM groups WHERE id = group_id) AS at, outcome, reward,
outcome_reason AS reason, parts, NULL AS turns, NULL AS seats,
(SELECT env FROM tasks JOIN groups ON task_key = key WHERE groups.id = group_id) AS judge
"""
_MISSING = {
    "step_replays": "SELECT 0 AS step, 0 AS incarnation, 0 AS place, 0 AS group_id WHERE 0",
    "live_step_replays": "SELECT 0 AS step, 0 AS incarnation, 0 AS place, 0 AS group_id WHERE 0",
    "undone_steps": "SELECT 0 AS step, 0 AS incarnation, 0 AS undone_at WHERE 0",
}


def definitions_of(db: sqlite3.Connection) -> Definitions:
    """(type, name, table, SQL) of everything that a ledger defines, sorted."""
    made = "name NOT GLOB 'lost_and_found*'"  # tables that `sqlite3 .recover` makes for rows it cannot place
    sql = f"SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_master WHERE {made}"
    return sorted(map(tuple, db.execute(sql)))


def digest_of(definitions: Definitions) -> str:
    return blake2b(repr(definitions).encode(), digest_size=16).hexdigest()


def read_as_present(db: sqlite3.Connection) -> None:
    """Give the connection temporary views, under which an older ledger has the tables of the present schema."""
    there = {name for _, name, _, _ in definitions_of(db)}
    views = {name: sql for name, sql in _MISSING.items() if name not in there}
    views["outcomes"] = f"{_OUTCOMES} FROM main.trajectories WHERE outcome IS NOT NULL"
    views["trajectories"] = f"SELECT {_INDEX} FROM main.trajectories"
    for name, sql in views.items():
        db.execute(f"CREATE TEMP VIEW {name} AS {sql}")


def migrate(db: sqlite3.Connection, present: Definitions) -> None:
    """Migrate an older ledger within the caller's transaction. present: the definitions of the present schema."""
    for kind, name, _, _ in definitions_of(db):
        if kind in ("view", "trigger"):
            db.execute(f"DROP {kind} {name}")
    db.execute("DROP INDEX trajectories_by_segment")
    db.execute("ALTER TABLE trajectories RENAME TO older")
    there = {name for _, name, _, _ in definitions_of(db)}
    missing = [(kind, sql) for kind, name, _, sql in present if sql and name not in there]
    for sql in [sql for kind, sql in missing if kind == "table"]:
        db.execute(sql)
    db.execute(f"INSERT INTO trajectories SELECT {_INDEX} FROM older")
    db.execute(
        f"INSERT OR IGNORE INTO outcomes {_OUTCOMES} FROM older WHERE outcome IS NOT NULL ORDER BY group_id, place DESC"
    )
    db.execute("DROP TABLE older")
    for sql in [sql for kind, sql in missing if kind != "table"]:
        db.execute(sql)
    db.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (str(VERSION),))
