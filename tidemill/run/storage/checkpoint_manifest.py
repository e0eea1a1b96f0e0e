"""A checkpoint's manifest: its position, and the size and hash of every file.

A manifest is read as if an enemy had written it: bounded, by declared types, and its paths are only compared with those of
files that were found, so that no name in it is ever opened.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tidemill.core.atomic_files import flush_tree
from tidemill.core.errors import CheckpointError
from tidemill.core.hardware import usable_cores

MANIFEST = "manifest.json"
FORMAT = 2
MAX_BYTES = 4 << 20
MAX_FILES = 10_000
_CHUNK = 1 << 20
_PART = 64 << 20
_NAME = re.compile(r"step-(\d{6,15})")

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a checkpoint in its run."""

    step: int  # steps done: the weights are version `step`
    incarnation: int
    next_id: int  # next admission id: with the ledger, it is the whole data position


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and hash of one file."""

    size: Count
    blake2b: Hash  # hash of the hashes of its parts, `_PART` bytes each


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of `manifest.json`."""

    format: Literal[2]
    step: Count
    incarnation: Count
    next_id: Count
    files: Annotated[dict[str, File], msgspec.Meta(min_length=1, max_length=MAX_FILES)]  # by path, with slashes
    blake2b: Hash  # hash of the manifest itself, computed with "" here

    def own_digest(self) -> str:
        """The hash of the manifest with an empty `blake2b`."""
        return blake2b(msgspec.json.encode(msgspec.structs.replace(self, blake2b="")), digest_size=32).hexdigest()

    @property
    def position(self) -> Position:
        return Position(self.step, self.incarnation, self.next_id)


_decoder = msgspec.json.Decoder(CheckpointManifest, strict=True)


def name_of(step: int) -> str:
    """The folder name of a step's checkpoint."""
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """The step in a checkpoint's folder name, or None if it is no such name."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found and name == name_of(int(found[1])) else None


def seal(folder: Path, position: Position, stop: threading.Event) -> Path:
    """Write the manifest of a folder and flush all of it. Returns its path.

    stop: gives up as soon as it is set. Raises OSError.
    """
    files = {name: File(path.stat().st_size, _digest(path, stop)) for name, path in _files(folder).items()}
    manifest = CheckpointManifest(FORMAT, position.step, position.incarnation, position.next_id, files, "")
    manifest = msgspec.structs.replace(manifest, blake2b=manifest.own_digest())
    path = folder / MANIFEST
    path.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    flush_tree(folder)
    return path


def verify(folder: Path, step: int | None = None) -> Position:
    """Raise CheckpointError unless the folder holds exactly the manifest's files, byte for byte.

    Further files directly in the folder are allowed; in folders of it they might be read for one of ours. step: as for
    `read_manifest`.
    """
    manifest = read_manifest(folder, step)
    try:
        found, entries = _files(folder), _entries(folder)
        if lost := sorted(manifest.files.keys() - found.keys()):
            raise CheckpointError(f"{folder}: {len(lost)} files are missing, among them {lost[0][:200]!r}")
        if surplus := sorted(name for name in entries.keys() - manifest.files.keys() if "/" in name):
            raise CheckpointError(f"{folder}: {surplus[0]} does not belong there")
        for name, file in manifest.files.items():
            if (size := found[name].lstat().st_size) != file.size:
                raise CheckpointError(f"{found[name]} holds {size} bytes, its manifest says {file.size}")
        for name, file in manifest.files.items():
            if _digest(found[name]) != file.blake2b:
                raise CheckpointError(f"{found[name]} is damaged: its contents are not those that were written")
    except OSError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    return manifest.position


def read_manifest(folder: Path, step: int | None = None) -> CheckpointManifest:
    """Read a folder's manifest. Raises CheckpointError if it is missing, damaged, or another's.

    step: the step that the manifest must have; None: the step in the folder's name.
    """
    path = folder / MANIFEST
    try:
        raw = _read(path)
        manifest = _decoder.decode(raw)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable: {str(error)[:300]}") from None
    if manifest.own_digest() != manifest.blake2b:
        raise CheckpointError(f"{path} is damaged: its contents are not those that were written")
    if manifest.step != (step_of(folder.name) if step is None else step):
        raise CheckpointError(f"{path} is that of step {manifest.step}")
    return manifest


def strangers(folder: Path) -> list[str]:
    """Paths below `folder` that its manifest does not name, so that Tidemill did not write them."""
    ours = {*read_manifest(folder).files, MANIFEST}
    return sorted(name for name in _entries(folder) if name not in ours)


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe at this path must not block
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no file")
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ValueError(f"it is longer than {MAX_BYTES} bytes")
    return raw


def _files(folder: Path) -> dict[str, Path]:
    """Regular files below `folder` by their relative paths, without the manifest and links."""
    return {name: p for name, p in _entries(folder).items() if name != MANIFEST and stat.S_ISREG(p.lstat().st_mode)}


def _entries(folder: Path) -> dict[str, Path]:
    """Everything below `folder` that is no folder. Links are not followed."""
    if folder.is_symlink():
        raise NotADirectoryError(f"{folder} is a link")
    found = (Path(place, name) for place, folders, files in os.walk(folder) for name in [*folders, *files])
    return {p.relative_to(folder).as_posix(): p for p in found if p.is_symlink() or not p.is_dir()}


def _digest(path: Path, stop: threading.Event | None = None) -> str:
    """The hash of a file: BLAKE2b, 32 bytes, of the hashes of its parts.

    Half of the cores compute it. Raises InterruptedError, an OSError, when `stop` is set.
    """
    begins = range(0, path.stat().st_size, _PART)
    if len(begins) <= 1:
        parts = [_digest_part(path, begin, stop) for begin in begins]
    else:
        threads = min(len(begins), max(1, usable_cores() // 2))
        with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:  # bounded: by the disk, or `stop`
            parts = list(pool.map(lambda begin: _digest_part(path, begin, stop), begins))
    return blake2b(b"".join(parts), digest_size=32).hexdigest()


def _digest_part(path: Path, begin: int, stop: threading.Event | None) -> bytes:
    total = blake2b(digest_size=32)
    with open(path, "rb", buffering=0) as file:
        file.seek(begin)
        left = _PART
        while chunk := file.read(min(_CHUNK, left)):  # a read may return less than was asked for
            if stop is not None and stop.is_set():
                raise InterruptedError(f"{path}: stopped while it was read")
            total.update(chunk)
            left -= len(chunk)
    return total.digest()
