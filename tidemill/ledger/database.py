"""Opens `ledger.sqlite`, and checks that it is whole, of a known schema, and the newest state.

    damaged pages, indexes, references -> LedgerError;   a record older than the folder around it (its log was lost) -> doubt

SQLite keeps no checksum of a page, so a changed digit in a figure is noticed only where it contradicts something else. The
log (`ledger.sqlite-wal`) holds the latest transactions until they are copied into the file. If a folder is copied without
the log, or somebody removes it, the ledger falls back to an earlier state, which SQLite cannot tell from the newest one.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path

from tidemill.core.errors import LedgerError, RunFolderError
from tidemill.core.types import Trajectory
from tidemill.ledger.older_schemas import DIGESTS, Definitions, definitions_of, digest_of
from tidemill.ledger.records import MEND, explained
from tidemill.ledger.schema import SCHEMA, VERSION

BUSY_S = 10.0  # how long a write waits for a lock that another sqlite3 session holds


def has_ledger(folder: str | Path) -> bool:
    """True when a run began in this folder; False after a start that was killed before its first commit."""
    folder = Path(folder)
    if not (folder / "ledger.sqlite").exists():
        return False
    with explained(folder), contextlib.closing(connect(folder, "read")) as db:
        return _tables(db) > 0


def connect(folder: Path, mode: str) -> sqlite3.Connection:
    """Connect to a ledger in a mode of `SqliteLedger`. Raises RunFolderError where none can be."""
    if sqlite3.sqlite_version_info < (3, 37):
        raise RunFolderError(f"SQLite {sqlite3.sqlite_version} is too old for the ledger: use a Python with SQLite >= 3.37")
    access = {"create": "rwc", "open": "rw", "read": "ro"}[mode]
    path = (folder / "ledger.sqlite").resolve()
    uri = f"{path.as_uri()}?mode={access}"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_S, check_same_thread=False)
    db.execute("PRAGMA foreign_keys = ON")
    if mode != "read":
        journal = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if journal != "wal":
            db.close()
            raise RunFolderError(
                f"{str(folder)!r} cannot hold a ledger (journal mode {journal!r}): put run_dir on a local disk"
            )
        db.execute("PRAGMA fullfsync = 1")  # only once: it makes SQLite recompile every statement
        db.execute("PRAGMA synchronous = NORMAL")  # a commit waits for the disk only on request: see `SqliteLedger`
    return db


def expect_file(folder: Path, mode: str) -> None:
    """Raise RunFolderError when `ledger.sqlite` is missing, also for create where one was lost."""
    exists = (folder / "ledger.sqlite").exists()
    if mode != "create" and not exists:
        raise RunFolderError(f"{str(folder)!r} is not a run folder: there is no ledger.sqlite in it")
    left = [name for name in ("trajectories", "checkpoints") if (folder / name).is_dir() and any((folder / name).iterdir())]
    if mode == "create" and left and not has_ledger(folder):
        raise RunFolderError(
            f"{str(folder)!r}: ledger.sqlite is {'empty' if exists else 'not there'}, but {' and '.join(left)} hold a run: "
            "it or its log ledger.sqlite-wal was lost (the folder was copied without it, or it was removed); put both back "
            "as they were, or give another run_dir"
        )


def create_tables(db: sqlite3.Connection, folder: Path) -> None:
    """Create the tables in one transaction. Raises RunFolderError for a folder with a ledger."""
    if _tables(db):
        raise RunFolderError(f"{str(folder)!r} holds a ledger already: open it to go on, or choose another run_dir")
    facts = {"schema": str(VERSION), "created": repr(time.time())}
    rows = "".join(f"INSERT INTO meta VALUES ('{key}', '{value}');" for key, value in facts.items())
    db.executescript(f"BEGIN;{SCHEMA}{rows}COMMIT;")


def expect_schema(db: sqlite3.Connection, folder: Path) -> str:
    """The schema of a ledger. Raises RunFolderError if unknown, LedgerError if its tables are not those."""
    if not _tables(db):
        raise RunFolderError(f"{str(folder)!r} holds an empty ledger: a start was interrupted; start it again")
    schema = dict(map(tuple, db.execute("SELECT key, value FROM meta"))).get("schema")
    if schema is None:
        raise LedgerError(f"the ledger in {str(folder)!r} is damaged: it does not say what its schema is; {MEND}")
    if schema != str(VERSION) and schema not in DIGESTS:
        known = ", ".join([*DIGESTS, str(VERSION)])
        raise RunFolderError(f"{str(folder)!r} has a ledger of schema {schema}; this version reads {known}: use its own")
    found = definitions_of(db)
    if (digest_of(found) != DIGESTS[schema]) if schema in DIGESTS else (found != present()):
        raise LedgerError(f"the ledger in {str(folder)!r} is damaged: its tables are not those that were made; {MEND}")
    return schema


def present() -> Definitions:
    """The definitions of the present schema."""
    with contextlib.closing(sqlite3.connect(":memory:", timeout=BUSY_S)) as fresh:
        fresh.executescript(SCHEMA)
        return definitions_of(fresh)


def _tables(db: sqlite3.Connection) -> int:
    return db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()[0]


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
