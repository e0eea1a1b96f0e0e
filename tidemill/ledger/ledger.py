"""SqliteLedger, the durable record of a run (I3): SQLite for events, segments for tokens.

    admit -> finish (payloads written; rows follow) -> begin_step (fate 'trained', before the update) -> end_step
                                                     \\-> drop (fate 'dropped', with its reason)

Once a call has returned, its effect survives the death of this process. The one exception is the admission of a group
that has not finished: it may be lost without harm, because the id is then admitted again. The rows of admitted and of
finished groups are written together with a later call, at the latest with one that finds them too old (`row_formats`). A
group has finished as soon as its payloads lie in a segment; `open` writes the rows that still waited when the last writer
died.

Durability "power" (the default) also protects against power cuts. Calls about more than a single group (a step that begins,
a version, an event ...) first flush the payloads to the medium, and then the log of all transactions up to their own; they
cover the calls about single groups before them. So nothing is trained on that is not on the medium. Groups that a power cut
takes are sampled again, and dropped ones may be pending again: `open` puts groups back in flight whose row outlived their
payload. With "process" nothing is flushed. The database itself stays consistent with both.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tidemill.core import fault_injection, serialization
from tidemill.core.atomic_files import flush
from tidemill.core.errors import LedgerError
from tidemill.core.types import Group, Metrics, Task, Trajectory, Version
from tidemill.ledger.database import (
    check_pages,
    connect,
    create_tables,
    expect_file,
    expect_schema,
    log_doubt,
    present,
    sums_doubt,
)
from tidemill.ledger.lock import FolderLock
from tidemill.ledger.older_schemas import DIGESTS, migrate, read_as_present
from tidemill.ledger.queries import LedgerReads
from tidemill.ledger.records import Retained, Undone, explained
from tidemill.ledger.repairs import point_again, recorded_since, undo
from tidemill.ledger.retention import retain
from tidemill.ledger.row_formats import Judged, Waiting, as_json, figures_json, insert, judge_again
from tidemill.ledger.segments import HEADER_BYTES, MOST, Location, SegmentWriter, segment_numbers

SEGMENT_BYTES = 64 << 20
KEEP_BYTES = 4 << 30


class SqliteLedger(LedgerReads, contextlib.AbstractContextManager):
    """Writer and reader of one run's record. Thread-safe; a call blocks for about one disk write."""

    def __init__(
        self,
        folder: str | Path,
        *,
        mode: Literal["create", "open", "read"] = "create",
        durability: Literal["power", "process"] = "power",
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """Create a new ledger, open one as its only writer, or read one, also beside a live run.

        Raises RunFolderError when the folder does not fit the mode, is in use, or holds another schema."""
        folder = Path(folder)
        self._mode = mode
        self._guard: FolderLock | None = None
        self._segments: SegmentWriter | None = None
        self._waiting = Waiting()
        self._newest = -1  # the greatest id that may be in the ledger
        self._in_flight: set[int] = set()  # ids that may finish
        self.doubts: list[str] = []  # signs that the record is not complete, a sentence each
        self._sync = sync = durability == "power"
        with explained(folder):
            if mode == "create":
                (folder / "trajectories").mkdir(parents=True, exist_ok=True)
            expect_file(folder, mode)
            if mode != "read":
                self._guard = FolderLock(folder)
            try:
                super().__init__(folder, connect(folder, mode))
                if mode == "create":
                    create_tables(self._db, folder)
                    if sync:
                        flush(folder)
                elif mode == "open":
                    check_pages(self._db, folder)
                    if expect_schema(self._db, folder) in DIGESTS:
                        with self._write() as db:
                            migrate(db, present())
                elif expect_schema(self._db, folder) in DIGESTS:
                    read_as_present(self._db)
                if mode != "read":
                    first = max([*segment_numbers(self._trajectories), self._last_segment()]) + 1
                    self._segments = SegmentWriter(self._trajectories, limit=segment_bytes, sync=sync, first=first)
                if mode == "open":
                    self._newest = self.next_group_id() - 1
                    self._in_flight = {group.id for group in self.pending() if not group.finished}
                    self._waiting.judge = self.meta().get("judge", "")
                    self._find_finished()
                    self._renounce_lost()
                    counts = self.counts()
                    self._doubt(sums_doubt(counts.lost, counts.trained_twice))
            except BaseException:
                self.close()
                raise

    def admit(self, group_id: int, task: Task) -> None:
        """Admit a group under a new id; its row is written with a later call or read."""
        now = time.time()
        with self._lock:  # bounded: by SQLite's time-out
            self._expect_writer()
            if group_id <= self._newest and self._one("SELECT 1 FROM groups WHERE id = ?", group_id):
                raise LedgerError(f"group {group_id} was admitted before")
            if self._waiting.due(now):
                self._record_waiting()
            self._waiting.admit(group_id, task, now)
            self._in_flight.add(group_id)
            self._newest = max(self._newest, group_id)

    def finish(self, group: Group) -> None:
        """Write a group's payloads, rows follow with a later call. The group must not change any more."""
        if not 0 < len(group.trajectories) <= MOST:
            what = f"{len(group.trajectories)} trajectories, of {MOST} at most" if group.trajectories else "no trajectory"
            raise LedgerError(f"group {group.id} has {what}: drop it with a reason instead")
        try:
            payloads = [serialization.encode(t) for t in group.trajectories]
        except (TypeError, ValueError) as error:
            raise LedgerError(f"group {group.id} cannot be recorded: {error}") from error
        with self._lock, explained(self.folder):  # bounded: by SQLite's time-out
            self._expect_writer()
            if group.id not in self._in_flight:
                raise LedgerError(f"cannot finish group {group.id}: it {self._standing(group.id)}")
            if group.id in self._waiting.admitted:  # without its row the payloads could not be assigned to a task
                self._record_waiting()
            fault_injection.reach("controller", "record", group.id)
            assert self._segments is not None
            places, now = self._segments.append(group.id, payloads), time.time()
            if self._waiting.due(now):
                self._record_waiting()
            self._waiting.finished[group.id] = group, places, now
            self._in_flight.discard(group.id)

    def drop(self, group_id: int, reason: str) -> None:
        """Drop a group. reason: a short, stable word by which drops are counted."""
        if not reason:
            raise LedgerError(f"group {group_id} cannot be dropped without a reason")
        with self._write(lasting=False) as db:
            changed = db.execute(
                "UPDATE groups SET fate = 'dropped', reason = ?, settled_at = ?, "
                "dropped_after = (SELECT max(step) FROM live_steps) WHERE id = ? AND fate IS NULL",
                (reason, time.time(), group_id),
            ).rowcount
            if changed != 1:
                raise LedgerError(f"cannot drop group {group_id}: it {self._standing(group_id)}")
            self._in_flight.discard(group_id)

    def begin_step(self, step: int, incarnation: int, group_ids: Sequence[int], again: Sequence[int] = ()) -> None:
        """Record a step's groups, all or nothing. again: those of earlier steps, whose fates stay."""
        now = time.time()
        with self._write() as db:
            last = self.last_step()
            if last is not None and step != last + 1:
                hint = "a step that was begun is replayed, not begun again" if step <= last else "no step may be left out"
                raise LedgerError(f"cannot begin step {step}: the last step begun is {last}; {hint}")
            if not group_ids:
                raise LedgerError(f"cannot begin step {step} without groups")
            db.execute("INSERT INTO steps (step, incarnation, begun_at) VALUES (?, ?, ?)", (step, incarnation, now))
            for group_id in group_ids:
                changed = db.execute(
                    "UPDATE groups SET fate = 'trained', settled_at = ?, step = ?, incarnation = ? "
                    "WHERE id = ? AND fate IS NULL AND finished_at IS NOT NULL",
                    (now, step, incarnation, group_id),
                ).rowcount
                if changed != 1:
                    raise LedgerError(f"cannot train on group {group_id} at step {step}: it {self._standing(group_id)}")
            self._compose(db, step, incarnation, group_ids, again)

    def replay_step(self, step: int, incarnation: int, lost: Collection[int] = ()) -> tuple[list[int], list[int]]:
        """Record another run of a step that was begun; returns its groups, and those it trains again.

        Its own incarnation means that the replay is bit-identical; a greater one makes a new incarnation of the step.
        lost: groups of earlier steps that a new incarnation leaves out because they cannot be read.
        """
        with self._write() as db:
            live = db.execute("SELECT incarnation FROM live_steps WHERE step = ?", (step,)).fetchone()
            if live is None or incarnation < live[0]:
                what = "it was never begun" if live is None else f"incarnation {live[0]} of it exists"
                raise LedgerError(f"cannot replay step {step} as incarnation {incarnation}: {what}")
            ids, again = self.groups_of(step, live[0]), self.trained_again(step, live[0])
            if incarnation > live[0]:
                again = [group_id for group_id in again if group_id not in lost]
            if incarnation == live[0]:
                once_more = "UPDATE steps SET runs = runs + 1, ended_at = NULL WHERE step = ? AND incarnation = ?"
                db.execute(once_more, (step, incarnation))
            else:
                db.execute(
                    "INSERT INTO steps (step, incarnation, begun_at) VALUES (?, ?, ?)", (step, incarnation, time.time())
                )
                self._compose(db, step, incarnation, ids, again)
            return ids, again

    def undo_steps(self, first: int, unreadable: Collection[int]) -> Undone:
        """Undo the steps from `first` on, which have unreadable groups and are in no checkpoint: `repairs`."""
        with self._write() as db:
            return undo(db, first, unreadable)

    def record_again(self, group: Group) -> bool:
        """Replace a group's unreadable payloads by the same ones, sampled again. False: they differ, nothing changed."""
        payloads = [serialization.encode(t) for t in group.trajectories]
        assert self._segments is not None
        with self._write() as db:
            places = self._segments.append(group.id, payloads)
            self._segments.flush()  # before the rows that point at the payloads
            return point_again(db, group, places)

    def renounce(self, group_id: int, reason: str) -> None:
        """Put a finished group that was not trained yet back in flight: it is sampled again."""
        with self._write() as db:
            db.execute("UPDATE groups SET finished_at = NULL WHERE id = ? AND fate IS NULL", (group_id,))
            for table in ("trajectories", "outcomes"):
                db.execute(f"DELETE FROM {table} WHERE group_id = ?", (group_id,))
        self._in_flight.add(group_id)
        self.event("payload_lost", {"group": group_id, "reason": reason})

    @staticmethod
    def _compose(
        db: sqlite3.Connection, step: int, incarnation: int, group_ids: Sequence[int], again: Sequence[int]
    ) -> None:
        for table, ids in (("step_groups", group_ids), ("step_replays", again)):
            insert(db, table, [(step, incarnation, place, group_id) for place, group_id in enumerate(ids)])

    def end_step(self, step: int, incarnation: int, metrics: Metrics) -> None:
        with self._write() as db:
            changed = db.execute(
                "UPDATE steps SET ended_at = ?, metrics = ? WHERE step = ? AND incarnation = ? AND ended_at IS NULL",
                (time.time(), figures_json(metrics, f"step {step}"), step, incarnation),
            ).rowcount
            if changed != 1:
                raise LedgerError(f"cannot end step {step}, incarnation {incarnation}: it was not begun, or has ended")

    def publish(self, version: Version) -> None:
        """Record a published version. Raises LedgerError when it was published with another fingerprint (I1)."""
        key = (version.policy, version.step, version.incarnation)
        with self._write() as db:
            row = (*key, version.fingerprint, time.time())
            db.execute("INSERT INTO versions VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", row)
            (known,) = self._one("SELECT fingerprint FROM versions WHERE (policy, step, incarnation) = (?, ?, ?)", *key)
            if known != version.fingerprint:
                raise LedgerError(f"{version} was published with fingerprint {known!r} and is now {version.fingerprint!r}")

    def evaluation(self, step: int, results: Metrics) -> None:
        """Record an evaluation of the weights `step`; keys such as "accuracy" and "n" may begin with "eval/"."""
        plain = {key.removeprefix("eval/"): value for key, value in results.items()}
        n = int(plain["n"]) if "n" in plain else None
        row = (step, time.time(), n, plain.get("accuracy"), figures_json(plain, f"evaluation of step {step}"))
        with self._write() as db:
            db.execute("INSERT INTO evals (step, at, n, accuracy, metrics) VALUES (?, ?, ?, ?, ?)", row)

    def event(self, kind: str, detail: dict) -> None:
        row = (time.time(), kind, as_json(detail, f"event {kind!r}"))
        with self._write() as db:
            db.execute("INSERT INTO events (at, kind, detail) VALUES (?, ?, ?)", row)

    def set_meta(self, key: str, value: str) -> None:
        """Record a fact about the whole run, such as the digest of its recipe."""
        with self._write() as db:
            db.execute("INSERT INTO meta VALUES (?1, ?2) ON CONFLICT (key) DO UPDATE SET value = ?2", (key, value))

    def judged_by(self, name: str) -> None:
        """Name the environment that judges the groups which finish from here on."""
        if self.meta().get("judge") != name:
            self.set_meta("judge", name)
        self._waiting.judge = name

    def judge_again(self, judged: Mapping[int, Judged], judge: str) -> None:
        """Add a judgement of recorded attempts, by group. Earlier ones stay, and training uses the first."""
        with self._write() as db:
            judge_again(db, judged, judge)

    def retain(self, *, checkpoint: int, steps: int = 0, max_bytes: int = KEEP_BYTES) -> Retained:
        """Remove the oldest payloads while all together take more than `max_bytes` (see `retention`).

        Rows and fates stay. checkpoint: steps before this one are in a valid checkpoint, so that a resume does not need
        their payloads. steps: keep the payloads of groups that were settled within this number of last steps.
        """
        assert self._segments is not None
        with self._lock:  # bounded: by SQLite's time-out
            last = self.last_step() or 0  # a read, which first writes the waiting rows that retention looks at
            bound = min(checkpoint, last + 1 - steps)
            return retain(self._db, self._write, self._trajectories, self._segments.current, bound, max_bytes)

    def close(self) -> None:
        """Close the files and release the lock. A killed process leaves the same record."""
        if self._segments is not None:
            with contextlib.suppress(LedgerError, OSError):  # waiting rows may be lost: see the module
                self._record_waiting()
            self._segments.close()
        if hasattr(self, "_db"):
            self._db.close()
        if self._guard is not None:
            self._guard.release()

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _write(self, lasting: bool = True) -> Iterator[sqlite3.Connection]:
        """Run one transaction, all or nothing. lasting: it and everything before it reach the medium."""
        self._expect_writer()
        lasting = lasting and self._sync
        with self._lock, explained(self.folder):  # bounded: by SQLite's time-out
            if lasting:
                if self._segments is not None:
                    self._segments.flush()
                self._flush_commits(True)
            try:
                self._db.execute("BEGIN IMMEDIATE")
                self._waiting.insert(self._db)
                yield self._db
                self._db.execute("COMMIT")
                self._waiting.clear()
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            finally:
                if lasting:
                    self._flush_commits(False)

    def _record_waiting(self) -> None:
        if self._waiting and not self._db.in_transaction:
            with self._write(lasting=False):
                pass

    def _rows(self, sql: str, *args: Any) -> list[sqlite3.Row]:
        with self._lock:  # bounded: by SQLite's time-out
            self._record_waiting()
            return super()._rows(sql, *args)

    def _flush_commits(self, on: bool) -> None:
        """Set if a commit flushes the log, which holds the pages of all earlier commits too."""
        self._db.execute(f"PRAGMA synchronous = {'FULL' if on else 'NORMAL'}")

    def _find_finished(self) -> None:
        """Mark groups as finished whose rows were still waiting when the last writer died."""
        last = self._last_segment()
        (top,) = self._one("SELECT max(offset + length) FROM trajectories WHERE segment = ?", last)
        found: dict[int, tuple[Group, list[Location], float]] = {}
        strangers = list[Trajectory]()  # of groups unknown to the ledger: a power cut may take their admission
        wanted = lambda group_id: group_id in self._in_flight or group_id > self._newest  # noqa: E731
        for group_id, attempts, places in recorded_since(self._trajectories, last, top + HEADER_BYTES if top else 0, wanted):
            if group_id in self._in_flight:
                found[group_id] = Group(group_id, self.task_of(group_id), attempts), places, time.time()
            else:
                strangers += attempts
        known = self._one("SELECT coalesce(max(step) + 1, 0) FROM steps")[0]
        self._doubt(log_doubt(known, [*strangers, *(t for group, _, _ in found.values() for t in group.trajectories)]))
        if found:
            self._in_flight -= found.keys()
            self._waiting.finished |= found
            self.event("rollouts_found", {"groups": sorted(found)})

    def _renounce_lost(self) -> None:
        """Put finished, untrained groups back in flight whose payload a power cut or damage took."""
        rows = self._rows("SELECT id FROM groups WHERE fate IS NULL AND finished_at IS NOT NULL ORDER BY id")
        for group_id, reason in self.unreadable(row["id"] for row in rows).items():
            self.renounce(group_id, reason)

    def _doubt(self, what: str) -> None:
        if what:
            self.doubts.append(what)
            self.event("ledger_doubted", {"reason": what})

    def _last_segment(self) -> int:
        return self._one("SELECT coalesce(max(segment), 0) FROM trajectories")[0]

    def _expect_writer(self) -> None:
        if self._mode == "read":
            raise LedgerError(f"the ledger in {str(self.folder)!r} was opened for reading only")

    def _standing(self, group_id: int) -> str:
        """The state of a group, as the end of an error sentence."""
        row = self._one("SELECT * FROM groups WHERE id = ?", group_id)
        if row is None:
            return "was never admitted"
        if row["fate"] is None:
            return "is in flight" if row["finished_at"] is None else "has finished and is pending"
        return f"was trained at step {row['step']}" if row["reason"] is None else f"was dropped ({row['reason']})"
