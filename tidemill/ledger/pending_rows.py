"""Pending rows: rows of groups that are written later, many in one transaction.

That costs a fifth of what one transaction per group costs.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from tidemill.core.types import Group, Task
from tidemill.ledger.row_formats import Judged, outcome_rows, outcomes_of, task_row, trajectory_rows
from tidemill.ledger.segments import Location

_TOGETHER = 8  # rows that one statement inserts
LONGEST_S = 1.0  # seconds after which waiting rows are due


@dataclass(slots=True)
class Waiting:
    """Waiting rows of admitted groups, and of finished groups whose payloads are written."""

    admitted: dict[int, tuple[tuple[str, ...], float]] = field(default_factory=dict)  # by id: the task's row, the time
    finished: dict[int, tuple[Group, Sequence[Location], float]] = field(default_factory=dict)  # by id, with the time
    judge: str = ""  # name of the environment that judges, where a task does not name one of several

    def __bool__(self) -> bool:
        return bool(self.admitted or self.finished)

    def admit(self, group_id: int, task: Task, now: float) -> None:
        """Add an admitted group. Raises LedgerError when its task cannot be recorded."""
        self.admitted[group_id] = task_row(task), now

    def due(self, now: float) -> bool:
        """True when a row has waited for too long, or the clock was set back."""
        oldest = [next(iter(rows.values()))[-1] for rows in (self.admitted, self.finished) if rows]
        return any(not 0 <= now - at <= LONGEST_S for at in oldest)

    def insert(self, db: sqlite3.Connection) -> None:
        """Insert all rows within the caller's transaction; call `clear` once it is committed."""
        if self.admitted:
            db.executemany(
                "INSERT INTO tasks (id, env, prompt, data, digest) VALUES (?, ?, ?, ?, ?) ON CONFLICT (digest) DO NOTHING",
                [task for task, _ in self.admitted.values()],
            )
            db.executemany(
                "INSERT INTO groups (id, task_key, admitted_at) SELECT ?, key, ? FROM tasks WHERE digest = ?",
                [(group_id, now, task[-1]) for group_id, (task, now) in self.admitted.items()],
            )
        if self.finished:
            times = [(now, group_id) for group_id, (_, _, now) in self.finished.items()]
            db.executemany("UPDATE groups SET finished_at = ? WHERE id = ?", times)
            rows = trajectory_rows((group, places) for group, places, _ in self.finished.values())
            insert(db, "trajectories", rows)
            judged = [
                row
                for group, _, now in self.finished.values()
                for row in outcome_rows(group.id, outcomes_of(group), now, group.task.env or self.judge)
            ]
            insert(db, "outcomes", judged)

    def clear(self) -> None:
        self.admitted.clear()
        self.finished.clear()


def insert(db: sqlite3.Connection, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows, several by each statement: that takes three quarters of the time of one statement for each."""
    whole = len(rows) - len(rows) % _TOGETHER
    for count, some in ((_TOGETHER, rows[:whole]), (1, rows[whole:])):
        if some:
            row = f"({', '.join('?' * len(some[0]))})"
            values = (tuple(chain.from_iterable(some[i : i + count])) for i in range(0, len(some), count))
            db.executemany(f"INSERT INTO {table} VALUES {', '.join([row] * count)}", values)


def judge_again(db: sqlite3.Connection, judged: Mapping[int, Judged], judge: str) -> None:
    """Insert a further judgement of attempts, by group, within the caller's transaction."""
    now, count = time.time(), "SELECT count(*) FROM outcomes WHERE group_id = ? AND sample = ?"
    for group_id, outcomes in judged.items():
        for sample, outcome in outcomes.items():
            (before,) = db.execute(count, (group_id, sample)).fetchone()
            insert(db, "outcomes", outcome_rows(group_id, {sample: outcome}, now, judge, before))
