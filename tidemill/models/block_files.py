"""Block files: safetensors that hold some rows of tensors, one file for each rank of a trainer.

    model-rank-1-of-2.safetensors      the rows of rank 1; the metadata says of which shape, and from which row on

A tensor that the metadata does not name is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tidemill.core.errors import CheckpointError
from tidemill.models.weight_slices import Coverage, Slice

_BLOCKS = "blocks"  # the metadata's key: JSON of {name: [shape of the whole, first row]}
_DTYPES = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}


def rank_file(stem: str, rank: int, ranks: int) -> str:
    """The name of a rank's file. rank: counted from 0."""
    return f"{stem}-rank-{rank + 1}-of-{ranks}.safetensors"


def rank_files(folder: Path, stem: str) -> list[Path]:
    """The files of all ranks, in order; none if there are no such files. Raises CheckpointError if some are missing."""
    found = {path.name for path in folder.glob(f"{stem}-rank-*-of-*.safetensors")}
    if not found:
        return []
    ranks = max(int(match[1]) for name in found if (match := re.search(r"-of-(\d{1,6})\.", name)))
    names = [rank_file(stem, rank, ranks) for rank in range(ranks)]
    if missing := [name for name in names if name not in found]:
        raise CheckpointError(f"{folder}: {len(missing)} of {ranks} ranks' files are missing, among them {missing[0]}")
    return [folder / name for name in names]


def write_blocks(path: Path, blocks: Iterable[Slice], save: Callable[..., None] = save_file) -> None:
    """Write the blocks that are not empty."""
    held = [block for block in blocks if block.tensor.numel()]
    parts = {b.name: [list(b.shape), b.offset[0]] for b in held if tuple(b.tensor.shape) != b.shape}
    tensors = {block.name: block.tensor.to("cpu").contiguous() for block in held}
    save(tensors, path, metadata={"format": "pt", **({_BLOCKS: json.dumps(parts)} if parts else {})})


def places_in(tensors: Any) -> dict[str, tuple[tuple[int, ...], int]]:
    """(shape of the whole, first row) of the tensors of an open file that are not whole."""
    try:
        parts = json.loads((tensors.metadata() or {}).get(_BLOCKS, "{}"))
        return {name: (tuple(int(n) for n in shape), int(first)) for name, (shape, first) in parts.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"its metadata {_BLOCKS!r} is not readable ({error})") from None


class BlockReader:
    """Reads rows of tensors that lie in several files, whole or as blocks. The files' headers are read at once."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Raises CheckpointError if a file is not readable, or repeats or contradicts another."""
        self._held = dict[str, list[tuple[Path, int, int]]]()  # file, first row, rows
        self._coverage = Coverage()
        for file in files:
            try:
                with safe_open(file, framework="pt") as tensors:
                    places = places_in(tensors)
                    for name in tensors.keys():  # noqa: SIM118  (not a dict)
                        self._add(file, name, tensors.get_slice(name), places)
            except (OSError, SafetensorError, ValueError) as error:
                raise CheckpointError(f"{file}: not readable ({error})") from None

    @property
    def names(self) -> Iterable[str]:
        return self._held.keys()

    def _add(self, file: Path, name: str, header: Any, places: dict[str, tuple[tuple[int, ...], int]]) -> None:
        size, dtype = tuple(header.get_shape()), _DTYPES.get(header.get_dtype())
        if dtype is None:
            raise ValueError(f"{name} is {header.get_dtype()}")
        shape, first = places.get(name, (size, 0))
        offset = (first, *(0,) * (len(shape) - 1)) if shape else ()
        self._coverage.add_block(name, shape, offset, size, dtype)
        self._held.setdefault(name, []).append((file, first, size[0] if size else 1))

    def check(self, where: Path, expected: Iterable[Slice], aside: Iterable[str]) -> None:
        """Raise CheckpointError unless there are the tensors of `expected`, complete, and those of `aside`, if at all."""
        wanted, found = {block.name: block for block in expected}, self._coverage.tensors
        if missing := sorted(wanted.keys() - found.keys()):
            raise CheckpointError(
                f"{where}: {len(missing)} tensors are missing, among them {missing[0]}; is it another model's?"
            )
        if surplus := sorted(found.keys() - wanted.keys() - set(aside)):
            raise CheckpointError(f"{where}: {len(surplus)} tensors do not belong here, among them {surplus[0]}")
        for name, block in wanted.items():
            given, own = (found[name].shape, found[name].dtype), (block.shape, block.tensor.dtype)
            if given != own:
                said, has = (f"{shape} {dtype}" for shape, dtype in (given, own))
                raise CheckpointError(f"{where}: {name} is {said}, this trainer has {has}")
        try:
            self._coverage.complete()
        except ValueError as error:
            raise CheckpointError(f"{where}: {error}") from None

    def whole(self, name: str) -> Tensor | None:
        """A tensor that lies in one file, or None."""
        if name not in self._held:
            return None
        with safe_open(self._held[name][0][0], framework="pt") as tensors:
            return tensors.get_tensor(name)

    def read(self, blocks: Iterable[Slice]) -> dict[str, Tensor]:
        """The rows that these blocks name, each in host memory. Raises CheckpointError if a file is not readable."""
        wanted = list(blocks)
        found = {block.name: torch.empty(block.tensor.shape, dtype=block.tensor.dtype) for block in wanted}
        by_file = dict[Path, list[tuple[Slice, int, int]]]()
        for block in wanted:
            for file, first, rows in self._held[block.name]:
                by_file.setdefault(file, []).append((block, first, rows))
        for file, parts in by_file.items():
            try:
                with safe_open(file, framework="pt") as tensors:
                    for block, first, rows in parts:
                        at = block.offset[0]
                        begin, end = max(at, first), min(at + len(block.tensor), first + rows)
                        if begin < end:
                            piece = tensors.get_slice(block.name)[begin - first : end - first]
                            found[block.name][begin - at : end - at] = piece
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file}: not readable ({error})") from None
        return found
