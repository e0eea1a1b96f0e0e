"""Supports: what each position was sampled from, in few numbers, and joined from turn to turn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.sampling_support import Support, SupportRecord, joined_support
from tidemill.core.serialization import decode, encode

VOCAB = 40
Kept = set[int]
SETS = st.lists(st.sets(st.integers(0, VOCAB - 1), min_size=1), max_size=6)


def mask(kept: Kept) -> np.ndarray:
    return np.isin(np.arange(VOCAB), [*kept])


def kept_at(support: Support) -> list[Kept]:
    return [set(support.at(t, VOCAB).tolist()) for t in range(support.positions)]


@given(SETS, st.data())
def test_masks_and_lists_come_back(sets: list[Kept], data: st.DataObject) -> None:
    """Positions given as masks or as ids, in any order and as often as one likes."""
    record, expected = SupportRecord(), list[Kept]()
    for kept in data.draw(st.lists(st.sampled_from(sets), max_size=12)) if sets else []:
        if data.draw(st.booleans()):
            record.add_mask(mask(kept))
        else:
            record.add(np.array(sorted(kept), np.int32))
        expected.append(kept)
    support = decode(encode(record.support()), Support)
    support.check(len(expected))
    assert kept_at(support) == expected


def test_a_set_takes_the_fewer_ids_and_is_stored_once() -> None:
    record = SupportRecord()
    for missing in (3, 4, 3, 3):
        record.add_mask(np.arange(1000) != missing)
    record.add_mask(np.arange(1000) == 7)
    support = record.support()
    assert support.ids.tolist() == [3, 4, 7] and support.set_of_each.tolist() == [0, 1, 0, 0, 2]
    assert support.lacking.tolist() == [True, True, False]
    assert len(encode(support)) < 300


def test_truncation_alone_is_written_as_it_always_was() -> None:
    record = SupportRecord()
    record.add(np.array([5, 2], np.int32))
    record.add(np.array([5], np.int32))
    support = record.support()
    assert support.sets is None and support.lacks is None
    assert support.ids.tolist() == [5, 2, 5] and support.offsets.tolist() == [0, 2, 3]


def test_a_record_of_before_is_read() -> None:
    older = encode({"ids": np.array([1, 2, 3], np.int32), "offsets": np.array([0, 1, 3], np.int32)})
    support = decode(older, Support)
    assert kept_at(support) == [{1}, {2, 3}]


@given(st.lists(st.tuples(SETS, st.booleans()), max_size=4))
def test_turns_are_joined(turns: list[tuple[list[Kept], bool]]) -> None:
    """Turns that had the whole vocabulary stand between turns that had not."""
    parts, expected = [], list[Kept]()
    for sets, whole in turns:
        record = SupportRecord()
        for i, kept in enumerate(sets):
            record.add(np.array(sorted(kept), np.int32)) if i % 2 else record.add_mask(mask(kept))
        parts.append((None if whole else record.support(), len(sets)))
        expected += [set(range(VOCAB))] * len(sets) if whole else sets
    together = joined_support(parts)
    if all(whole for _, whole in turns):
        assert together is None
    else:
        assert together is not None and kept_at(together) == expected


INTS = {"ids": [1, 2, 3], "offsets": [0, 2, 3]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"offsets": [0, 2, 4]},
        {"offsets": [1, 2, 3]},
        {"offsets": [0, 3, 2, 3]},
        {"offsets": []},
        {"sets": [0, 2]},
        {"sets": [0, -1]},
        {"lacks": [True]},
    ],
)
def test_a_support_that_contradicts_itself_is_refused(wrong: dict[str, list[int]]) -> None:
    fields = {name: np.array(values, bool if name == "lacks" else np.int32) for name, values in (INTS | wrong).items()}
    with pytest.raises(ValueError, match="contradict"):
        Support(**fields).check(2)


def test_a_support_of_another_length_is_refused() -> None:
    support = Support(**{name: np.array(values, np.int32) for name, values in INTS.items()})
    support.check(2)
    with pytest.raises(ValueError, match="2 positions for 3"):
        support.check(3)
