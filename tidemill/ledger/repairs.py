"""What the ledger records where payloads cannot be read: steps that are undone, and payloads that were made again.

A step since the checkpoint is run again from its recorded trajectories. Where one of them cannot be read, that step and
those after it are undone: no weights hold them any more. What was trained at them is dropped, as `unreadable` where that
is so and as `undone` where not, and so is what waits and was sampled by their weights. Conservation holds: the fate of a
group changes from trained to dropped, and only because its step was undone, which the database itself watches over.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from tidemill.core import serialization
from tidemill.core.types import Group, Trajectory
from tidemill.ledger.records import LedgerError, Undone
from tidemill.ledger.row_formats import trajectory_rows
from tidemill.ledger.schema import upgrade
from tidemill.ledger.segments import Location, segment_numbers, whole_groups

UNREADABLE, UNDONE = "unreadable", "undone"  # reasons
_PAYLOAD = ("segment", "offset", "length", "crc", "gone_at")  # columns that say where it lies

_DROP = """
UPDATE groups SET fate = 'dropped', reason = ?, settled_at = ?, step = NULL, incarnation = NULL,
dropped_after = (SELECT max(step) FROM live_steps) WHERE id = ?
"""


def undo(db: sqlite3.Connection, first: int, unreadable: Collection[int]) -> Undone:
    """Within the caller's transaction. first: the step of the first group that cannot be read."""
    (schema,) = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    newest, changes = upgrade(schema)
    for statement in changes:
        db.execute(statement)
    db.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (newest,))
    (last,) = db.execute("SELECT max(step) FROM live_steps").fetchone()
    if last is None or last < first:
        raise LedgerError(f"cannot undo the steps from {first} on: the last step begun is {last}")
    now = time.time()
    db.execute(
        "INSERT INTO undone_steps SELECT step, incarnation, ? FROM steps WHERE step >= ? "
        "AND (step, incarnation) NOT IN (SELECT step, incarnation FROM undone_steps)",
        (now, first),
    )
    doomed = [row[0] for row in db.execute("SELECT id FROM groups WHERE fate = 'trained' AND step >= ?", (first,))]
    waiting = (
        "SELECT DISTINCT group_id FROM trajectories JOIN groups ON groups.id = group_id WHERE fate IS NULL AND newest > ?"
    )
    doomed += [row[0] for row in db.execute(waiting, (first,))]
    db.executemany(_DROP, [(UNREADABLE if each in unreadable else UNDONE, now, each) for each in sorted(doomed)])
    lost = sum(each in unreadable for each in doomed)
    detail = {"first": first, "last": last, "unreadable": lost, "others": len(doomed) - lost}
    db.execute("INSERT INTO events (at, kind, detail) VALUES (?, 'steps_undone', ?)", (now, json.dumps(detail)))
    return Undone(**detail)


def point_again(db: sqlite3.Connection, group: Group, places: Sequence[Location]) -> bool:
    """Within the caller's transaction: the group's rows name the payloads at `places`. False where the figures differ."""
    rows = db.execute("SELECT * FROM trajectories WHERE group_id = ? ORDER BY place", (group.id,))
    names = [column[0] for column in rows.description]
    figures = [i for i, name in enumerate(names) if name not in _PAYLOAD]
    before, now = [tuple(row) for row in rows], trajectory_rows([(group, places)])
    if [[row[i] for i in figures] for row in before] != [[row[i] for i in figures] for row in now]:
        return False
    sets = ", ".join(f"{name} = ?" for name in _PAYLOAD)
    values = [(*(row[names.index(name)] for name in _PAYLOAD), group.id, row[names.index("place")]) for row in now]
    db.executemany(f"UPDATE trajectories SET {sets} WHERE group_id = ? AND place = ?", values)
    return True


def recorded_since(
    folder: Path, last: int, end: int, wanted: Callable[[int], bool]
) -> Iterator[tuple[int, list[Trajectory], list[Location]]]:
    """The wanted groups that lie whole in segments, from byte `end` of segment `last` on, with their places."""
    for number in segment_numbers(folder):
        if number < last:
            continue
        for group_id, payloads, places in whole_groups(folder, number, end if number == last else 0):
            if wanted(group_id):
                with contextlib.suppress(ValueError):  # it is sampled again
                    attempts = [serialization.decode(payload, Trajectory) for payload in payloads]
                    for each in attempts:
                        each.check()
                    yield group_id, attempts, places
