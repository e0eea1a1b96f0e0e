"""Retention: removes old trajectory payloads while rows, fates and conservation stay.

A segment can be removed when every group in it has a fate and no resume can need it: its groups were dropped, or trained at
a step that a valid checkpoint holds. The rows are marked with the time before the file is removed. A kill in between leaves
a file that nobody reads; the next call removes it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from tidemill.ledger.records import Retained, explained
from tidemill.ledger.segments import segment_numbers, segment_path

_NEEDED = """
SELECT DISTINCT segment FROM trajectories JOIN groups ON groups.id = group_id
WHERE gone_at IS NULL AND (fate IS NULL OR coalesce(step, dropped_after, -1) >= ?)
"""


def retain(
    db: sqlite3.Connection,
    transaction: Callable[[], AbstractContextManager[sqlite3.Connection]],
    folder: Path,
    current: int | None,
    bound: int,
    max_bytes: int,
) -> Retained:
    """Remove the oldest segments settled before step `bound` until `max_bytes` are left; `current` stays."""
    with explained(folder):
        db.execute("PRAGMA wal_checkpoint(PASSIVE)")  # copies the log into the file: a log may get lost
        sizes = {n: segment_path(folder, n).stat().st_size for n in segment_numbers(folder)}
        indexed = {row[0] for row in db.execute("SELECT DISTINCT segment FROM trajectories WHERE gone_at IS NULL")}
        needed = {row[0] for row in db.execute(_NEEDED, (bound,))}
    result = Retained(kept_bytes=sum(sizes.values()))
    for number, size in sizes.items():
        over = result.kept_bytes > max_bytes
        if number == current or number in needed or not (over or number not in indexed):
            continue
        with transaction() as writer:
            writer.execute(
                "UPDATE trajectories SET gone_at = ? WHERE segment = ? AND gone_at IS NULL", (time.time(), number)
            )
        with explained(folder):
            segment_path(folder, number).unlink(missing_ok=True)
        result.removed.append(number)
        result.freed_bytes += size
        result.kept_bytes -= size
    return result
