"""Shared-memory transport: the trainer writes weights once, every engine reads them in place.

    slot = [header | blocks, 64-byte aligned | manifest]        two slots, written in turn

While version v is written to one slot, engines may still read v - 1 from the other. The header is wiped first and written
last, so that a send that failed halfway is never visible. The receiver compares the header before and after each block is
used, and so notices a slot that was overwritten meanwhile. Blocks are read in place, through a read-only mapping.

A slot is anonymous memory, which goes away with the last process that has it open, or else a file in a given folder.
The resource tracker of Python's own `SharedMemory` would unlink segments that another process still uses.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import secrets
import struct
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tidemill.core.errors import PolicyMismatch
from tidemill.core.memory import anonymous_memory
from tidemill.core.types import Version
from tidemill.core.weight_update import AddedTo, WeightPart, WeightUpdate
from tidemill.models.host_memory import Pinned
from tidemill.models.weight_slices import Slice
from tidemill.weight_sync.manifest import CARRIES, MAX_BYTES, Block, WeightManifest, expect_parts, expect_whole

_HEADER = struct.Struct("<8s16sQQ32s")  # magic, nonce of the send, start and length of the manifest, its BLAKE2b
_MAGIC = b"TIDEMILL"
_FIRST = 4096  # where the blocks begin
_ALIGN = 64
_VIEWS = 1 << 14  # most views that a slot holds
_FILE = "tidemill-{}.slot"

with warnings.catch_warnings():  # torch warns once per process that a buffer is read-only; here the mapping protects it
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


class SharedMemorySender:
    """Sender with two slots; they are files in `folder` without anonymous memory."""

    def __init__(self, folder: Path, anonymous: bool = True, partial: bool = False) -> None:
        """partial: it sends one part of each version, and only all parts together fill the tensors."""
        self._slots = [_Slot(folder, anonymous), _Slot(folder, anonymous)]
        self._next, self._partial = 0, partial

    def send(self, version: Version, slices: Iterable[Slice], onto: AddedTo | None = None) -> WeightUpdate:
        """Write a version and make it visible, or raise ValueError when slices do not fill their tensors."""
        assert self._slots, "send() after close()"
        slot = self._slots[self._next]
        slot.wipe()
        blocks, end = [], _FIRST
        for item in slices:
            block = Block.of(item, start=end)
            slot.put(end, item.tensor.detach().contiguous())
            blocks.append(block)
            end = -(-(end + item.tensor.nbytes) // _ALIGN) * _ALIGN
        manifest = WeightManifest(version, blocks, onto)
        manifest.check(self._partial)
        slot.commit(manifest.encode(), end)
        self._next = 1 - self._next  # only now: after a failure the other slot still holds the last good version
        return manifest.update(WeightPart("shared_memory", slot.location, *manifest.sizes))

    def close(self) -> None:
        for slot in self._slots:
            slot.close()
        self._slots = []


class SharedMemoryReceiver:
    """Reads versions in place, from the slots of SharedMemorySenders on this machine: one for each part."""

    takes = CARRIES

    def __init__(self) -> None:
        self._mappings: dict[tuple[int, int], _Mapping] = {}  # by device and inode; mapping anew costs page faults
        self._policies = set[str]()  # seen, each of which has a sender for each part

    def receive(self, update: WeightUpdate) -> Iterator[Slice]:
        """Iterate over the slices as read-only views, each valid until the iterator moves on.

        Writing to one is a segmentation fault. Raises PolicyMismatch for another version than that of `update`.
        """
        expect_parts(update, "shared_memory", self.takes)
        self._policies.add(update.version.policy)
        parts = len(update.parts)
        most = 2 * parts * len(self._policies)
        with ExitStack() as stack:
            slots = [(stack.enter_context(_opened(part.location)), part.location) for part in update.parts]
            headers = [_read_header(*slot) for slot in slots]
            manifests = [_read_manifest(*slot, header, parts > 1) for slot, header in zip(slots, headers, strict=True)]
            expect_whole(manifests, update)
            for (fd, location), header, manifest in zip(slots, headers, manifests, strict=True):
                mapping, before = self._mapping(fd, header.start, most), _HEADER.pack(*header)
                for block, view in zip(manifest.blocks, mapping.views(manifest, location), strict=True):
                    yield block.slice(view)
                    if os.pread(fd, _HEADER.size, 0) != before:
                        raise PolicyMismatch(f"{location}: was overwritten with another version while it was read")

    def close(self) -> None:
        self._mappings.clear()  # unmapped with the last view of it

    def _mapping(self, fd: int, end: int, most: int) -> _Mapping:
        """A mapping of at least the first `end` bytes of a slot; the `most` latest ones are kept."""
        status = os.fstat(fd)
        key = status.st_dev, status.st_ino
        known = self._mappings.pop(key, None)
        # One that reaches so far stays even if a longer manifest made the slot grow: to close 100 MB takes 5 ms of a step.
        if known is None or not end <= len(known.memory) <= status.st_size:
            known = _Mapping(mmap.mmap(fd, status.st_size, access=mmap.ACCESS_READ))
        self._mappings[key] = known
        while len(self._mappings) > most:  # a sender has two slots; older ones are of a sender that is gone
            del self._mappings[next(iter(self._mappings))]
        return known


class _Mapping:
    """A receiver's mapping of one slot, with views of its blocks."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self._layout: tuple[Any, ...] = ()
        self._views: list[Tensor] = []

    def views(self, manifest: WeightManifest, location: str) -> list[Tensor]:
        """A view of each block, made once for all versions of the same layout."""
        if (layout := manifest.layout()) != self._layout:
            self._views = [_view(self.memory, block, location) for block in manifest.blocks]
            self._layout = layout
        return self._views


