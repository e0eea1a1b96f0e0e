"""Attempts of several rows: which rows are one attempt, where its outcome is, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from tidemill.core.attempt_checks import check_attempts
from tidemill.core.types import Finish, Group, InfraError, Score, Task, Trajectory, Version

TOKENS = np.arange(12, dtype=np.int32)


def row(begin=3, stop=6, sample=0, outcome=None, parent=None, tokens=TOKENS, finish=Finish.STOP, **more):
    """A row whose tokens from `begin` to `stop` were sampled."""
    mask = (np.arange(stop) >= begin) & (np.arange(stop) < stop)
    zeros, versions = np.zeros(stop, np.float32), np.where(mask, 2, -1).astype(np.int32)
    return Trajectory(
        *(tokens[:stop], mask, zeros, versions, finish, outcome, (Version(2),)), sample=sample, parent=parent, **more
    )


def group(*rows):
    return Group(5, Task("t", "p"), list(rows))


BRANCHED = (row(3, 6), row(8, 10, outcome=Score(1.0), parent=(0, 6)))


def test_an_attempt_is_the_rows_of_one_sample_and_ends_with_the_last():
    first, second, third = row(sample=0), row(sample=4, outcome=Score(0.5)), row(sample=0, outcome=InfraError("x"))
    both = group(first, second, third)
    assert [[id(t) for t in rows] for rows in both.attempts] == [[id(first), id(third)], [id(second)]]
    assert [id(t) for t in both.ends] == [id(third), id(second)]
    np.testing.assert_array_equal(both.rewards, [np.nan, 0.5])
    assert both.oldest == 2


@pytest.mark.parametrize(
    "rows",
    [
        BRANCHED,
        (row(outcome=Score(1.0)), row(sample=1, outcome=Score(0.0))),
        (row(), row(seat=1, tokens=TOKENS + 1)),  # a seat of its own, and nothing is judged yet
        (row(3, 6), row(8, 10, parent=(0, 6)), row(7, 9, parent=(0, 6), outcome=Score(0.0))),  # two branches of one row
    ],
)
def test_what_is_one_attempt_is_accepted(rows):
    check_attempts(group(*rows))


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (
            (row(outcome=Score(1.0)), row(outcome=Score(0.0))),
            "attempt 0 of group 5 has an outcome on another row than its last",
        ),
        ((row(outcome=Score(1.0)), row()), "put the attempt's one outcome on its last row"),
        ((row(), row(8, 10, parent=(1, 6))), "names row 1 as its parent: expected an earlier row"),
        ((row(parent=(0, 3)),), "names row 0 as its parent: expected an earlier row"),
        ((row(), row(8, 10, parent=(0, 7))), "does not begin with the first 7 tokens of its parent, row 0"),
        ((row(), row(8, 10, parent=(0, 6), tokens=TOKENS + 1)), "does not begin with the first 6 tokens"),
        ((row(), row(5, 10, parent=(0, 6))), "marks tokens before its fork at 6 as its own"),
        ((row(), replace(row(8, 10, parent=(0, 6)), sources=())), "versions do not match its sources"),
    ],
)
def test_what_would_count_twice_or_disagree_is_refused(rows, reason):
    with pytest.raises(ValueError, match=reason):
        check_attempts(group(*rows))
