"""Named slices of tensors, and the interfaces of transports that carry them.

A sharded trainer never has to gather: it sends the slices it holds. A fingerprint is a sum over elements, each mixed
with its index in the whole tensor, so slices of any cut add up to the same number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from threading import Event
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from tidemill.core.errors import PolicyMismatch
from tidemill.core.types import Version
from tidemill.core.weight_update import AddedTo, UpdateSupport, WeightUpdate


@dataclass(frozen=True, slots=True)
class Slice:
    """A block of a tensor, by its Hugging Face name. A whole tensor is a block with zero offsets."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]  # where this block begins, one number per dimension
    tensor: Tensor  # the block, in the dtype that is served
    total: int | None = None  # the whole tensor's sum according to its owner, to name a tensor that differs

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Slice:
        return cls(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)


class Sender(Protocol):
    """The trainer's side of a transport."""

    def send(self, version: Version, slices: Iterable[Slice], onto: AddedTo | None = None) -> WeightUpdate:
        """Write the slices where receivers can stage them. Blocking.

        onto: what they are added to; None: they are all weights.

        `version` carries the fingerprint that receivers check the weights against; it is not computed from the slices. A
        tensor stays unchanged, and shares no memory with another one, until this returns.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class LiveSender(Protocol):
    """The trainer's side of a transport that sends while engines receive."""

    def offer(self, version: Version, forms: Iterable[Slice], stream: Stream, onto: AddedTo | None = None) -> WeightUpdate:
        """Announce a version. Raises ValueError when slices do not fill their tensors, or cannot be sent.

        onto: see `Sender.send`.

        forms: the slices without data, on the device "meta". stream: makes them with data, in the same order; it is called
        for each `send_offered`. Their tensors stay unchanged until the next offer, except between two sends.
        """
        ...

    def send_offered(self, update: WeightUpdate, stop: Event) -> None:
        """Send what was offered to the receivers of the update's rendezvous. Blocking, until `stop` is set at most.

        Raises TransferFailed when not all of them received everything.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class KeepsSent(Protocol):
    """A sender of changes, which holds copies of what it sent last."""

    def send_whole(self, version: Version) -> WeightUpdate:
        """Send or offer that version once more, as a full update. Raises WeightsMoved if another one was sent since."""
        ...


Stream = Callable[[], Iterable[Slice]]


class Receiver(Protocol):
    """An engine's side of a transport."""

    takes: UpdateSupport

    def receive(self, update: WeightUpdate) -> Iterable[Slice]:
        """The slices of an update, of all its parts, checked against their manifests, in any order. Blocking.

        The manifest holds names, shapes and dtypes. Tensors may be views of memory that is valid until the next call:
        copy them. Raises PolicyMismatch, and ValueError for an update that this transport does not take.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class LiveReceiver(Receiver, Protocol):
    """An engine's side of a transport whose trainer sends meanwhile. It computes nothing, and may run in any thread."""

    def receive_into(self, update: WeightUpdate, into: Mapping[str, Tensor], stop: Event) -> Iterable[Slice]:
        """`receive`, which is this without tensors to fill. Raises TransferFailed, also once `stop` is set.

        into: tensors by name, contiguous and on the CPU, that are filled in place as far as they fit; slices of those are
        views of them. An iteration that is left early breaks the transfer off for all.
        """
        ...


@runtime_checkable
class ReadsBase(Protocol):
    """A receiver of changes. `served`, if it is set, gives the version that the engine serves and its tensors, by name.

    They are on any device, and None is given when there are none. Without it the receiver keeps copies of its own.
    """

    served: Callable[[], tuple[Version, Mapping[str, Tensor]] | None] | None


_Block = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins, its shape


@dataclass(slots=True)
class _Tensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: list[_Block] = field(default_factory=list)
    elements: int = 0


class Coverage:
    """Record of the elements of tensors that were seen; each must be seen exactly once."""

    def __init__(self) -> None:
        self.tensors: dict[str, _Tensor] = {}

    def add(self, piece: Slice) -> None:
        """Record a slice. Raises ValueError if it lies outside its tensor, or contradicts or repeats another."""
        self.add_block(piece.name, piece.shape, piece.offset, tuple(piece.tensor.shape), piece.tensor.dtype)

    def add_block(
        self, name: str, shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """`add` for a slice that is described by its name, shapes and dtype."""
        if (seen := self.tensors.get(name)) is None:
            seen = self.tensors[name] = _Tensor(shape, dtype)
        if (seen.shape, seen.dtype) != (shape, dtype):
            given, first = f"{_text(shape)} {dtype}", f"{_text(seen.shape)} {seen.dtype}"
            raise ValueError(f"{name}: a slice says {given}, an earlier one said {first}")
        if not len(shape) == len(offset) == len(size):
            raise ValueError(f"{name}: shape, offset and block of a slice differ in their number of dimensions")
        parts = size != shape or any(offset)
        if parts and any(o < 0 or o + n > whole for o, n, whole in zip(offset, size, shape, strict=True)):
            raise ValueError(f"{name}: a block of {_text(size)} at {offset} lies outside {_text(shape)}")
        if not (elements := math.prod(size)):
            return
        for at, other in seen.blocks:
            if all(a < c + d and c < a + b for a, b, c, d in zip(offset, size, at, other, strict=True)):
                raise ValueError(f"{name}: elements at {offset} were given twice")
        if seen.blocks and (joined := _joined(*seen.blocks[-1], offset, size)):
            seen.blocks[-1] = joined
        else:
            seen.blocks.append((offset, size))
        seen.elements += elements

    def complete(self) -> None:
        """Raise ValueError if a tensor that was begun lacks elements."""
        for name, seen in self.tensors.items():
            if (total := math.prod(seen.shape)) != seen.elements:
                raise ValueError(f"{name}: {seen.elements} of its {total} elements were given")


def whole_tensors(pieces: Iterable[Slice]) -> dict[str, Tensor]:
    """Copies of the tensors that these slices fill. Raises PolicyMismatch for a gap, or for elements that come twice."""
    coverage, found = Coverage(), dict[str, Tensor]()
    try:
        for piece in pieces:
            coverage.add(piece)
            if piece.name not in found:
                found[piece.name] = torch.empty(piece.shape, dtype=piece.tensor.dtype, device=piece.tensor.device)
            place = tuple(slice(at, at + size) for at, size in zip(piece.offset, piece.tensor.shape, strict=True))
            found[piece.name][place] = piece.tensor
        coverage.complete()
    except ValueError as error:
        raise PolicyMismatch(f"the weights that came are not whole: {error}") from None
    return found


def _joined(at: tuple[int, ...], size: tuple[int, ...], then: tuple[int, ...], more: tuple[int, ...]) -> _Block | None:
    """Two blocks as one, if the second one's rows follow the first one's; else None."""
    if not at or (then, more[1:]) != ((at[0] + size[0], *at[1:]), size[1:]):
        return None
    return at, (size[0] + more[0], *size[1:])


def _text(shape: Iterable[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"