class _Header(NamedTuple):
    magic: bytes
    nonce: bytes
    start: int
    length: int
    digest: bytes


class _Slot:
    """The sender's side of one slot. It never shrinks, so that no reader's mapping loses its memory."""

    def __init__(self, folder: Path, anonymous: bool) -> None:
        made = anonymous_memory("tidemill-weights") if anonymous else None
        self.fd, self.location = made or _named(folder)
        self._named = made is None
        self._map: mmap.mmap | None = None
        self._blocks: dict[int, Tensor] = {}  # views of the map by their first byte, made once for all full versions
        self._pinned: Pinned | None = None

    def wipe(self) -> None:
        if len(self._blocks) > _VIEWS:  # changes lie elsewhere in each version
            self._blocks.clear()
        os.pwrite(self.fd, bytes(_HEADER.size), 0)

    def put(self, start: int, tensor: Tensor) -> None:
        """Copy a contiguous tensor to byte `start`."""
        if tensor.numel() == 0:
            return
        end = start + tensor.nbytes
        if self._map is not None and end <= len(self._map):
            if tensor.is_cuda and self._pinned is None:
                self._pinned = Pinned(self._map)
            into = self._blocks.get(start)
            if into is None or into.shape != tensor.shape or into.dtype != tensor.dtype:
                into = torch.frombuffer(self._map, dtype=tensor.dtype, offset=start, count=tensor.numel())
                into = self._blocks[start] = into.view(tensor.shape)
            into.copy_(tensor)
        else:  # a write reports full memory as OSError, while a store to the mapping would kill the process
            _write(self.fd, tensor.cpu().reshape(-1).view(torch.uint8).numpy().data, start)

    def commit(self, manifest: bytes, start: int) -> None:
        _write(self.fd, memoryview(manifest), start)
        if self._map is None or start > len(self._map):
            self._let_go()
            self._map = mmap.mmap(self.fd, os.fstat(self.fd).st_size)
        digest = hashlib.blake2b(manifest, digest_size=32).digest()
        os.pwrite(self.fd, _HEADER.pack(_MAGIC, secrets.token_bytes(16), start, len(manifest), digest), 0)

    def _let_go(self) -> None:
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None
        self._blocks.clear()
        self._map = None

    def close(self) -> None:
        self._let_go()
        os.close(self.fd)
        if self._named:
            Path(self.location).unlink(missing_ok=True)


def _named(folder: Path) -> tuple[int, str]:
    """(descriptor, location) of a new slot file, locked while this process lives."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(_FILE.format("*")):
        with open(old, "rb") as file:
            if _lock(file.fileno()):  # its maker died
                old.unlink(missing_ok=True)
    path = folder / _FILE.format(secrets.token_hex(8))
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    assert _lock(fd)
    return fd, str(path)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _write(fd: int, data: memoryview, start: int) -> None:
    while data:
        done = os.pwrite(fd, data[: 1 << 30], start)  # Linux writes at most 2 GiB at once
        data, start = data[done:], start + done


@contextmanager
def _opened(location: str) -> Iterator[int]:
    try:
        fd = os.open(location, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise PolicyMismatch(f"{location}: the weights are gone ({error}); did the process that sent them end?") from None
    try:
        yield fd
    finally:
        os.close(fd)


def _read_header(fd: int, location: str) -> _Header:
    raw = os.pread(fd, _HEADER.size, 0)
    if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
        raise PolicyMismatch(f"{location}: no complete version in it (being written, or its sending failed)")
    return _Header(*_HEADER.unpack(raw))


def _read_manifest(fd: int, location: str, header: _Header, partial: bool) -> WeightManifest:
    size = os.fstat(fd).st_size
    if not 0 < header.length <= MAX_BYTES or header.start + header.length > size:
        raise PolicyMismatch(f"{location}: truncated ({size} bytes, the manifest lies at {header.start})")
    raw = os.pread(fd, header.length, header.start)
    if hashlib.blake2b(raw, digest_size=32).digest() != header.digest:
        raise PolicyMismatch(f"{location}: the manifest is not the one its header names")
    return WeightManifest.decode(raw, partial)


def _view(mapping: mmap.mmap, block: Block, location: str) -> Tensor:
    size, dtype = block.form
    if block.length == 0:
        return torch.empty(size, dtype=dtype)
    if block.start % _ALIGN or block.start + block.length > len(mapping):
        raise PolicyMismatch(f"{location}: {block.key} lies outside of it")
    count = block.length // dtype.itemsize
    return torch.frombuffer(mapping, dtype=dtype, offset=block.start, count=count).view(size)
