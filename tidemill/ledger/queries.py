"""Queries on the ledger, for a writer's connection and for a read-only one beside a live run."""

from __future__ import annotations

import json
import math
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from tidemill.core import serialization
from tidemill.core.errors import CodecError, LedgerError, PayloadLost
from tidemill.core.outcomes import SOLVED
from tidemill.core.types import GREEDY, Group, Metrics, Task, Trajectory, Version
from tidemill.ledger.records import (
    Counts,
    Damage,
    Earned,
    EvalRecord,
    Event,
    Judgement,
    PendingGroup,
    SampleRow,
    StepRecord,
    explained,
)
from tidemill.ledger.row_formats import task_row
from tidemill.ledger.segments import Location, read_record

Order = Literal["worst", "best", "recent"]
_ORDERS = {
    "worst": "reward ASC, groups.id DESC, place",
    "best": "reward DESC, groups.id DESC, place",
    "recent": "groups.id DESC, place",
}
_PAGE = 1_000  # groups per query
_TASK = "tasks.id AS task_id, tasks.env, tasks.prompt, tasks.data"
_ENDS = (  # the row is the last one of its attempt, which the outcome is shown with
    "trajectories.place = (SELECT max(place) FROM trajectories AS siblings "
    "WHERE siblings.group_id = trajectories.group_id AND siblings.sample = trajectories.sample)"
)
_JUDGED = (  # the judgement that training uses
    "LEFT JOIN outcomes ON outcomes.group_id = trajectories.group_id AND outcomes.sample = trajectories.sample "
    f"AND judgement = 0 AND {_ENDS}"
)
_LATER = (
    "SELECT json_group_array(json_array(judgement, at, outcome, reward, reason, judge)) FROM outcomes AS later WHERE "
    "later.group_id = trajectories.group_id AND later.sample = trajectories.sample AND judgement > 0 "
    f"AND {_ENDS}"
)


