"""The content fingerprint of weights: what a version is identified by (I1).

Every element's bits are mixed with the element's index in the whole tensor, and the results are added modulo 2^64. A sum
does not care how the tensor was cut, nor in which order or on which device the slices are added. The mixer is not linear
(multiply, xor-shift, multiply, xor-shift: the SplitMix64 finaliser, one round), and for a given index it is one-to-one in
the bits: one changed element always changes the sum; swapped, moved or transposed elements change it up to a chance of
about 2^-64. It tells accidents apart, it is no defence against someone who forges weights.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Iterator
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from tidemill.models.slices import Coverage, Slice


def _signed(number: int) -> int:
    """`number` modulo 2^64 as torch's int64 holds it."""
    return (number + 2**63) % 2**64 - 2**63


_BITS_FACTOR = _signed(0x9E3779B97F4A7C15)
_INDEX_FACTOR = _signed(0xBF58476D1CE4E5B9)
_MIX_FACTOR = _signed(0x94D049BB133111EB)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = {"cpu": 1 << 16}  # elements at a time: temporaries of 0.5 MiB, of which an L2 cache holds two
_CHUNK_ELSEWHERE = 1 << 22


class Fingerprint:
    """Adds slices up, in any order. Every element of every tensor must come exactly once."""

    def __init__(self) -> None:
        self._coverage = Coverage()
        self._sums: dict[str, list[Tensor]] = {}

    def add(self, piece: Slice) -> None:
        """Raises ValueError when the slice contradicts or repeats an earlier one. Does not wait for a GPU."""
        self._coverage.add(piece)
        self._sums.setdefault(piece.name, []).append(_block_sum(piece))

    def sums(self) -> dict[str, int]:
        """The sum of each tensor, 0 <= sum < 2^64, by name. Raises ValueError when a tensor is incomplete."""
        self._coverage.complete()
        return {name: sum(int(part) for part in parts) % 2**64 for name, parts in sorted(self._sums.items())}

    def hexdigest(self) -> str:
        """32 hex digits over names, dtypes, shapes and sums. Raises ValueError when a tensor is incomplete."""
        digest = blake2b(digest_size=16)
        for name, total in self.sums().items():
            tensor = self._coverage.tensors[name]
            digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape), total]).encode())
        return digest.hexdigest()


def fingerprint(slices: Iterable[Slice]) -> str:
    """32 hex digits that identify these tensors: names, dtypes, shapes and every bit. Raises ValueError as `Fingerprint`."""
    total = Fingerprint()
    for piece in slices:
        total.add(piece)
    return total.hexdigest()


def tensor_sums(slices: Iterable[Slice]) -> dict[str, int]:
    """The fingerprint of each tensor by name, to tell which of them differ."""
    total = Fingerprint()
    for piece in slices:
        total.add(piece)
    return total.sums()


def word_sum(tensor: Tensor) -> int:
    """The sum of a tensor's bytes, taken as little-endian 64-bit words, modulo 2**64; the last may be short.

    It runs at memory speed, where the tensor lies, and does not notice words that change places.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    if raw.device.type == "cpu":
        words = int(raw[:whole].numpy().view("<u8").sum(dtype=np.uint64))
    else:
        aligned = raw if raw.storage_offset() % 8 == 0 else raw.clone()
        words = int(aligned[:whole].view(torch.int64).sum())
    return (words + int.from_bytes(raw[whole:].cpu().numpy().tobytes(), "little")) % (1 << 64)


def _block_sum(piece: Slice) -> Tensor:
    """Scalar int64, on the block's device."""
    bits = piece.tensor.detach().view(_INTEGERS[piece.tensor.element_size()])
    strides = [math.prod(piece.shape[dim + 1 :]) for dim in range(bits.ndim)]
    if bits.device.type == "cpu" and tuple(bits.shape[1:]) == piece.shape[1:]:
        first = piece.offset[0] * strides[0] if strides else 0
        return torch.tensor(_signed(_run_sum(bits.contiguous().reshape(-1).numpy(), first)))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for block, offset in _small_blocks(bits, piece.offset, _CHUNK.get(bits.device.type, _CHUNK_ELSEWHERE)):
        total += _mix(_weighted_indices(block, offset, strides).add(block.to(torch.int64), alpha=_BITS_FACTOR)).sum()
    return total


class _Scratch(threading.local):
    """Memory that is used again: fresh memory would cost as much as the arithmetic."""

    def __init__(self) -> None:
        self.arrays: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def of(self, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[size] uint64 each: weighted indices, and two to compute in."""
        if size not in self.arrays:
            indices = np.arange(size, dtype=np.uint64) * np.uint64(_INDEX_FACTOR % 2**64)
            self.arrays = {size: (indices, np.empty_like(indices), np.empty_like(indices))}
        return self.arrays[size]


_scratch = _Scratch()


def _run_sum(bits: np.ndarray, first: int) -> int:
    """Of elements [n] whose indices are `first`, `first` + 1, ...: the same sum in NumPy, twice as fast as torch here."""
    size, total = _CHUNK["cpu"], 0
    indices, x, shifted = _scratch.of(size)
    for at in range(0, len(bits), size):
        part = bits[at : at + size]
        y, z = x[: len(part)], shifted[: len(part)]
        y.view(np.int64)[:] = part
        y *= np.uint64(_BITS_FACTOR % 2**64)
        y += indices[: len(part)]
        y += np.uint64((first + at) * _INDEX_FACTOR % 2**64)
        np.right_shift(y, np.uint64(32), out=z)
        y ^= z
        y *= np.uint64(_MIX_FACTOR % 2**64)
        np.right_shift(y, np.uint64(29), out=z)
        y ^= z
        total += int(y.sum())
    return total % 2**64


def _small_blocks(bits: Tensor, offset: tuple[int, ...], limit: int) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """`bits` cut into blocks of at most `limit` elements, each with its offset in the whole tensor."""
    if bits.numel() <= limit:
        yield bits, offset
        return
    dim = next(dim for dim, size in enumerate(bits.shape) if size > 1)
    at = offset[dim]
    for part in bits.split(max(1, limit * bits.shape[dim] // bits.numel()), dim):
        yield from _small_blocks(part, (*offset[:dim], at, *offset[dim + 1 :]), limit)
        at += part.shape[dim]


def _weighted_indices(block: Tensor, offset: tuple[int, ...], strides: list[int]) -> Tensor:
    """int64, of the block's shape or broadcastable to it: flat index in the whole tensor * _INDEX_FACTOR, modulo 2^64."""
    total = torch.zeros((), dtype=torch.int64, device=block.device)
    for size, begin, stride in zip(block.shape, offset, strides, strict=True):
        along = torch.arange(begin, begin + size, device=block.device).mul_(_signed(stride * _INDEX_FACTOR))
        total = total.unsqueeze(-1) + along
    return total


def _mix(x: Tensor) -> Tensor:
    """In place. `>>` repeats the sign, so the bits it brings in are masked off: only then is the mixer one-to-one."""
    x ^= (x >> 32).bitwise_and_(2**32 - 1)
    x *= _MIX_FACTOR
    x ^= (x >> 29).bitwise_and_(2**35 - 1)
    return x
