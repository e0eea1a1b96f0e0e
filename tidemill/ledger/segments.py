"""Segments: append-only files `seg-000001.bin` of trajectory payloads, one checksummed record each.

    record = magic | payload length | crc32 | group id | place | count | payload        (24 bytes of header, little-endian)

A group has `count` trajectories, numbered by `place`, one after another in one file. The checksum covers group id, place,
count and payload, so a row that points at another trajectory's record is refused as surely as a flipped bit. Records are
written before the rows that point at them. `whole_groups` finds records whose rows were never written, and stops at a tail
that was cut off by a kill or a full disk. Each writer begins a file of its own and never touches one of an earlier writer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tidemill.core.atomic_files import flush
from tidemill.core.errors import PayloadLost

MAGIC = b"TMTR"
_HEADER = struct.Struct("<4sIIqHH")
_IDENTITY = struct.Struct("<qHH")
HEADER_BYTES = _HEADER.size
MOST = 2**16 - 1  # trajectories per group
_NAME = re.compile(r"seg-(\d{6,})\.bin")


class Location(NamedTuple):
    """Location of a record: segment, first byte, length of the payload in bytes, checksum."""

    segment: int
    offset: int
    length: int
    crc: int


def segment_path(folder: Path, number: int) -> Path:
    """The file of the segment with this number."""
    return folder / f"seg-{number:06d}.bin"


def segment_numbers(folder: Path) -> list[int]:
    """Numbers of the segments in `folder`, oldest first."""
    return sorted(int(m[1]) for entry in os.scandir(folder) if (m := _NAME.fullmatch(entry.name)))


def sync_file(descriptor: int) -> None:
    """Flush a file to the medium (on macOS by its own call: plain fsync stops at the drive's cache)."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(descriptor)


class SegmentWriter:
    """Appends records to files that no other writer has touched. Not thread-safe."""

    def __init__(self, folder: Path, *, limit: int, sync: bool, first: int) -> None:
        """limit: bytes after which a new file begins. sync: flush to the medium. first: the first number."""
        self._folder, self._limit, self._sync = folder, limit, sync
        self._next = first
        self._descriptor: int | None = None
        self._end = self._flushed = 0  # bytes written, and bytes of these that are on the medium

    @property
    def current(self) -> int | None:
        """Number of the segment that is being written; None before the first append."""
        return None if self._descriptor is None else self._next - 1

    def append(self, group_id: int, payloads: Sequence[bytes]) -> list[Location]:
        """Write the payloads as places 0, 1, ... of a group, all into one file; they survive this process.

        After an OSError no row points at what was written, and the next append begins a new file.
        """
        if self._descriptor is None or self._end >= self._limit:
            self._begin()
        assert self._descriptor is not None
        locations, parts, offset = [], [], self._end
        for place, payload in enumerate(payloads):
            crc = _checksum(group_id, place, len(payloads), payload)
            parts += (_HEADER.pack(MAGIC, len(payload), crc, group_id, place, len(payloads)), payload)
            locations.append(Location(self._next - 1, offset, len(payload), crc))
            offset += HEADER_BYTES + len(payload)
        try:
            _write_all(self._descriptor, b"".join(parts))
        except OSError:
            with contextlib.suppress(OSError):  # free the torn tail's space if the disk allows it
                os.ftruncate(self._descriptor, self._end)
            self._leave()
            raise
        self._end = offset
        return locations

    def flush(self) -> None:
        """Flush appended records to the medium, so that they survive a power cut too.

        After an OSError the next append begins a new file, because a kernel that failed to write a page may report the next
        flush of it as a success.
        """
        if self._descriptor is None or not self._sync or self._flushed == self._end:
            return
        try:
            sync_file(self._descriptor)
        except OSError:
            self._leave()
            raise
        self._flushed = self._end

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._leave()

    def _begin(self) -> None:
        self.close()
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(segment_path(self._folder, self._next), flags, 0o600)
        self._next += 1
        self._end = self._flushed = 0
        if self._sync:
            flush(self._folder)

    def _leave(self) -> None:
        """Close the current file for good."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read_record(folder: Path, group_id: int, place: int, at: Location) -> bytes:
    """The payload at a location. Raises PayloadLost when it is not exactly what was recorded."""
    name = f"trajectory {place} of group {group_id} (segment {at.segment}, offset {at.offset})"
    try:
        with open(segment_path(folder, at.segment), "rb") as file:
            file.seek(at.offset)
            record = file.read(HEADER_BYTES + at.length)
    except FileNotFoundError:
        raise PayloadLost(f"{name} is gone: {segment_path(folder, at.segment).name} does not exist") from None
    except OSError as error:
        if error.errno != errno.EIO:  # other errors say nothing about the payload itself
            raise
        raise PayloadLost(f"{name} cannot be read: {error}") from error
    if len(record) != HEADER_BYTES + at.length:
        raise PayloadLost(f"{name} is cut short: {len(record)} of {HEADER_BYTES + at.length} bytes are there")
    payload = record[HEADER_BYTES:]
    *header, count = _HEADER.unpack(record[:HEADER_BYTES])
    if tuple(header) != (MAGIC, at.length, at.crc, group_id, place):
        raise PayloadLost(f"{name} is damaged: its header is not the one that was recorded")
    if _checksum(group_id, place, count, payload) != at.crc:
        raise PayloadLost(f"{name} is damaged: its checksum does not match")
    return payload


def whole_groups(folder: Path, number: int, offset: int) -> Iterator[tuple[int, list[bytes], list[Location]]]:
    """(id, payloads, locations) of complete groups of a segment from `offset` on, until the first damage."""
    with open(segment_path(folder, number), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(offset)
        payloads: list[bytes] = []
        locations: list[Location] = []
        while len(header := file.read(HEADER_BYTES)) == HEADER_BYTES:
            magic, length, crc, group_id, place, count = _HEADER.unpack(header)
            if magic != MAGIC or length > size - file.tell():
                return
            payload = file.read(length)
            if _checksum(group_id, place, count, payload) != crc or place not in (0, len(payloads)):
                return
            if place == 0:
                payloads, locations = [], []
            payloads.append(payload)
            locations.append(Location(number, file.tell() - length - HEADER_BYTES, length, crc))
            if len(payloads) == count:
                yield group_id, payloads, locations
                payloads, locations = [], []


def _checksum(group_id: int, place: int, count: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_IDENTITY.pack(group_id, place, count)))


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
