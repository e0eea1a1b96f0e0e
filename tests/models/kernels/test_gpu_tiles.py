"""Packed sequences cut into tiles: every token once, and every key by all who see it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sequences import families

from tidemill.models.kernels.cpu.packed_sequences import Families
from tidemill.models.kernels.cuda.tiles import Tiles


@pytest.mark.slow
@settings(max_examples=100)
@given(families(tile=64), st.integers(1, 70), st.integers(1, 70))
def test_every_pair_of_a_query_and_a_key_it_sees_is_looked_at_once(of: Families, queries: int, keys: int) -> None:
    tiles = Tiles.of(of, queries, keys, torch.device("cpu"))
    places, shared = tiles.places.numpy(), tiles.shared.numpy()
    lengths, begins = tiles.lengths.numpy(), tiles.begins.numpy()
    expected = np.zeros((of.tokens, of.tokens), np.int64)
    for sequence in range(len(lengths)):
        own = of.of_sequence(sequence)
        for position in range(shared[sequence], lengths[sequence]):
            expected[own[position], own[: position + 1]] += 1
    of_queries, of_keys = np.zeros_like(expected), np.zeros_like(expected)
    for begin, position, packed, count in tiles.queries.tolist():
        assert 0 < count <= queries
        for token in range(count):  # as `see` goes through them
            of_queries[packed + token, places[begin : begin + position + token + 1]] += 1
    for sequence, position, packed, count, until in tiles.keys.tolist():
        assert 0 < count <= keys
        known = position + count
        for reader in range(sequence, until):  # as `see_back_keys` does
            known = min(known, shared[reader]) if reader > sequence else known
            assert known > position, "nobody sees it"
            for token in range(max(shared[reader], position), lengths[reader]):
                seen = np.arange(position, min(known, token + 1)) - position
                of_keys[begins[reader] + token - shared[reader], packed + seen] += 1
    assert (of_queries == expected).all() and (of_keys == expected).all()


def test_what_takes_longest_comes_first() -> None:
    tiles = Tiles.of(Families.of([64, 200, 300], [0, 64, 64]), 64, 64, torch.device("cpu"))
    assert tiles.queries[0].tolist()[1:] == [256, 64 + 136 + 192, 44]
    assert tiles.keys[0].tolist() == [0, 0, 0, 64, 3]
