"""Coding of one tensor's change: the places of the elements that changed, and by how much.

    old bits, new bits -> pack -> bytes       base, bytes -> unpack -> the same bits as new

Elements are compared and changed as integers of their width, so -0.0, NaN and denormals are exact. A tensor is coded in
chunks of rows, each a record of its own:

    header: coding, changed elements, bytes of the gaps, bytes of the frame | frame: zstd(places, differences)

places: gaps between changed elements, a byte each (255: go on counting), or a bit for each element, whichever is shorter.
differences: new - old modulo the width, zigzag, byte plane by byte plane. Most are one unit in the last place, so that they
take a fifth of what the new bits would. A chunk whose record would not be smaller than its elements holds those.

What is unpacked is untrusted: every size and place is checked before it is used, and a frame is never unpacked to more
bytes than the header's numbers, which the tensor's size bounds, come to.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import prod

import numpy as np
import torch
import zstandard
from torch import Tensor

from tidemill.core.types import Array

CHUNK = 1 << 18  # elements: unpacking as many takes about a millisecond, between two steps of an engine
LEVEL = 1  # of zstd: higher ones take longer and gain nothing here
_HEADER = struct.Struct("<BIII")
_SAME, _GAPS, _BITS, _WHOLE = range(4)
_FEW = 16  # few elements are one in so many
_MOST = 1 << 31  # bytes of a row: a header counts to twice as many
_ON = 255  # a gap's byte that says: go on counting
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NotPacked(ValueError):
    """Bytes are not a change of this tensor. Receivers turn it into a PolicyMismatch."""


def row_chunks(size: tuple[int, ...]) -> Iterator[slice]:
    """Runs of rows that are coded together; a tensor without dimensions has one row."""
    count = size[0] if size else 1
    rows = max(1, CHUNK // max(1, prod(size[1:])))
    return (slice(at, min(at + rows, count)) for at in range(0, count, rows))


def pack(old: Tensor, new: Tensor) -> bytes | None:
    """The change of a tensor on the CPU, b"" if there is none, None if it would not be smaller than the tensor."""
    if torch.equal(_integers(old), _integers(new)):
        return b""
    if new.nbytes > _MOST * (len(new) if new.ndim else 1):
        return None
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
    records = list[bytes]()
    for rows in row_chunks(tuple(new.shape)):
        before, after = (_unsigned(_rows(each, rows)) for each in (old, new))
        records += _record(before, after, compressor)
    packed = b"".join(records)
    return packed if len(packed) < new.nbytes else None


def unpack(packed: Tensor, size: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[slice, RowsChange]]:
    """The changes of a tensor's runs of rows. Raises NotPacked; what came before it is not to be used."""
    data, at = packed.numpy().data, 0
    decompressor = zstandard.ZstdDecompressor()
    for rows in row_chunks(size):
        count = (rows.stop - rows.start) * prod(size[1:])
        if not len(data):
            yield rows, RowsChange(count, dtype)
            continue
        if len(data) - at < _HEADER.size:
            raise NotPacked("it is cut short")
        coding, changed, gaps, length = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        if length > len(data) - at:
            raise NotPacked("it is cut short")
        yield rows, _change(count, dtype, coding, changed, gaps, bytes(data[at : at + length]), decompressor)
        at += length
    if at != len(data):
        raise NotPacked(f"{len(data) - at} bytes follow the last row")


class RowsChange:
    """The change of one run of rows."""

    def __init__(self, count: int, dtype: torch.dtype, places: Array | None = None, values: Array | None = None) -> None:
        """places: None for all elements, whose new bits `values` are; without values nothing changes."""
        self._count, self._dtype, self._places, self._values = count, dtype, places, values

    def apply(self, rows: Tensor) -> None:
        """Change a contiguous tensor, on any device, that holds the rows of the base."""
        assert rows.numel() == self._count and rows.dtype == self._dtype and rows.is_contiguous()
        if self._values is None:
            return
        bits = _integers(rows)
        if self._places is None:
            bits.copy_(torch.from_numpy(self._values))
        elif bits.is_cpu:  # NumPy, because PyTorch would take ten times as long
            array = bits.numpy()
            if _FEW * len(self._places) < self._count:
                array[self._places] += self._values
            else:  # whole arrays are added faster than many single elements
                change = np.zeros(self._count, self._values.dtype)
                change[self._places] = self._values
                array += change
        else:
            bits[torch.from_numpy(self._places).to(bits.device)] += torch.from_numpy(self._values).to(bits.device)


