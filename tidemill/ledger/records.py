"""Result types of the ledger, and its errors with advice for the user."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tidemill.core.errors import LedgerError
from tidemill.core.types import Metrics, Task


@dataclass(frozen=True, slots=True)
class Counts:
    """Figures of conservation (I3), from the view `conservation`; docs/ledger.md defines each."""

    admitted: int
    trained: int
    dropped: dict[str, int]  # by reason
    pending: int
    lost: int
    trained_twice: int

    def figures(self) -> dict[str, Any]:
        """The figures as plain data, under the names of docs/ledger.md."""
        return asdict(self)

    @property
    def conserved(self) -> bool:
        fates = self.trained + sum(self.dropped.values()) + self.pending
        return self.admitted == fates and self.lost == 0 and self.trained_twice == 0


@dataclass(frozen=True, slots=True)
class Earned:
    """Summary of the outcomes of all attempts of a run, greedy ones left out."""

    attempts: int
    scored: int
    best: float | None  # reward; None: no attempt has a score
    worst: float | None
    solved: int
    varied: int  # groups whose attempts differ in reward
    cut: int  # attempts that ended at a limit of tokens or at the end of the context
    cut_context: int  # of these, by the context
    longest_cut: int | None  # tokens of the longest reply that a limit cut off, among attempts of one turn
    infra_errors: int
    unscorable: int
    reason: str | None  # the most common reason for a missing score


@dataclass(frozen=True, slots=True)
class PendingGroup:
    """A group without a fate: if `finished`, its trajectories are on disk (`load`); else in flight."""

    id: int
    task: Task
    finished: bool


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One incarnation of a training step; times in seconds since 1970."""

    step: int
    incarnation: int
    begun_at: float
    ended_at: float | None
    runs: int
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One evaluation of the weights of `step`, on `n` tasks."""

    step: int
    at: float
    n: int | None
    accuracy: float | None
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Event:
    """One recorded event of a run, such as a lost worker."""

    id: int
    at: float
    kind: str
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Judgement:
    """A later judgement of an attempt; see the table `outcomes`."""

    judgement: int
    at: float
    outcome: str
    reward: float | None
    reason: str | None
    judge: str


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A row of the trajectory index, with the fate and the judgement that training uses. later: others since."""

    group_id: int
    place: int
    task: Task
    fate: str | None
    reason: str | None
    step: int | None
    sample: int
    seat: int
    reward: float | None
    outcome: str | None
    outcome_reason: str | None
    judge: str | None
    later: list[Judgement]
    finish: str
    tokens: int
    sampled: int
    oldest: int | None
    newest: int | None
    mean_logprob: float | None
    text: str
    gone: bool
    ends: bool  # the last row of its attempt; the others have no outcome

    @property
    def latest(self) -> float | None:
        """The reward of the latest judgement."""
        return self.later[-1].reward if self.later else self.reward


@dataclass(frozen=True, slots=True)
class Damage:
    """A trajectory that the index lists and that cannot be read."""

    group_id: int
    place: int
    problem: str


@dataclass(frozen=True, slots=True)
class Undone:
    """Result of `undo_steps`. Steps are counted from 0, as everywhere in the ledger."""

    first: int
    last: int
    unreadable: int  # groups that were dropped because they cannot be read
    others: int  # groups of the same steps, or sampled by their weights, that were dropped with them


@dataclass(slots=True)
class Retained:
    """Result of `retain`: removed segments, and bytes freed and kept."""

    removed: list[int] = field(default_factory=list)  # segments
    freed_bytes: int = 0
    kept_bytes: int = 0


MEND = (
    "put back a copy of it from before the damage, repair it with `sqlite3 ledger.sqlite .recover`, or give another "
    "run_dir; keep a copy of the folder as it is"
)
"""Advice for the user of a damaged `ledger.sqlite`."""


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn an error of the disk or of SQLite into a LedgerError that says what to do."""
    try:
        yield
    except (sqlite3.Error, OSError, UnicodeDecodeError) as error:  # UnicodeDecodeError: text of a damaged page
        raise LedgerError(f"the ledger in {str(folder)!r}: {_advice(error)}") from error


def _advice(error: sqlite3.Error | OSError | UnicodeDecodeError) -> str:
    name = error.sqlite_errorname if isinstance(error, sqlite3.Error) and hasattr(error, "sqlite_errorname") else ""
    number = error.errno if isinstance(error, OSError) else None
    kept = "what was recorded before is safe"
    if name == "SQLITE_FULL" or number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the disk is full ({error}); {kept}: free some space and start the same command again"
    if name.startswith("SQLITE_BUSY"):
        return f"another program holds it ({error}); end the sqlite3 session that has a transaction open, then start again"
    if name.startswith("SQLITE_READONLY") or number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission to write ({error}); {kept}: check the owner and the mount of the folder"
    if name.startswith("SQLITE_CORRUPT") or name == "SQLITE_NOTADB" or isinstance(error, UnicodeDecodeError):
        return f"the file is damaged: ledger.sqlite is no whole database ({error}); {MEND}"
    if name.startswith("SQLITE_IOERR") or number == errno.EIO:
        return f"the disk failed ({error}); {kept}: check the disk, then start the same command again"
    return f"{type(error).__name__}: {error}; {kept}"
