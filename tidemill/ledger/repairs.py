"""Repairs of a ledger with unreadable payloads: undo steps, or record payloads sampled again.

After a resume, a step since the checkpoint is run again from its recorded trajectories. When one of them cannot be read,
that step and all later ones are undone: no weights hold them any more. Groups trained at undone steps are dropped, with the
reason `unreadable` or `undone`, and so are pending groups that were sampled by their weights. Conservation holds: a fate
changes from trained to dropped only when its step was undone, and the database enforces that.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from tidemill.core import serialization
from tidemill.core.attempt_checks import check_row
from tidemill.core.errors import LedgerError
from tidemill.core.types import Group, Trajectory
from tidemill.ledger.records import Undone
from tidemill.ledger.row_formats import outcome_rows, outcomes_of, trajectory_rows
from tidemill.ledger.segments import Location, segment_numbers, whole_groups

UNREADABLE, UNDONE = "unreadable", "undone"  # reasons of a drop
_PAYLOAD = ("segment", "offset", "length", "crc", "gone_at")  # columns that locate a payload

_DROP = """
UPDATE groups SET fate = 'dropped', reason = ?, settled_at = ?, step = NULL, incarnation = NULL,
dropped_after = (SELECT max(step) FROM live_steps) WHERE id = ?
"""


def undo(db: sqlite3.Connection, first: int, unreadable: Collection[int]) -> Undone:
    """Undo steps within the caller's transaction. Raises LedgerError when step `first` was not begun."""
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
    """Point a group's rows at the payloads at `places`; False, and no change, if other columns differ."""
    rows = db.execute("SELECT * FROM trajectories WHERE group_id = ? ORDER BY place", (group.id,))
    names = [column[0] for column in rows.description]
    figures = [i for i, name in enumerate(names) if name not in _PAYLOAD]
    before, now = [tuple(row) for row in rows], trajectory_rows([(group, places)])
    if [[row[i] for i in figures] for row in before] != [[row[i] for i in figures] for row in now]:
        return False
    recorded = db.execute("SELECT * FROM outcomes WHERE group_id = ? AND judgement = 0", (group.id,))
    judged = outcome_rows(group.id, outcomes_of(group), 0.0, "")
    if sorted(_said(row) for row in recorded) != sorted(map(_said, judged)):
        return False
    sets = ", ".join(f"{name} = ?" for name in _PAYLOAD)
    values = [(*(row[names.index(name)] for name in _PAYLOAD), group.id, row[names.index("place")]) for row in now]
    db.executemany(f"UPDATE trajectories SET {sets} WHERE group_id = ? AND place = ?", values)
    return True


def _said(row: Sequence[Any]) -> str:
    """A row of `outcomes` without the time and the judge."""
    return repr((*row[:3], *row[4:-1]))


def recorded_since(
    folder: Path, last: int, end: int, wanted: Callable[[int], bool]
) -> Iterator[tuple[int, list[Trajectory], list[Location]]]:
    """Iterate over the wanted groups that are complete in segments, from byte `end` of segment `last` on."""
    for number in segment_numbers(folder):
        if number < last:
            continue
        for group_id, payloads, places in whole_groups(folder, number, end if number == last else 0):
            if wanted(group_id):
                with contextlib.suppress(ValueError):  # an unsound group is skipped and sampled again
                    attempts = [serialization.decode(payload, Trajectory) for payload in payloads]
                    for each in attempts:
                        check_row(each)
                    yield group_id, attempts, places
