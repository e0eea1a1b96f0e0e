"""Groups whose content follows from their id alone, so that any process can say what should have been recorded."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np

from tidemill.core.types import Finish, Group, InfraError, Score, Support, Task, Trajectory, Unscorable, Version

OUTCOMES = (Score(1.0), Score(0.25, {"format": 1.0}), Unscorable("no gold answer"), InfraError("verifier died"), None)


def task(group_id: int) -> Task:
    return Task(f"word-{group_id % 5}", f"spell {group_id % 5}", {"answer": "é" * (group_id % 5)}, "spell")


def trajectory(group_id: int, sample: int, length: int = 12) -> Trajectory:
    rng = np.random.default_rng([group_id, sample])
    mask = np.arange(length) >= 4
    steps = np.where(mask, group_id // 4 + (np.arange(length) >= 8), -1).astype(np.int32)
    sources = tuple(Version(int(s), 0, "policy", f"f{s}") for s in np.unique(steps[mask]))
    return Trajectory(
        tokens=rng.integers(0, 99, length).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
        versions=steps,
        finish=Finish.STOP,
        outcome=OUTCOMES[(group_id + sample) % len(OUTCOMES)],
        sources=sources,
        sample=sample,
        temperature=0.7,
        text=f"reply {sample} to {group_id} ✓",
        support=support_of(int(mask.sum())) if sample else None,
        parent=(0, 4) if sample else None,
        info={"queued_s": 0.5},
    )


def support_of(positions: int) -> Support:
    """The first set of two ids, the others of all ids but one, which they share."""
    sets = (np.arange(positions) > 0).astype(np.int32)
    return Support(np.arange(3, dtype=np.int32), np.array([0, 2, 3], np.int32), sets, np.array([False, True]))


def group(group_id: int, samples: int = 2, length: int = 12) -> Group:
    return Group(group_id, task(group_id), [trajectory(group_id, i, length) for i in range(samples)])


def assert_same(a: Group, b: Group) -> None:
    assert (a.id, a.task, len(a.trajectories)) == (b.id, b.task, len(b.trajectories))
    for x, y in zip(a.trajectories, b.trajectories, strict=True):
        for name in ("tokens", "mask", "logprobs", "versions"):
            left, right = getattr(x, name), getattr(y, name)
            assert left.dtype == right.dtype and np.array_equal(left, right), name
        for name in ("finish", "outcome", "sources", "sample", "seat", "turns", "temperature", "text", "parent", "info"):
            assert getattr(x, name) == getattr(y, name), name
        assert (x.support is None) == (y.support is None)
        if x.support is not None and y.support is not None:
            for name in ("ids", "offsets", "sets", "lacks"):
                assert np.array_equal(getattr(x.support, name), getattr(y.support, name)), name


OLDER = sorted((Path(__file__).parent / "schemas").glob("*.sql"))


def older_ledger(folder: Path, schema: Path) -> Path:
    """An empty ledger of an older schema, whose text is that of the version that made it."""
    (folder / "trajectories").mkdir(parents=True)
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        db.executescript(f"{schema.read_text()}INSERT INTO meta VALUES ('schema', '{schema.stem.replace('_', ' ')}');")
    db.close()
    return folder
