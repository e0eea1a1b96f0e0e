"""Opens the file `ledger.sqlite` and checks that it holds a ledger of a known schema."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

from tidemill.core.errors import LedgerError, RunFolderError
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
