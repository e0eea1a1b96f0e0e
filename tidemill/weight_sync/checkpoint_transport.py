"""Checkpoint transport: weights as files, for engines that share only a disk with the trainer.

    folder/v000012.0/    manifest.json    part-0000.safetensors ...        (step 12, incarnation 0)

A version is written under a temporary name, synced to the disk and then renamed, so a version that can be seen is complete.
The last `keep` versions stay. Only folders that hold the marker of this module are ever removed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tidemill.core.atomic_files import flush, remove_left
from tidemill.core.errors import PolicyMismatch
from tidemill.core.types import Version
from tidemill.core.weight_update import AddedTo, WeightPart, WeightUpdate
from tidemill.models.weight_slices import Coverage, Slice
from tidemill.weight_sync.manifest import CARRIES, MAX_BYTES, Block, WeightManifest, expect_parts, expect_whole

_MARKER = ".tidemill-weights"
_UNFINISHED = ".sending-"
_NAME = re.compile(r"v(\d{6,})\.(\d+)")
PART_BYTES = 1 << 30  # bounds the copies (cast, or from a device) that are held in memory until they are written


class CheckpointSender:
    """The only writer of `folder`, for one policy."""

    def __init__(self, folder: Path, keep: int = 2, part_bytes: int = PART_BYTES, partial: bool = False) -> None:
        """partial: it sends one part of each version, and only all parts together fill the tensors."""
        if keep < 1:
            raise ValueError(f"keep={keep}: expected at least 1 version to stay on disk")
        self._folder, self._keep, self._part_bytes, self._partial = folder, keep, part_bytes, partial
        self._policy: str | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_UNFINISHED}*"):  # left by a sender that was killed
            remove_left(left, _MARKER)

    def send(self, version: Version, slices: Iterable[Slice], onto: AddedTo | None = None) -> WeightUpdate:
        """Write a version and make it visible, or raise ValueError when slices do not fill their tensors."""
        if version.policy != (self._policy or version.policy):
            raise ValueError(f"{self._folder} holds {self._policy!r}: send {version.policy!r} to a folder of its own")
        self._policy = version.policy
        target = self._folder / f"v{version.step:06d}.{version.incarnation}"
        unfinished = _unused(self._folder)
        unfinished.mkdir()
        (unfinished / _MARKER).touch()
        try:
            manifest = WeightManifest(version, _write_parts(unfinished, slices, self._part_bytes), onto)
            manifest.check(self._partial)
            (unfinished / "manifest.json").write_bytes(manifest.encode())
            for path in (*unfinished.iterdir(), unfinished):
                flush(path)
            _publish(unfinished, target)
        finally:
            remove_left(unfinished, _MARKER)
        for old in [path for path in self._versions() if path != target][: -(self._keep - 1) or None]:
            _remove(old)
        return manifest.update(WeightPart("checkpoint", str(target), *manifest.sizes))

    def close(self) -> None:
        """Remove every version: they only existed to reach the engines."""
        for path in self._versions():
            _remove(path)

    def _versions(self) -> list[Path]:
        """The folders of this sender's versions, oldest first: by incarnation, then step."""
        found = [(int(m[2]), int(m[1]), p) for p in self._folder.iterdir() if (m := _NAME.fullmatch(p.name)) and _is_ours(p)]
        return [path for _, _, path in sorted(found)]


class CheckpointReceiver:
    """Reads versions that CheckpointSenders wrote to shared folders, one for each part."""

    takes = CARRIES

    def receive(self, update: WeightUpdate) -> Iterator[Slice]:
        """Iterate over the slices of a version. Raises PolicyMismatch when files do not fit."""
        expect_parts(update, "checkpoint", self.takes)
        folders = [Path(part.location) for part in update.parts]
        manifests = [_read_manifest(folder, len(folders) > 1) for folder in folders]
        expect_whole(manifests, update)
        for folder, manifest in zip(folders, manifests, strict=True):
            parts: dict[int, dict[str, Block]] = {}
            for block in manifest.blocks:
                if parts.setdefault(block.part, {}).setdefault(block.key, block) is not block:
                    raise PolicyMismatch(f"{folder}: the manifest names {block.key} twice")
            for part, blocks in parts.items():
                for key, tensor in _read_part(folder / _part_name(part), set(blocks)):
                    yield blocks[key].slice(tensor)

    def close(self) -> None:
        pass


def _write_parts(folder: Path, slices: Iterable[Slice], part_bytes: int) -> list[Block]:
    blocks, coverage = list[Block](), Coverage()
    pending: dict[str, Tensor] = {}
    part = held = 0
    for item in slices:
        host = replace(item, tensor=item.tensor.detach().cpu().contiguous())
        block = Block.of(host, part=part)
        coverage.add_block(*block.outline[:4], block.torch_dtype)  # this early: safetensors refuses overlapping tensors
        if block.key in pending:
            raise ValueError(f"{block.key} was given twice")
        if pending and held + block.length > part_bytes:
            save_file(pending, folder / _part_name(part))
            pending, held, part = {}, 0, part + 1
            block = Block.of(host, part=part)
        pending[block.key] = host.tensor
        held += block.length
        blocks.append(block)
    if pending:
        save_file(pending, folder / _part_name(part))
    return blocks


def _part_name(part: int) -> str:
    return f"part-{part:04d}.safetensors"


def _publish(unfinished: Path, target: Path) -> None:
    """Rename a finished version into place; whoever reads an old one keeps its files."""
    if target.exists():  # it is sent again after a resume
        if not _is_ours(target):
            raise FileExistsError(f"{target} exists and is not a version of ours: choose another folder for weights")
        aside = target.rename(_unused(target.parent))
        unfinished.rename(target)
        remove_left(aside, _MARKER)
    else:
        unfinished.rename(target)
    flush(target.parent)


def _is_ours(path: Path) -> bool:
    return not path.is_symlink() and (path / _MARKER).is_file()


def _remove(version: Path) -> None:
    """Remove a version. It is renamed first, so that a kill halfway leaves no broken version."""
    remove_left(version.rename(_unused(version.parent)), _MARKER)


def _unused(folder: Path) -> Path:
    """A new path, no version's; the next sender removes what a kill leaves there."""
    return folder / f"{_UNFINISHED}{secrets.token_hex(8)}"


def _read_manifest(folder: Path, partial: bool) -> WeightManifest:
    try:
        with open(folder / "manifest.json", "rb") as file:
            return WeightManifest.decode(file.read(MAX_BYTES + 1), partial)
    except OSError as error:
        raise PolicyMismatch(f"{folder}: no version there ({error}); was it removed? `keep` says how many stay") from None


def _read_part(path: Path, expected: set[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one file, which must be exactly those `expected`."""
    try:
        with safe_open(path, framework="pt") as file:
            if (found := set(file.keys())) != expected:
                differing = ", ".join(sorted(found ^ expected)[:3])
                raise PolicyMismatch(f"{path}: the manifest and the file differ in {differing}")
            for key in sorted(expected):
                yield key, file.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise PolicyMismatch(f"{path}: not readable as safetensors ({error})") from None
