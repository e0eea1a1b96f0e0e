"""Rows of the ledger's tables: tasks, trajectories and outcomes as rows, and rows that wait.

Waiting rows are written in one transaction. That costs a fifth of what one transaction per group costs.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from tidemill.core.errors import LedgerError
from tidemill.core.types import Group, InfraError, Outcome, Score, Task, Trajectory, Unscorable
from tidemill.ledger.segments import Location

TEXT_LIMIT = 500  # characters of a reply kept in the index; the payload has the whole reply
_PIECE = 1 << 14  # tokens summarised at once: for arrays of more the kernel would map new pages again and again
_strict = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_quick = msgspec.json.Encoder()  # also writes NaN and infinity as null
Judged = Mapping[int, Outcome]  # by attempt
KINDS = {Score: "score", Unscorable: "unscorable", InfraError: "infra_error"}


def task_row(task: Task) -> tuple[str, str, str, str, str]:
    """The row (id, env, prompt, data, digest) of a task; equal contents have equal digests."""
    prompt, data = as_json(task.prompt, f"task {task.id!r}"), as_json(task.data, f"task {task.id!r}")
    contents = "\0".join((task.env, task.id, prompt, data)).encode(errors="replace")
    return task.id, task.env, prompt, data, blake2b(contents, digest_size=16).hexdigest()


def trajectory_rows(groups: Iterable[tuple[Group, Sequence[Location]]]) -> list[tuple[Any, ...]]:
    """Rows of the table `trajectories`, one for each trajectory of groups with the given locations."""
    found = [(g.id, i, t, at) for g, places in groups for i, (t, at) in enumerate(zip(g.trajectories, places, strict=True))]
    trajectories = [t for _, _, t, _ in found]
    at_once = max(1, _PIECE * len(found) // max(1, sum(len(t.tokens) for t in trajectories)))
    summaries = [row for i in range(0, len(found), at_once) for row in _sampled(trajectories[i : i + at_once])]
    return [
        (
            *(group, i, t.sample, t.seat, at.segment, at.offset, at.length, at.crc, None),
            *(len(t.tokens), sampled, t.turns, str(t.finish)),
            *versions,
            t.temperature,
            logprob,
            text if (text := t.text[:TEXT_LIMIT]).isascii() else text.encode(errors="replace").decode(),
        )
        for (group, i, t, at), (sampled, *versions, logprob) in zip(found, summaries, strict=True)
    ]


def outcomes_of(group: Group) -> Judged:
    """The outcome of each judged attempt: that of its last trajectory."""
    last = {t.sample: t.outcome for t in group.trajectories}
    return {sample: outcome for sample, outcome in last.items() if outcome is not None}


def outcome_rows(group_id: int, judged: Judged, at: float, judge: str, judgement: int = 0) -> list[tuple[Any, ...]]:
    """Rows of the table `outcomes`, one for each of a group's attempts."""
    rows = []
    for sample, it in judged.items():
        if isinstance(it, Score):
            parts = figures_json(it.parts, "score") if it.parts else None
            turns = as_json([*it.turns], "score") if it.turns else None
            seats = as_json([*it.seats], "score") if it.seats else None
            rows.append((group_id, sample, judgement, at, "score", it.value, None, parts, turns, seats, judge))
        else:
            rows.append((group_id, sample, judgement, at, KINDS[type(it)], None, it.reason, None, None, None, judge))
    return rows


def _sampled(trajectories: Sequence[Trajectory]) -> list[tuple[int, int | None, int | None, float | None]]:
    """The columns (sampled, oldest, newest, mean_logprob) of trajectories, of which any may have no token.

    All are computed at once, because calls of NumPy on single ones would dominate.
    """
    counts = np.array([np.count_nonzero(t.mask) for t in trajectories], np.int64)
    some = counts > 0  # for an empty stretch, reduceat would return the element after it
    if not some.any():
        return [(0, None, None, None)] * len(trajectories)
    mask = np.concatenate([t.mask for t in trajectories])
    versions = np.concatenate([t.versions for t in trajectories])[mask]
    logprobs = np.concatenate([t.logprobs for t in trajectories])[mask]
    starts = (np.cumsum(counts) - counts)[some]
    oldest, newest = np.minimum.reduceat(versions, starts), np.maximum.reduceat(versions, starts)
    means = np.add.reduceat(logprobs, starts, dtype=np.float64) / counts[some]
    figures = zip(oldest.tolist(), newest.tolist(), means.tolist(), strict=True)
    return [(n, *next(figures)) if n else (0, None, None, None) for n in counts.tolist()]


def figures_json(figures: dict[str, float], owner: str) -> str:
    """Figures as JSON, like `as_json` in a tenth of the time: for every step and trajectory."""
    try:
        return _quick.encode(figures).decode()
    except (TypeError, ValueError):  # a name with half of a surrogate pair, or a NumPy number
        return as_json(figures, owner)


def as_json(value: Any, owner: str) -> str:
    """JSON text for SQLite, with null for NaN and infinity. Raises LedgerError, which names `owner`."""
    try:
        try:
            text = _strict.encode(value)
        except (TypeError, ValueError):
            value = _plain(value)
            text = _strict.encode(value)
        # UTF-8 has no encoding for half of a surrogate pair: such text is escaped
        return text if text.isascii() or text.encode(errors="replace").decode() == text else json.dumps(value)
    except (TypeError, ValueError) as error:
        raise LedgerError(f"{owner} holds something that is not plain JSON: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