class LedgerReads:
    """The reading half of the ledger: all queries, given a connection and the run folder."""

    def __init__(self, folder: Path, db: sqlite3.Connection) -> None:
        db.row_factory = sqlite3.Row
        # bounded: held for one statement, which SQLite's time-out bounds
        self.folder, self._db, self._lock = folder, db, threading.RLock()
        self._trajectories = folder / "trajectories"

    def counts(self) -> Counts:
        row = self._one("SELECT * FROM conservation")
        reasons = self._rows(
            "SELECT reason, count(*) AS n FROM groups WHERE fate = 'dropped' GROUP BY reason ORDER BY n DESC, reason"
        )
        dropped = {r["reason"]: r["n"] for r in reasons}
        return Counts(row["admitted"], row["trained"], dropped, row["pending"], row["lost"], row["trained_twice"])

    def pending(self) -> list[PendingGroup]:
        """Groups without a fate, by admission id."""
        rows = self._rows(
            f"SELECT groups.id, groups.finished_at, {_TASK} FROM groups JOIN tasks ON tasks.key = task_key "
            "WHERE fate IS NULL ORDER BY groups.id"
        )
        return [PendingGroup(r["id"], _task(r), r["finished_at"] is not None) for r in rows]

    def next_group_id(self) -> int:
        return self._one("SELECT coalesce(max(id) + 1, 0) FROM groups")[0]

    def last_step(self) -> int | None:
        """The latest step that was begun and not undone; None before the first."""
        return self._one("SELECT max(step) FROM live_steps")[0]

    def next_step(self) -> int:
        """The first step that was never begun."""
        last = self.last_step()
        return 0 if last is None else last + 1

    def ended_steps(self) -> int:
        """The number of runs of steps that ended; a repeated step counts once per run."""
        return self._one("SELECT coalesce(sum(runs), 0) FROM steps WHERE ended_at IS NOT NULL")[0]

    def waiting_at(self, step: int, next_id: int) -> list[int]:
        """Groups below `next_id` that were neither dropped nor trained before `step`, in order."""
        sql = "SELECT id FROM groups WHERE id < ? AND fate IS NOT 'dropped' AND (step IS NULL OR step >= ?) ORDER BY id"
        return [r[0] for r in self._rows(sql, next_id, step)]

    def recorded(self) -> list[int]:
        """Ids of the groups with recorded trajectories, in order."""
        return [row[0] for row in self._rows("SELECT DISTINCT group_id FROM trajectories ORDER BY group_id")]

    def task_of(self, group_id: int) -> Task:
        row = self._one(f"SELECT {_TASK} FROM groups JOIN tasks ON tasks.key = task_key WHERE groups.id = ?", group_id)
        if row is None:
            raise LedgerError(f"group {group_id} was never admitted")
        return _task(row)

    def history(self, since: int = 0) -> Iterator[tuple[int, str, str, list[float] | None]]:
        """Iterate over (id, environment, task id, rewards) of the admitted groups from `since` on, by id.

        The rewards are those of all attempts but greedy ones, NaN without a score; None for an unfinished group."""
        for first in range(since, self.next_group_id(), _PAGE):  # read at once, a long run's rows would fill the memory
            rows = self._rows(
                "SELECT groups.id, env, tasks.id AS task_id, finished_at, trajectories.sample, reward FROM groups "
                "JOIN tasks ON tasks.key = task_key LEFT JOIN trajectories ON trajectories.group_id = groups.id "
                f"AND trajectories.sample <> ? {_JUDGED} WHERE groups.id >= ? AND groups.id < ? ORDER BY groups.id, place",
                *(GREEDY, first, first + _PAGE),
            )
            for group_id, those in groupby(rows, key=itemgetter(0)):
                (_, env, task_id, finished, *_), *_ = rewarded = list(those)
                rewards = {row["sample"]: math.nan if row["reward"] is None else row["reward"] for row in rewarded}
                yield group_id, env, task_id, None if finished is None else list(rewards.values())

    def is_task_of(self, group_id: int, task: Task) -> bool:
        """True when the group was admitted with exactly this task."""
        sql = "SELECT digest FROM groups JOIN tasks ON tasks.key = task_key WHERE groups.id = ?"
        row = self._one(sql, group_id)
        return row is not None and row["digest"] == task_row(task)[-1]

    def has_finished(self, group_id: int) -> bool:
        return self._one("SELECT 1 FROM groups WHERE id = ? AND finished_at IS NOT NULL", group_id) is not None

    def has_payload(self, group_id: int) -> bool:
        """True when the group has finished and retention has not removed its trajectories."""
        sql = "SELECT count(*), count(gone_at) FROM trajectories WHERE group_id = ?"
        recorded, gone = self._one(sql, group_id)
        return recorded > 0 and gone == 0

    def fate(self, group_id: int) -> str | None:
        """The fate of a group: "trained", "dropped: REASON", or None while it is pending."""
        row = self._one("SELECT fate, reason FROM groups WHERE id = ?", group_id)
        if row is None or row["fate"] is None:
            return None
        return row["fate"] if row["reason"] is None else f"dropped: {row['reason']}"

    def metrics_of(self, step: int) -> Metrics:
        """Metrics of a step's live incarnation, the one in the weights; empty before its end."""
        row = self._one("SELECT metrics FROM live_steps JOIN steps USING (step, incarnation) WHERE step = ?", step)
        return Metrics() if row is None or row["metrics"] is None else _parsed(row["metrics"])

    def incarnation(self) -> int:
        """The latest incarnation, or the one after it if steps of it were undone; 0 before the first step."""
        latest = self._one("SELECT coalesce(max(incarnation), 0) FROM steps")[0]
        undone = self._one("SELECT 1 FROM undone_steps WHERE incarnation = ?", latest) is not None
        return latest + undone

    def steps(self, *, since: int = 0, live: bool = True) -> list[StepRecord]:
        """Steps from `since` on, in order. live: of each step only the incarnation in the weights."""
        source = "live_steps JOIN steps USING (step, incarnation)" if live else "steps"
        rows = self._rows(f"SELECT steps.* FROM {source} WHERE step >= ? ORDER BY step, incarnation", since)
        return [
            StepRecord(r["step"], r["incarnation"], r["begun_at"], r["ended_at"], r["runs"], _parsed(r["metrics"] or "{}"))
            for r in rows
        ]

    def undone_steps(self) -> list[tuple[int, int]]:
        """(step, incarnation) of the undone steps, which are in no weights; see `SqliteLedger.undo_steps`."""
        return [(r[0], r[1]) for r in self._rows("SELECT step, incarnation FROM undone_steps ORDER BY step, incarnation")]

    def groups_of(self, step: int, incarnation: int | None = None) -> list[int]:
        """Ids of the groups of a step, in their order. Without an incarnation: of the live one."""
        return self._composition("step_groups", step, incarnation)

    def trained_again(self, step: int, incarnation: int | None = None) -> list[int]:
        """Ids of the earlier steps' groups that a step trained again. Without an incarnation: of the live one."""
        return self._composition("step_replays", step, incarnation)

    def experience(self, first: int, end: int) -> list[tuple[int, list[float], int]]:
        """(id, rewards, uses) of the groups of the live steps [first, end) whose payloads are there.

        rewards: of scored attempts but greedy ones. uses: how often live steps before `end` trained the group again.
        """
        uses = "SELECT group_id, count(*) AS n FROM live_step_replays WHERE step < ? GROUP BY group_id"
        rows = self._rows(
            "SELECT live.group_id, trajectories.sample, reward, coalesce(n, 0) AS n FROM live_step_groups AS live "
            f"JOIN trajectories USING (group_id) {_JUDGED} LEFT JOIN ({uses}) AS used ON used.group_id = live.group_id "
            "WHERE step >= ? AND step < ? AND gone_at IS NULL AND trajectories.sample <> ? AND reward IS NOT NULL "
            "ORDER BY live.group_id, trajectories.place",
            *(end, first, end, GREEDY),
        )
        return [
            (group_id, list({row["sample"]: row["reward"] for row in those}.values()), n)
            for (group_id, n), those in groupby(rows, key=lambda row: (row["group_id"], row["n"]))
        ]

    def _composition(self, table: str, step: int, incarnation: int | None) -> list[int]:
        """Ids of the groups that `table` lists for a step, in order. Without an incarnation: of the live one."""
        source, of, args = f"live_{table}", "", [step]
        if incarnation is not None:
            source, of, args = table, "AND incarnation = ?", [step, incarnation]
        return [r[0] for r in self._rows(f"SELECT group_id FROM {source} WHERE step = ? {of} ORDER BY place", *args)]

    def load(self, group_id: int) -> Group:
        """A finished group with its trajectories. Raises LedgerError if unfinished, PayloadLost if damaged."""
        row = self._one(
            f"SELECT finished_at, {_TASK} FROM groups JOIN tasks ON tasks.key = task_key WHERE groups.id = ?", group_id
        )
        if row is None or row["finished_at"] is None:
            raise LedgerError(
                f"group {group_id} " + ("was never admitted" if row is None else "has not finished: nothing to load")
            )
        index = self._rows("SELECT * FROM trajectories WHERE group_id = ? ORDER BY place", group_id)
        if not index:
            raise PayloadLost(f"group {group_id} is recorded as finished, yet none of its trajectories is")
        return Group(group_id, _task(row), [self._payload(r) for r in index])

    def unreadable(self, group_ids: Iterable[int]) -> dict[int, str]:
        """The reason for each of these finished groups that cannot be read completely, by id."""
        found = dict[int, str]()
        for group_id in group_ids:
            try:
                self.load(group_id)
            except PayloadLost as error:
                found[group_id] = str(error)
        return found

    def load_trajectory(self, group_id: int, place: int) -> Trajectory:
        row = self._one("SELECT * FROM trajectories WHERE group_id = ? AND place = ?", group_id, place)
        if row is None:
            raise LedgerError(f"group {group_id} has no trajectory {place}")
        return self._payload(row)

    def earned(self) -> Earned:
        """Summary of all attempts' outcomes, greedy ones left out, whatever the fates of their groups."""
        sums = self._one(
            "SELECT count(*), count(reward), max(reward), min(reward), total(reward >= ?), "
            "total(finish IN ('length', 'context')), total(finish = 'context'), "
            "max(CASE WHEN finish = 'length' AND trajectories.turns = 1 THEN sampled END), "
            "total(outcome IS 'infra_error'), total(outcome IS 'unscorable') FROM "
            f"(SELECT *, max(place) FROM trajectories GROUP BY group_id, sample) AS trajectories {_JUDGED} "
            "WHERE trajectories.sample <> ?",
            *(SOLVED, GREEDY),
        )
        common = self._one(
            "SELECT reason FROM outcomes WHERE judgement = 0 AND reward IS NULL AND reason IS NOT NULL "
            "GROUP BY reason ORDER BY count(*) DESC LIMIT 1"
        )
        differing = (
            "SELECT 1 FROM outcomes WHERE judgement = 0 AND sample <> ? GROUP BY group_id HAVING max(reward) > min(reward)"
        )
        varied = self._one(f"SELECT count(*) FROM ({differing})", GREEDY)[0]
        count, scored, best, worst, solved, cut, full, longest, errors, unscorable = sums
        ended = (int(cut), int(full), longest, int(errors), int(unscorable))
        return Earned(count, scored, best, worst, int(solved), varied, *ended, reason=common[0] if common else None)

    def largest_gradient(self) -> float | None:
        """The largest gradient norm of all live steps; None when none is recorded."""
        sql = "SELECT max(json_extract(metrics, '$.grad_norm')) FROM live_steps JOIN steps USING (step, incarnation)"
        return self._one(sql)[0]

    def samples(self, step: int | None = None, order: Order = "worst", limit: int = 10) -> list[SampleRow]:
        """Rows of the groups trained at `step`, or of all. "worst" and "best" rank only those with a score."""
        if order not in _ORDERS:
            raise ValueError(f"order={order!r}: expected one of {', '.join(_ORDERS)}")
        wheres = [*(["groups.step = ?"] if step is not None else []), *(["reward IS NOT NULL"] if order != "recent" else [])]
        rows = self._rows(
            f"SELECT trajectories.*, outcome, reward, outcomes.reason AS outcome_reason, judge, ({_LATER}) AS later, "
            f"{_ENDS} AS ends, fate, groups.reason, groups.step, {_TASK} FROM trajectories {_JUDGED} "
            "JOIN groups ON groups.id = trajectories.group_id JOIN tasks ON tasks.key = task_key "
            f"WHERE {' AND '.join(wheres) or 1} ORDER BY {_ORDERS[order]} LIMIT ?",
            *([step] if step is not None else []),
            limit,
        )
        return [_sample(r) for r in rows]

    def versions(self) -> list[Version]:
        """All published versions, in order of publication."""
        rows = self._rows("SELECT * FROM versions ORDER BY published_at, step, incarnation")
        return [Version(r["step"], r["incarnation"], r["policy"], r["fingerprint"]) for r in rows]

    def evaluations(self) -> list[EvalRecord]:
        """Evaluations by step: the latest for each step, and none of weights that were undone."""
        undone = "SELECT 1 FROM undone_steps WHERE undone_steps.step < evals.step AND undone_at > at"
        latest = f"SELECT max(id) FROM evals WHERE NOT EXISTS ({undone}) GROUP BY step"
        rows = self._rows(f"SELECT * FROM evals WHERE id IN ({latest}) ORDER BY step")
        return [EvalRecord(r["step"], r["at"], r["n"], r["accuracy"], _parsed(r["metrics"])) for r in rows]

    def events(self, kind: str | None = None) -> list[Event]:
        rows = self._rows("SELECT * FROM events WHERE ?1 IS NULL OR kind = ?1 ORDER BY id", kind)
        return [Event(r["id"], r["at"], r["kind"], _parsed(r["detail"])) for r in rows]

    def meta(self) -> dict[str, str]:
        return {r["key"]: r["value"] for r in self._rows("SELECT key, value FROM meta ORDER BY key")}

    def verify(self) -> list[Damage]:
        """Read and check every payload that the index lists; returns the damaged ones."""
        damages = []
        for row in self._rows("SELECT * FROM trajectories WHERE gone_at IS NULL ORDER BY segment, offset"):
            try:
                self._payload(row)
            except PayloadLost as error:
                damages.append(Damage(row["group_id"], row["place"], str(error)))
        return damages

    def _payload(self, row: sqlite3.Row) -> Trajectory:
        group_id, place = row["group_id"], row["place"]
        if row["gone_at"] is not None:
            raise PayloadLost(f"trajectory {place} of group {group_id} was removed by retention; its row remains")
        location = Location(row["segment"], row["offset"], row["length"], row["crc"])
        with explained(self.folder):
            raw = read_record(self._trajectories, group_id, place, location)
        try:
            return serialization.decode(raw, Trajectory)
        except CodecError as error:
            raise PayloadLost(f"trajectory {place} of group {group_id} does not decode: {error}") from None

    def _rows(self, sql: str, *args: Any) -> list[sqlite3.Row]:
        with self._lock, explained(self.folder):
            return self._db.execute(sql, args).fetchall()

    def _one(self, sql: str, *args: Any) -> Any:
        return next(iter(self._rows(sql, *args)), None)


def _parsed(text: str) -> Any:
    try:
        return serialization.parse_json(text)
    except (CodecError, TypeError) as error:
        raise LedgerError(f"the ledger holds something that it did not write: {error}") from None


def _task(row: sqlite3.Row) -> Task:
    return Task(row["task_id"], _parsed(row["prompt"]), _parsed(row["data"]), row["env"])


def _sample(row: sqlite3.Row) -> SampleRow:
    computed = {"task": _task(row), "gone": row["gone_at"] is not None, "ends": bool(row["ends"])}
    computed["later"] = [Judgement(*each) for each in json.loads(row["later"])]
    return SampleRow(**computed, **{each.name: row[each.name] for each in fields(SampleRow) if each.name not in computed})
