"""Receiver of changes: a filter over any transport, which makes whole slices of what it brings.

    full    slices -> the engine, and into copies if changes follow and the engine's own tensors are not given
    delta   rows of the base -> their change -> the engine

The base is what the engine serves, if that gives its tensors (`served`), else the copies of what was received last. One that
is not the update's base is noticed before anything is received or written. Copies are changed in place. They have no version
from the first row to the last, so that one that breaks off is followed by a full version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import Event

import torch
from torch import Tensor

from tidemill.core.errors import BaseMissing, PolicyMismatch
from tidemill.core.types import Version
from tidemill.core.weight_update import WeightUpdate
from tidemill.models.weight_slices import LiveReceiver, Receiver, Slice
from tidemill.weight_sync.delta_coding import NotPacked, unpack
from tidemill.weight_sync.manifest import PackedSlice


class DeltaReceiver:
    """`weight_slices.Receiver` of whole slices, whatever the transport brings."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver, self.takes = receiver, receiver.takes
        self.served: Callable[[], tuple[Version, Mapping[str, Tensor]] | None] | None = None  # see `ReadsBase`
        self._version: Version | None = None  # of the copies; None: they are no version
        self._copies = dict[str, Tensor]()  # whole, by name

    def receive(self, update: WeightUpdate) -> Iterator[Slice]:
        """See `Receiver`."""
        return self._whole(update, lambda: self._receiver.receive(update), {})

    def _whole(
        self, update: WeightUpdate, receive: Callable[[], Iterable[Slice]], into: Mapping[str, Tensor]
    ) -> Iterator[Slice]:
        base = self._base(update) if update.kind == "delta" else {}
        copies = self.served is None and (update.followed or update.kind == "delta")
        self._version = None
        if not copies:
            self._copies.clear()
        for piece in receive():
            if isinstance(piece, PackedSlice):
                yield from _changed(piece, base, into, in_place=copies)
            else:
                if copies:
                    self._copy(piece)
                yield piece
        if copies:
            self._version = update.version

    def _base(self, update: WeightUpdate) -> Mapping[str, Tensor]:
        """The tensors of the update's base, by name. Raises BaseMissing."""
        held = self.served() if self.served is not None else self._version and (self._version, self._copies)
        if held is None or held[0] != update.base:
            found = "no base" if held is None else held[0].exact
            raise BaseMissing(f"{update.version} applies to {update.base and update.base.exact}, held here is {found}")
        return held[1]

    def _copy(self, piece: Slice) -> None:
        whole = self._copies.get(piece.name)
        if whole is None or (tuple(whole.shape), whole.dtype) != (piece.shape, piece.tensor.dtype):
            whole = self._copies[piece.name] = torch.empty(piece.shape, dtype=piece.tensor.dtype)
        whole[tuple(slice(at, at + n) for at, n in zip(piece.offset, piece.tensor.shape, strict=True))] = piece.tensor

    def close(self) -> None:
        self._copies.clear()
        self._version = None
        self._receiver.close()


class LiveDeltaReceiver(DeltaReceiver):
    """`weight_slices.LiveReceiver` of whole slices."""

    def __init__(self, receiver: LiveReceiver) -> None:
        super().__init__(receiver)
        self._live = receiver

    def receive_into(self, update: WeightUpdate, into: Mapping[str, Tensor], stop: Event) -> Iterator[Slice]:
        """See `LiveReceiver`."""
        return self._whole(update, lambda: self._live.receive_into(update, into, stop), into)


def _changed(piece: PackedSlice, base: Mapping[str, Tensor], into: Mapping[str, Tensor], in_place: bool) -> Iterator[Slice]:
    """A slice of the base with its change, in runs of rows. in_place: the base itself is changed."""
    block, place = (_region(each.get(piece.name), piece) for each in (base, into))
    if block is None:
        raise PolicyMismatch(f"{piece.name}: a change came, and the base has no such tensor of {piece.dtype} {piece.shape}")
    try:
        for rows, change in unpack(piece.tensor, piece.size, piece.dtype):
            old = block[rows] if piece.size else block
            new = old if in_place else None if place is None else place[rows] if piece.size else place
            if new is None or not new.is_contiguous():
                new = torch.empty(old.shape, dtype=old.dtype, device=old.device)
            if new is not old:
                new.copy_(old)
            change.apply(new)
            if in_place and new is not old:
                old.copy_(new)
            at = (piece.offset[0] + rows.start, *piece.offset[1:]) if piece.size else ()
            yield Slice(piece.name, piece.shape, at, new, piece.total)
    except NotPacked as error:
        raise PolicyMismatch(f"{piece.name}: what came is not its change: {error}") from None
    if not block.numel():
        yield Slice(piece.name, piece.shape, piece.offset, block, piece.total)


def _region(whole: Tensor | None, piece: PackedSlice) -> Tensor | None:
    """The block of a slice in a tensor, None unless that has the shape and the dtype."""
    if whole is None or (tuple(whole.shape), whole.dtype) != (piece.shape, piece.dtype):
        return None
    return whole[tuple(slice(at, at + n) for at, n in zip(piece.offset, piece.size, strict=True))]
