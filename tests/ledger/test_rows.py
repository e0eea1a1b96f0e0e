"""Every figure of the ledger belongs to its own trajectory, wherever one without a sampled token, or without any, stands."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_cases import assert_same, task

from tidemill.core.types import Finish, Group, InfraError, Score, Trajectory, Version
from tidemill.ledger import SqliteLedger, row_formats
from tidemill.ledger.row_formats import trajectory_rows

LENGTHS = st.tuples(st.integers(0, 5), st.integers(0, 4))  # of the prompt, and of what was sampled after it
GROUPS = st.lists(st.lists(LENGTHS, min_size=1, max_size=5), min_size=1, max_size=3)


def attempt(number: int, prompt: int, sampled: int) -> Trajectory:
    """A trajectory whose every figure tells its number."""
    mask = np.arange(prompt + sampled) >= prompt
    step = 10 * number + np.arange(prompt + sampled) % 3
    versions = np.where(mask, step, -1).astype(np.int32)
    return Trajectory(
        tokens=np.full(prompt + sampled, number, np.int32),
        mask=mask,
        logprobs=np.where(mask, -number - np.arange(prompt + sampled) / 8, 0).astype(np.float32),
        versions=versions,
        finish=Finish.STOP if sampled else Finish.ENV_ERROR,
        outcome=Score(number) if sampled else InfraError(f"the sandbox {number} did not start"),
        sources=tuple(Version(int(v)) for v in np.unique(versions[mask])),
        sample=number,
        turns=int(sampled > 0),
        text=f"reply {number}" if sampled else "",
    )


@settings(max_examples=60)
@given(GROUPS, st.sampled_from([1, 12, 1 << 14]))
def test_every_figure_is_of_its_own_trajectory(shapes: list[list[tuple[int, int]]], piece: int) -> None:
    """They are summarised in pieces, and inserted several at once."""
    groups, number = [], 0
    for group_id, lengths in enumerate(shapes):
        attempts = [attempt(number + i, *each) for i, each in enumerate(lengths)]
        groups.append(Group(group_id, task(group_id), attempts))
        number += len(lengths)
    with (
        patch.object(row_formats, "_PIECE", piece),
        tempfile.TemporaryDirectory() as folder,
        SqliteLedger(folder, durability="process") as ledger,
    ):
        for group in groups:
            ledger.admit(group.id, group.task)
            ledger.finish(group)  # the rows of all of them are made at once, by the read
        rows = {(r.group_id, r.place): r for r in ledger.samples(order="recent", limit=99)}
        for group in groups:
            assert_same(ledger.load(group.id), group)
            for place, t in enumerate(group.trajectories):
                row, steps = rows.pop((group.id, place)), [int(v) for v in t.versions if v >= 0]
                assert (row.tokens, row.sampled, row.sample) == (len(t.tokens), len(steps), t.sample)
                assert (row.oldest, row.newest) == ((min(steps), max(steps)) if steps else (None, None))
                assert (row.reward, row.outcome) == ((t.sample, "score") if steps else (None, "infra_error"))
                mean = (
                    math.fsum(float(p) for p, m in zip(t.logprobs, t.mask, strict=True) if m) / len(steps) if steps else None
                )
                assert row.mean_logprob == (mean if mean is None else pytest.approx(mean, rel=1e-9))
        assert not rows and ledger.verify() == [] and ledger.counts().conserved


def test_nothing_at_all_is_no_row() -> None:
    assert trajectory_rows([]) == []


def test_groups_of_nothing_outlive_a_writer_that_died(tmp_path: Path) -> None:
    """Their rows are made again from the payloads, by whoever opens the ledger next."""
    ledger = SqliteLedger(tmp_path)
    made = Group(0, task(0), [attempt(0, 0, 0), attempt(1, 0, 0), attempt(2, 2, 1)])
    ledger.admit(0, made.task)
    ledger.finish(made)
    ledger._waiting.clear()  # as if it had been killed
    ledger.close()
    with SqliteLedger(tmp_path, mode="open") as again:
        assert_same(again.load(0), made)
        assert [(r.tokens, r.sampled, r.oldest) for r in again.samples(order="recent")] == [(0, 0, None)] * 2 + [(3, 1, 22)]
