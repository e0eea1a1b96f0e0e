"""Content fingerprint of weights, by which a version is identified (I1).

Every element's bits, as an unsigned number, are multiplied by a key of 64 random bits, the last of which is 1, that
belongs to the element's index in the whole tensor; the products are added modulo 2^64. A sum does not care how the
tensor was cut, nor in which order or on which device the slices are added. One changed element always changes the sum,
since its key is odd; any other difference (elements swapped, moved, transposed, negated) changes it up to a chance of
2^-32, the guarantee of multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2013). It
tells accidents apart, it is no defence against someone who forges weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from tidemill.models.kernels.library import gpu, native
from tidemill.models.weight_slices import Coverage, Slice

WORD = 4  # bytes: packing moves weights of four bytes, and pairs of two, to other places
_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}  # eight bytes count as two elements of four
_RUN = 1 << 15  # elements in a run of precomputed keys: the keys and a work buffer fit an L2 cache
_BLOCK = 1 << 22  # elements at a time where runs are not used


def _random(number: int) -> int:
    """Output `number` of a SplitMix64 generator that began at 0 (Steele et al., 2014), made odd."""
    x = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return (x ^ (x >> 31)) | 1


_KEYS = np.array([_random(i) for i in range(_RUN)], np.uint64)
_KEY_BITS = torch.from_numpy(_KEYS.view(np.int64))


def _factor(run: int) -> int:
    """The factor of run number `run`: key(i) = _KEYS[i % _RUN] * _factor(i // _RUN)."""
    return _random(2**32 + run)


class Fingerprint:
    """Adds up slices in any order. Every element of every tensor must come exactly once."""

    def __init__(self) -> None:
        self._coverage = Coverage()
        self._sums: dict[str, list[int | Tensor]] = {}

    def add(self, piece: Slice, words: bool = False) -> int | Tensor:
        """Add a slice; with `words`, return the block's `word_bits`, from the same pass over memory.

        Raises ValueError if the slice contradicts or repeats an earlier one. Does not wait for a GPU.
        """
        self._coverage.add(piece)
        total, found = _block_sum(piece, words)
        self._sums.setdefault(piece.name, []).append(total)
        return found

    def sums(self) -> dict[str, int]:
        """Each tensor's sum, 0 <= sum < 2^64, by name. Raises ValueError if a tensor is incomplete."""
        self._coverage.complete()
        return totals(dict(sorted(self._sums.items())))

    def partial(self) -> dict[str, tuple[int, int]]:
        """(sum so far modulo 2^64, number of elements so far) of each tensor, by name."""
        return {name: (total, self._coverage.tensors[name].elements) for name, total in totals(self._sums).items()}

    def hexdigest(self) -> str:
        """32 hex digits over names, dtypes, shapes and sums. Raises ValueError if a tensor is incomplete."""
        tensors = self._coverage.tensors
        return identity(self.sums(), {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})


def identity(sums: dict[str, int], outlines: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> str:
    """The fingerprint, 32 hex digits, of tensors with these sums, shapes and dtypes."""
    digest = blake2b(digest_size=16)
    for name, total in sorted(sums.items()):
        shape, dtype = outlines[name]
        digest.update(json.dumps([name, str(dtype), list(shape), total]).encode())
    return digest.hexdigest()


def fingerprint(slices: Iterable[Slice]) -> str:
    """32 hex digits that identify tensors by names, dtypes, shapes and every bit."""
    total = Fingerprint()
    for piece in slices:
        total.add(piece)
    return total.hexdigest()


def totals(parts: dict[str, list[int | Tensor]]) -> dict[str, int]:
    """The sum of each list, modulo 2^64; what lies on a device is read all at once."""
    there = [part for each in parts.values() for part in each if isinstance(part, Tensor)]
    read = iter(torch.stack([part.to(there[0].device) for part in there]).tolist() if there else ())
    return {
        name: sum(next(read) if isinstance(part, Tensor) else part for part in each) % 2**64 for name, each in parts.items()
    }


def word_sum(tensor: Tensor) -> int:
    """The sum of a tensor's little-endian words (the last may be short), mod 2**64.

    It runs at memory speed, where the tensor lies, and does not notice words that change places.
    """
    return int(word_bits(tensor)) % 2**64


def word_bits(tensor: Tensor) -> int | Tensor:
    """`word_sum` as an int on a CPU; elsewhere as a scalar int64 of its bits on the tensor's device."""
    dense = tensor.detach().contiguous()
    if dense.device.type == "cpu":
        if (compiled := native()) is not None:
            return compiled.word_sum(dense)
        array = dense.view(-1).view(torch.uint8).numpy()
        whole = array.nbytes // WORD * WORD
        words, rest = int(np.add.reduce(array[:whole].view("<u4"), dtype=np.uint64)), array[whole:]
        return (words + int.from_bytes(rest.tobytes(), "little")) % 2**64
    raw = dense.view(-1).view(torch.uint8)
    whole = raw.numel() // WORD * WORD
    aligned = raw if raw.storage_offset() % WORD == 0 else raw.clone()
    signed, rest = aligned[:whole].view(torch.int32), raw[whole:].to(torch.int64)
    words = signed.sum(dtype=torch.int64) + ((signed < 0).sum() << 32)
    return words + (rest << 8 * torch.arange(len(rest), device=rest.device)).sum() if len(rest) else words


def _block_sum(piece: Slice, words: bool) -> tuple[int | Tensor, int | Tensor]:
    """(keyed sum of a block modulo 2^64, its `word_bits` if `words`), on its device."""
    block, shape, offset = piece.tensor.detach(), piece.shape, piece.offset
    if block.element_size() == 8:
        block, shape, offset = block.contiguous().unsqueeze(-1).view(torch.int32), (*shape, 2), (*offset, 0)
    dense = block.shape[1:] == shape[1:]
    first = offset[0] * math.prod(shape[1:]) if shape and offset[0] else 0  # index of a dense block's first element
    if dense and block.is_cpu:
        return _run_sum(block.contiguous(), first, words)
    if dense and block.is_cuda and block.numel() and (kernels := gpu()) is not None:
        factors = _factors(first // _RUN, (first + block.numel()) // _RUN + 1).to(block.device)
        total, found = kernels.keyed_sum(block.contiguous(), first, _key_bits(block.device), factors)
        return total, found
    strides = [math.prod(shape[dim + 1 :]) for dim in range(block.ndim)]
    keys = _key_bits(block.device)
    total = torch.zeros((), dtype=torch.int64, device=block.device)
    for part, at in _small_blocks(block, offset, _BLOCK):
        total += (_bits(part) * _keys_of(part.shape, at, strides, keys)).sum()
    return total, word_bits(block) if words else 0


def _run_sum(block: Tensor, first: int, words: bool) -> tuple[int, int]:
    """(keyed sum, word sum) of a dense block whose first element has the index `first`."""
    count = block.numel()
    factors = _factors(first // _RUN, (first + count) // _RUN + 1)
    if (compiled := native()) is not None:
        return compiled.keyed_sum(block, first, _KEY_BITS, factors, words)
    bits = block.view(-1).view(torch.uint8).numpy().view(_INTEGERS[block.element_size()])
    room, total, at = np.empty(min(_RUN, count), np.uint64), 0, 0
    for factor in factors.numpy().view(np.uint64).tolist():
        begin = (first + at) % _RUN
        part = bits[at : at + _RUN - begin]
        wide = room[: len(part)]
        wide[:] = part
        wide *= _KEYS[begin : begin + len(part)]  # NumPy's scalar product of integers takes half as long again
        total += int(wide.sum()) * factor
        at += len(part)
    return total % 2**64, word_sum(block) if words else 0


@lru_cache(maxsize=8)
def _key_bits(device: torch.device) -> Tensor:
    return _KEY_BITS.to(device)


@lru_cache(maxsize=1 << 10)
def _factors(first: int, end: int) -> Tensor:
    """Factors of the runs from `first` up to `end`, as the bits of int64."""
    return torch.from_numpy(np.array([_factor(run) for run in range(first, end)], np.uint64).view(np.int64))


def _bits(block: Tensor) -> Tensor:
    """The elements' bits as unsigned numbers, in int64."""
    width = block.element_size()
    signed = block.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[width])
    return signed.to(torch.int64).bitwise_and_(2 ** (8 * width) - 1)


def _keys_of(size: Sequence[int], offset: tuple[int, ...], strides: list[int], keys: Tensor) -> Tensor:
    """int64 keys of the elements of a block with this size and offset."""
    index = torch.zeros((), dtype=torch.int64, device=keys.device)  # flat, in the whole tensor
    for length, begin, stride in zip(size, offset, strides, strict=True):
        index = index.unsqueeze(-1) + torch.arange(begin, begin + length, device=keys.device).mul_(stride)
    first, last = (sum((b + more * (n - 1)) * s for b, n, s in zip(offset, size, strides, strict=True)) for more in (0, 1))
    factors = _factors(first // _RUN, last // _RUN + 1).to(keys.device)
    return keys[index % _RUN] * factors[index // _RUN - first // _RUN]


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
