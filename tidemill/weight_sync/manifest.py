"""Manifest of a weights version: name, place and dtype of every block, checked by the receiver.

    sender: blocks while streaming -> WeightManifest -> encode      receiver: decode -> check -> check of each block

A manifest from elsewhere is untrusted data: decoding is strict and bounded, and `check` refuses one whose blocks do not tile
their tensors exactly. The fingerprint in `version` verifies the bytes and their positions: the trainer takes it from its own
parameters, the engine from what it would serve, so it covers every copy on the way. When the two differ, `total` tells which
tensor is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from tidemill.core.errors import PolicyMismatch
from tidemill.core.types import Version
from tidemill.core.weight_update import AddedTo, UpdateKind, UpdateSupport, WeightPart, WeightUpdate
from tidemill.models.weight_slices import Coverage, Slice

FORMAT = "tidemill-weights-1"
MAX_BYTES = 64 << 20  # per encoded manifest; a 400-layer model cut into 16 needs about 10 MB
MAX_CUTS = 1024  # blocks per tensor
MAX_ELEMENTS = 1 << 56  # per tensor

DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
_Dims = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=16)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Outline = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], str]

# The updates that a transport of this package carries.
CARRIES = UpdateSupport(("full", "delta", "adapter"), several_parts=True)


@dataclass(frozen=True, slots=True)
class PackedSlice(Slice):
    """The change of a slice since the base of its update, in place of it: see `delta_coding`."""

    size: tuple[int, ...] = ()  # of the slice; `tensor` holds the packed bytes
    dtype: torch.dtype = torch.uint8  # of the slice


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One slice as it lies in its transport."""

    name: _Name
    shape: _Dims  # of the whole tensor
    offset: _Dims  # where the block begins in the tensor
    size: _Dims  # of the block
    dtype: str
    total: int | None  # fingerprint of the whole tensor, computed by its owner
    part: _Count = 0  # number of the transport's file that holds it
    start: _Count = 0  # its first byte there; unused by safetensors files, which have an index of their own
    packed: _Count | None = None  # bytes that travel in place of the block, if only its change does

    @classmethod
    def of(cls, item: Slice, part: int = 0, start: int = 0) -> Block:
        """The block that describes a slice. Raises ValueError when its dtype cannot be sent."""
        size, of, packed = tuple(item.tensor.shape), item.tensor.dtype, None
        if isinstance(item, PackedSlice):
            size, of, packed = item.size, item.dtype, item.tensor.numel()
        dtype = str(of).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ValueError(f"{item.name}: weights of dtype {dtype} cannot be sent; known: {', '.join(DTYPES)}")
        return cls(item.name, item.shape, item.offset, size, dtype, item.total, part, start, packed)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def unpacked(self) -> int:
        """The size of the block in bytes."""
        return prod(self.size) * self.torch_dtype.itemsize

    @property
    def length(self) -> int:
        """The bytes that travel."""
        return self.unpacked if self.packed is None else self.packed

    @property
    def form(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the tensor that travels."""
        return (self.size, self.torch_dtype) if self.packed is None else ((self.packed,), torch.uint8)

    @property
    def key(self) -> str:
        """Unique name: the tensor's Hugging Face name, with the offset if this is only a part of it."""
        return self.name if self.size == self.shape else f"{self.name}@{','.join(map(str, self.offset))}"

    @property
    def outline(self) -> Outline:
        """The fields of this block that are equal in every version of a policy."""
        return self.name, self.shape, self.offset, self.size, self.dtype

    @property
    def place(self) -> tuple[Outline, int, int, int | None]:
        """All fields by which it is sent (all but `total`)."""
        return self.outline, self.part, self.start, self.packed

    def slice(self, tensor: Tensor) -> Slice:
        """Wrap `tensor` as the slice of this block. Raises PolicyMismatch when shape or dtype differ."""
        if (tuple(tensor.shape), tensor.dtype) != self.form:
            size, expected = self.form
            dtype, found = (str(each).removeprefix("torch.") for each in (expected, tensor.dtype))
            raise PolicyMismatch(f"{self.key}: the manifest says {dtype} {size}, found {found} {tuple(tensor.shape)}")
        if self.packed is None:
            return Slice(self.name, self.shape, self.offset, tensor, self.total)
        return PackedSlice(self.name, self.shape, self.offset, tensor, self.total, self.size, self.torch_dtype)


class WeightManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The version and the blocks of one transfer of weights."""

    version: Version  # with the fingerprint that the blocks together must have
    blocks: list[Block]
    onto: AddedTo | None = None  # what the blocks are added to, unless they are all weights
    format: str = FORMAT

    @property
    def kind(self) -> UpdateKind:
        """The kind of update that it is of."""
        return "full" if self.onto is None else self.onto.kind

    @property
    def base(self) -> Version | None:
        """The version that the blocks are added to."""
        return self.onto and self.onto.base

    def encode(self) -> bytes:
        """The manifest as JSON. Raises ValueError when it is longer than MAX_BYTES."""
        raw = msgspec.json.encode(self)
        if len(raw) > MAX_BYTES:
            raise ValueError(f"manifest of {len(raw)} bytes: at most {MAX_BYTES} travel; send fewer, larger slices")
        return raw

    @classmethod
    def decode(cls, raw: bytes, partial: bool = False) -> WeightManifest:
        """Decode and check a manifest. Raises PolicyMismatch when `raw` is not a sound one."""
        if len(raw) > MAX_BYTES:
            raise PolicyMismatch(f"manifest of {len(raw)} bytes: at most {MAX_BYTES} are read")
        try:
            manifest = _decoder.decode(raw)
            manifest.check(partial)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise PolicyMismatch(f"not a manifest of weights: {error}") from None
        return manifest

    def check(self, partial: bool = False) -> None:
        """Raise ValueError unless every tensor is tiled by its blocks, without overlap and, unless partial, without gap."""
        if self.format != FORMAT:
            raise ValueError(f"format {self.format[:40]!r}: expected {FORMAT!r}")
        _check_layout(self.outlines(), partial)
        for block in self.blocks:
            if block.packed is not None and (self.kind != "delta" or block.packed >= max(1, block.unpacked)):
                raise ValueError(f"{block.key}: a change of {block.packed} bytes, for a block of {block.unpacked}")

    def outlines(self) -> tuple[Outline, ...]:
        """The outlines of all blocks: equal in every version of a policy."""
        return tuple(block.outline for block in self.blocks)

    def layout(self) -> tuple[Any, ...]:
        """The places of all blocks: equal in every full version of a policy."""
        return tuple(block.place for block in self.blocks)

    @property
    def sizes(self) -> tuple[int, int]:
        """(bytes that travel, bytes of all blocks)."""
        return sum(block.length for block in self.blocks), sum(block.unpacked for block in self.blocks)

    def update(self, part: WeightPart) -> WeightUpdate:
        """The handle of this version, of which a transport wrote one part."""
        return WeightUpdate(self.version, (part,), self.kind, self.base)


def expect_parts(update: WeightUpdate, transport: str, takes: UpdateSupport) -> None:
    """Raise ValueError or PolicyMismatch unless this transport takes the update and wrote all of its parts."""
    takes.check(update, f"the transport {transport!r}")
    if other := next((part.transport for part in update.parts if part.transport != transport), None):
        raise PolicyMismatch(f"{update.version} was sent by the transport {other!r}, which {transport!r} cannot read")


def expect_whole(manifests: Sequence[WeightManifest], update: WeightUpdate) -> None:
    """Raise PolicyMismatch unless these manifests, one a part, are of this version and together tile every tensor."""
    announced = update.version
    for manifest, part in zip(manifests, update.parts, strict=True):
        if manifest.version != announced or not announced.fingerprint:
            raise PolicyMismatch(f"{part.location} holds {manifest.version.exact}, announced was {announced.exact}")
        if (manifest.kind, manifest.base) != (update.kind, update.base):
            given, expected = (
                repr(each.kind) + (f" on {each.base.exact}" if each.base else "") for each in (manifest, update)
            )
            raise PolicyMismatch(f"{part.location} holds an update of kind {given}, announced was {expected}")
    if len(manifests) > 1:  # one alone was checked when it was decoded
        try:
            _check_layout(tuple(outline for manifest in manifests for outline in manifest.outlines()), partial=False)
        except ValueError as error:
            raise PolicyMismatch(f"the {len(manifests)} parts of {announced} are not all weights once: {error}") from None


@lru_cache(maxsize=16)  # all versions of a policy have the same layouts, one for each part
def _check_layout(layout: tuple[Outline, ...], partial: bool) -> None:
    if not layout:
        raise ValueError("no weights in it")
    most = max(Counter(name for name, *_ in layout).values())
    if most > MAX_CUTS:
        raise ValueError(f"a tensor is cut into {most} blocks; at most {MAX_CUTS} are allowed")
    coverage = Coverage()
    for name, shape, offset, size, dtype in layout:
        if dtype not in DTYPES:
            raise ValueError(f"{name}: unknown dtype {dtype[:40]!r}")
        if max(prod(size), prod(shape)) > MAX_ELEMENTS:
            raise ValueError(f"{name}: more than {MAX_ELEMENTS} elements")
        coverage.add_block(name, shape, offset, size, DTYPES[dtype])
    if not partial:
        coverage.complete()


_decoder = msgspec.json.Decoder(WeightManifest)