def _record(before: Array, after: Array, compressor: zstandard.ZstdCompressor) -> Iterator[bytes]:
    differs = before != after
    places = np.flatnonzero(differs)
    if not len(places):
        yield _HEADER.pack(_SAME, 0, 0, 0)
        return
    gaps = np.diff(places, prepend=-1) - 1
    length = len(places) + int((gaps // _ON).sum())
    sparse = length < -(-len(after) // 8)
    marks = _counted(gaps, length) if sparse else np.packbits(differs)
    frame = compressor.compress(marks.tobytes() + _planes(before[places], after[places]).tobytes())
    if len(frame) >= after.nbytes:
        yield _HEADER.pack(_WHOLE, 0, 0, after.nbytes)
        yield after.tobytes()
        return
    yield _HEADER.pack(_GAPS if sparse else _BITS, len(places), length if sparse else 0, len(frame))
    yield frame


def _counted(gaps: Array, length: int) -> Array:
    marks = np.full(length, _ON, np.uint8)
    marks[np.cumsum(gaps // _ON + 1) - 1] = gaps % _ON
    return marks


def _planes(before: Array, after: Array) -> Array:
    """The differences, zigzag: all lowest bytes, then all second ones, and so on."""
    width = after.itemsize
    signed = (after - before).view(f"<i{width}")
    zigzag = ((signed << 1) ^ (signed >> (8 * width - 1))).view(f"<u{width}")
    return np.stack([(zigzag >> 8 * byte).astype(np.uint8) for byte in range(width)])


def _change(
    count: int,
    dtype: torch.dtype,
    coding: int,
    changed: int,
    gaps: int,
    frame: bytes,
    decompressor: zstandard.ZstdDecompressor,
) -> RowsChange:
    width = dtype.itemsize
    if coding == _SAME and not (changed or gaps or frame):
        return RowsChange(count, dtype)
    if coding == _WHOLE and not (changed or gaps) and len(frame) == count * width:
        return RowsChange(count, dtype, None, np.frombuffer(frame, f"<i{width}").copy())
    sparse = coding == _GAPS
    if not sparse and (coding != _BITS or gaps):
        raise NotPacked(f"a record of coding {coding} does not fit")
    if not 0 < changed <= count or (sparse and not changed <= gaps <= changed + count // _ON):
        raise NotPacked(f"{changed} of {count} elements, with {gaps} bytes of gaps, cannot have changed")
    marks = gaps if sparse else -(-count // 8)
    body = _unpacked(frame, marks + changed * width, decompressor)
    # A bit that is set beyond `count`, in the last byte, is a place that does not exist.
    places = _after_gaps(body[:marks], changed) if sparse else np.flatnonzero(np.unpackbits(body[:marks]).view(bool))
    if len(places) != changed or places[-1] >= count:
        raise NotPacked("its places are not those of so many elements")
    return RowsChange(count, dtype, places, _differences(body[marks:], width))


def _unpacked(frame: bytes, length: int, decompressor: zstandard.ZstdDecompressor) -> Array:
    try:
        if zstandard.frame_content_size(frame) != length:
            raise NotPacked(f"its frame does not hold the expected {length} bytes")
        body = decompressor.decompress(frame, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise NotPacked(f"its frame cannot be unpacked ({error})") from None
    if len(body) != length:
        raise NotPacked(f"its frame does not hold the expected {length} bytes")
    return np.frombuffer(body, np.uint8)


def _after_gaps(marks: Array, changed: int) -> Array:
    ends = marks != _ON
    if int(ends.sum()) != changed or not ends[-1]:
        raise NotPacked("its places are not those of so many elements")
    return np.cumsum(marks, dtype=np.int64)[ends] + np.arange(changed)


def _differences(planes: Array, width: int) -> Array:
    zigzag = np.zeros(len(planes) // width, f"<u{width}")
    for byte, plane in enumerate(planes.reshape(width, -1)):
        zigzag |= plane.astype(zigzag.dtype) << zigzag.dtype.type(8 * byte)
    halves, signs = (zigzag >> 1).view(f"<i{width}"), (zigzag & 1).view(f"<i{width}")
    return halves ^ -signs


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    return tensor[rows] if tensor.ndim else tensor


def _integers(tensor: Tensor) -> Tensor:
    """The bits of a contiguous tensor as signed integers, flat, as a view."""
    return tensor.view(-1).view(_INTEGERS[tensor.element_size()])


def _unsigned(tensor: Tensor) -> Array:
    array = _integers(tensor).numpy()
    return array.view(f"<u{array.itemsize}")
