"""Amounts in words."""

from __future__ import annotations

import pytest

from tidemill.core.amounts import amount
from tidemill.core.episode_counts import COUNTED, worded_counts


@pytest.mark.parametrize(
    ("count", "noun", "said"),
    [(1, "call", "1 call"), (0, "call", "0 calls"), (2000, "reply", "2,000 replies"), (1, "reply", "1 reply")],
)
def test_one_is_in_the_singular(count: int, noun: str, said: str) -> None:
    assert amount(count, noun) == said


def test_counts_of_an_episode_are_in_the_singular_where_they_are_one() -> None:
    counts = {"gateway/calls": 1, "gateway/retries": 1, "gateway/refused": 1, "agent/runs": 2, "agent/late": 1}
    assert worded_counts(counts) == [("gateway", "1 call, 1 retry, 1 refused"), ("agent", "2 runs, 1 late")]
    every = {f"{part}/{kind}": 1 for part, kinds in COUNTED.items() for kind in kinds}
    said = [each.removeprefix("1 ") for _, text in worded_counts(every) for each in text.split(", ")]
    assert not [word for word in said if word.endswith("s")]
