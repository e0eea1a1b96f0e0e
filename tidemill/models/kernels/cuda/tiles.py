"""Tiles of packed sequences, for the attention kernels of `triton_backward`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tidemill.models.kernels.cpu.packed_sequences import Families


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of queries and of keys of B sequences; all int32, on one device.

    A sequence's own tokens are those that it does not share with the one before it. They are packed side by side, and
    cut into tiles. The tiles that take longest come first.
    """

    families: Families
    sizes: tuple[int, int]  # the most tokens in a tile of queries, and in a tile of keys
    device: torch.device
    queries: Tensor  # [T, 4]: where its sequence begins among the places, its first position, its first packed token, tokens
    keys: Tensor  # [U, 5]: its sequence, first position, first packed token, tokens, the end of the sequences that see it
    places: Tensor  # the packed token at each position of each sequence
    shared: Tensor  # [B] positions shared with the sequence before
    lengths: Tensor  # [B]
    begins: Tensor  # [B] the first packed token of its own

    @classmethod
    def of(cls, families: Families, queries: int, keys: int, device: torch.device) -> Tiles:
        shared, lengths = families.shared, np.diff(families.sequences)
        own = lengths - shared
        begins = np.cumsum(own) - own
        of, at = cut(own, queries)
        seen = (families.sequences[of], shared[of] + at, begins[of] + at, np.minimum(queries, own[of] - at))
        order = np.argsort(-(seen[1] + seen[3]), kind="stable")
        of, at = cut(own, keys)
        position = shared[of] + at
        readers = _readers(families, of, position)
        queried = np.concatenate(([0], np.cumsum(own)))  # own tokens of all sequences before each one
        work = queried[readers] - queried[of]
        own_keys = (of, position, begins[of] + at, np.minimum(keys, own[of] - at), readers)

        def send(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(device, non_blocking=True)

        return cls(
            families,
            (queries, keys),
            device,
            queries=send(np.stack(seen, 1)[order]),
            keys=send(np.stack(own_keys, 1)[np.argsort(-work, kind="stable")]),
            places=send(families.places),
            shared=send(shared),
            lengths=send(lengths),
            begins=send(begins),
        )


def cut(own: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(sequence, first of its `own` tokens) of each tile of at most `size` tokens."""
    counts = -(-own // size)
    of = np.repeat(np.arange(len(own)), counts)
    return of, (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * size


def _readers(families: Families, of: np.ndarray, position: np.ndarray) -> np.ndarray:
    """For each tile, the first sequence after its own that does not see the tile's first position."""
    found = of + 1
    ends = families.families[np.searchsorted(families.families, np.arange(len(families.shared)), side="right")]
    starts = np.searchsorted(of, np.arange(len(ends) + 1))
    for sequence in np.flatnonzero(ends > np.arange(len(ends)) + 1).tolist():
        tiles = slice(starts[sequence], starts[sequence + 1])
        common = np.minimum.accumulate(families.shared[sequence + 1 : ends[sequence]])  # it falls
        found[tiles] += np.searchsorted(-common, -position[tiles])
    return found
