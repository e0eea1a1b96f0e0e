"""Rows that wait to be written in one transaction with others: it costs a fifth of a transaction for each group."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field

from tidemill.core.types import Group, Task
from tidemill.ledger.row_formats import task_row, trajectory_rows
from tidemill.ledger.segments import Location

LONGEST_S = 1.0


@dataclass(slots=True)
class Waiting:
    """Of admitted groups, and of finished ones, whose payloads are written."""

    admitted: dict[int, tuple[tuple[str, ...], float]] = field(default_factory=dict)  # by id: the task's row, and when
    finished: dict[int, tuple[Group, Sequence[Location], float]] = field(default_factory=dict)  # by id: also where

    def __bool__(self) -> bool:
        return bool(self.admitted or self.finished)

    def admit(self, group_id: int, task: Task, now: float) -> None:
        """Raises LedgerError when the task cannot be recorded."""
        self.admitted[group_id] = task_row(task), now

    def due(self, now: float) -> bool:
        """Whether something has waited for too long, or the clock was set back."""
        oldest = [next(iter(rows.values()))[-1] for rows in (self.admitted, self.finished) if rows]
        return any(not 0 <= now - at <= LONGEST_S for at in oldest)

    def insert(self, db: sqlite3.Connection) -> None:
        """Within the caller's transaction; `clear` when it was committed."""
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
            db.executemany(f"INSERT INTO trajectories VALUES ({', '.join('?' * len(rows[0]))})", rows)

    def clear(self) -> None:
        self.admitted.clear()
        self.finished.clear()
