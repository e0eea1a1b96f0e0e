"""Packed sequences with common beginnings, and the arguments of `sequences.c` for them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MOST_NUMBERS = 128  # largest size of a head, as in `sequences.c`


@dataclass(frozen=True, slots=True)
class Families:
    """B sequences in F families; each shares tokens, packed once, with the one before."""

    families: np.ndarray  # [F + 1] int64: their first sequences, and B
    sequences: np.ndarray  # [B + 1] int64: where each begins among the places
    places: np.ndarray  # [sum of lengths] int64: the packed token at each position
    shared: np.ndarray  # [B] int64: positions that are those of the sequence before
    tokens: int  # N, packed

    @classmethod
    def of(cls, lengths: Sequence[int], shared: Sequence[int] | None = None) -> Families:
        """B sequences of these lengths; they begin with `shared` tokens of the one before."""
        common = [0] * len(lengths) if shared is None else list(shared)
        places: list[np.ndarray] = []
        count = 0
        for length, known in zip(lengths, common, strict=True):
            own = np.arange(count, count + length - known)
            places.append(np.concatenate((places[-1][:known], own)) if known else own)
            count += len(own)
        begins = np.cumsum([0, *lengths])
        first = np.flatnonzero(np.array(common) == 0)
        return cls(np.append(first, len(common)), begins, np.concatenate(places), np.array(common, np.int64), count)

    @classmethod
    def apart(cls, runs: Sequence[tuple[int, int]], tokens: int) -> Families:
        """B runs (first, count) of `tokens` packed tokens; nothing outside is defined."""
        counts = [count for _, count in runs]
        places = np.concatenate([np.arange(first, first + count) for first, count in runs])
        return cls(np.arange(len(runs) + 1), np.cumsum([0, *counts]), places, np.zeros(len(runs), np.int64), tokens)

    def of_sequence(self, index: int) -> np.ndarray:
        """[length] int64: the packed tokens of one sequence."""
        return self.places[self.sequences[index] : self.sequences[index + 1]]


class _Operand(ctypes.Structure):
    _fields_ = [
        ("numbers", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        *((n, ctypes.c_int32) for n in ("narrow", "unused")),
    ]


class _Layout(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("families", "sequences", "places", "shared")),
        *((name, ctypes.c_int32) for name in ("count", "longest", "heads", "kv_heads", "size", "window")),
    ]


class _Tensors(ctypes.Structure):
    _fields_ = [
        *((name, _Operand) for name in ("q", "k", "v", "out", "d_out", "d_q", "d_k", "d_v")),
        ("totals", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("back", ctypes.c_int32),
    ]


def layout(families: Families, q: Tensor, k: Tensor, window: int | None) -> ctypes.Structure:
    """The C structure for q [N, H, E] and k [N, K, E]; `families` and both tensors must outlive it."""
    arrays = (families.families, families.sequences, families.places, families.shared)
    assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in arrays)
    assert len(q) == len(k) == families.tokens and q.shape[1] % k.shape[1] == 0
    longest = int(np.diff(families.sequences).max())
    sizes = (len(families.families) - 1, longest, q.shape[1], k.shape[1], q.shape[2], window or 0)
    return _Layout(*(array.ctypes.data for array in arrays), *sizes)


def tensors(totals: Tensor, size: int, operands: dict[str, Tensor]) -> ctypes.Structure:
    """The C structure of totals [N, H] float32 and operands; with d_out for gradients."""
    assert all(x.stride()[1:] == (size, 1) for x in operands.values())
    given = {name: _Operand(x.data_ptr(), x.stride(0), x.dtype == torch.bfloat16) for name, x in operands.items()}
    return _Tensors(**given, totals=totals.data_ptr(), scale=size**-0.5, back="d_out" in operands)
