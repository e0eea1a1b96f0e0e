"""Integrity checks before a writer goes on: is `ledger.sqlite` undamaged and the newest state?

    damaged pages, indexes, references -> LedgerError;   a record older than the folder around it (its log was lost) -> doubt

SQLite keeps no checksum of a page, so a changed digit in a figure is noticed only where it contradicts something else. The
log (`ledger.sqlite-wal`) holds the latest transactions until they are copied into the file. If a folder is copied without
the log, or somebody removes it, the ledger falls back to an earlier state, which SQLite cannot tell from the newest one.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path

from tidemill.core.errors import LedgerError
from tidemill.core.types import Trajectory
from tidemill.ledger.records import MEND

CHECK_S = 30.0  # limit of the check, enough for some GB; a check that takes longer is given up
_INSTRUCTIONS = 100_000  # of SQLite's virtual machine, between two looks at the clock


def check_pages(db: sqlite3.Connection, folder: Path) -> None:
    """Raise LedgerError when pages, indexes, constraints or references are damaged."""
    deadline = time.monotonic() + CHECK_S
    db.set_progress_handler(lambda: time.monotonic() > deadline, _INSTRUCTIONS)
    try:
        found = [row[0] for row in db.execute("PRAGMA integrity_check(20)")]
        problems = [] if found == ["ok"] else found
        if not problems:
            orphans = db.execute("PRAGMA foreign_key_check").fetchmany(20)
            problems = [f"a row of {table} names a row of {parent} that is not there" for table, _, parent, _ in orphans]
    except sqlite3.OperationalError as error:
        if error.sqlite_errorname != "SQLITE_INTERRUPT":
            raise
        return
    finally:
        db.set_progress_handler(None, 0)
    if problems:
        first = problems[0].replace("*** in database main ***\n", "").partition("\n")[0]
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise LedgerError(f"the ledger in {str(folder)!r}: ledger.sqlite is damaged ({first}{more}); {MEND}")


def sums_doubt(lost: int, trained_twice: int) -> str:
    """A sentence of doubt when the record does not add up, as after a repair; else empty."""
    if not lost and not trained_twice:
        return ""
    return (
        f"the ledger does not add up: {lost} groups lost, {trained_twice} trained twice; the run goes on, and what is said "
        "of its past is not whole (docs/ledger.md defines these figures)"
    )


def log_doubt(known: int, trajectories: Iterable[Trajectory]) -> str:
    """A sentence of doubt when trajectories are of later weights than the `known` steps; else empty."""
    newest = max((source.step for each in trajectories for source in each.sources), default=0)
    if newest <= known:
        return ""
    evidence = f"trajectories/ holds what the weights of step {newest} sampled"
    return f"{lost_log(known, evidence)}; the run goes on from what is there, and what came later is done again"


def lost_log(known: int, evidence: str) -> str:
    return (
        f"ledger.sqlite knows {known} steps, but {evidence}: it is of some time before, so its log ledger.sqlite-wal was "
        "lost (the folder was copied without it, or it was removed)"
    )
