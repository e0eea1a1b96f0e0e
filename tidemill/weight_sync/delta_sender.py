"""Sender of changes: a filter over any transport, which sends what changed since the version before.

    full    slices -> kept copies -> the transport              the first version, every N-th, and `send_whole`
    delta   slices -> changes against the kept copies -> the transport, with the base that they apply to

The copies are in host memory, in the dtype that is served: what this rank sent last. A version that fails half-way leaves
none, so a full one follows. Each slice is coded alone, so ranks gather nothing, and one whose change would not be smaller
travels whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from threading import Event

import torch
from torch import Tensor

from tidemill.core.errors import WeightsMoved
from tidemill.core.types import Version
from tidemill.core.weight_update import AddedTo, WeightUpdate
from tidemill.models.weight_slices import LiveSender, Sender, Slice, Stream
from tidemill.weight_sync.delta_coding import pack
from tidemill.weight_sync.manifest import PackedSlice

Put = Callable[[Iterable[Slice], AddedTo | None], WeightUpdate]  # slices, and what their changes apply to


class _Kept:
    """Copies of the slices that were sent last, and their version, unless sending failed."""

    def __init__(self, full_every: int) -> None:
        self._full_every, self._since = full_every, 0  # versions since the last full one
        self._version: Version | None = None
        self._slices = dict[tuple[str, tuple[int, ...]], Slice]()

    def send(self, version: Version, slices: Iterable[Slice], put: Put) -> WeightUpdate:
        base, self._version = self._version, None
        full = base is None or base.policy != version.policy or self._since + 1 >= self._full_every
        taken = self._taken(slices) if full else self._changes(slices)
        update = put(taken, AddedTo(base, "delta") if base is not None and not full else None)
        self._version, self._since = update.version, 0 if full else self._since + 1
        return replace(update, followed=True)

    def latest(self, version: Version) -> tuple[Version, Iterable[Slice]]:
        """The version sent last, with its fingerprint. Raises WeightsMoved if it is another one."""
        if self._version is None or self._version.key != version.key:
            raise WeightsMoved(f"{version} cannot be sent once more: what was sent last is {self._version or 'not known'}")
        return self._version, self._slices.values()

    def _taken(self, slices: Iterable[Slice]) -> Iterator[Slice]:
        before, self._slices = self._slices, {}
        for piece in slices:
            yield self._keep(piece, before.get((piece.name, piece.offset)))

    def _changes(self, slices: Iterable[Slice]) -> Iterator[Slice]:
        before, self._slices = self._slices, {}
        for piece in slices:
            old, size, dtype = before.get((piece.name, piece.offset)), tuple(piece.tensor.shape), piece.tensor.dtype
            if old is None or not _alike(old, piece):
                yield self._keep(piece, None)
                continue
            piece = replace(piece, tensor=_on_host(piece.tensor))
            packed = pack(old.tensor, piece.tensor)
            kept = self._keep(piece, old)
            if packed is None:
                yield kept
                continue
            data = torch.frombuffer(bytearray(packed), dtype=torch.uint8) if packed else torch.empty(0, dtype=torch.uint8)
            yield PackedSlice(piece.name, piece.shape, piece.offset, data, piece.total, size, dtype)

    def _keep(self, piece: Slice, old: Slice | None) -> Slice:
        """Copy a slice, to where the one before it was. Returns the copy."""
        if old is not None and _alike(old, piece):
            old.tensor.copy_(piece.tensor.detach())
            tensor = old.tensor
        else:
            tensor = piece.tensor.detach().to("cpu", copy=True).contiguous()
        kept = self._slices[piece.name, piece.offset] = replace(piece, tensor=tensor)
        return kept


class DeltaSender:
    """`weight_slices.Sender` that sends changes through another one."""

    def __init__(self, sender: Sender, full_every: int) -> None:
        """full_every: versions from one full version to the next."""
        self._sender, self._kept = sender, _Kept(full_every)

    def send(self, version: Version, slices: Iterable[Slice], onto: AddedTo | None = None) -> WeightUpdate:
        """See `Sender`. Raises ValueError for what is a change already, or an adapter."""
        _expect_whole(version, onto)
        return self._kept.send(version, slices, lambda taken, onto: self._sender.send(version, taken, onto))

    def send_whole(self, version: Version) -> WeightUpdate:
        """See `weight_slices.KeepsSent`."""
        return replace(self._sender.send(*self._kept.latest(version)), followed=True)

    def close(self) -> None:
        self._sender.close()


class LiveDeltaSender:
    """`weight_slices.LiveSender` that sends changes through another one. They are coded when a version is offered."""

    def __init__(self, sender: LiveSender, full_every: int) -> None:
        """full_every: versions from one full version to the next."""
        self._sender, self._kept = sender, _Kept(full_every)

    def offer(self, version: Version, forms: Iterable[Slice], stream: Stream, onto: AddedTo | None = None) -> WeightUpdate:
        """See `LiveSender`. Raises ValueError as `DeltaSender.send` does."""
        _expect_whole(version, onto)
        return self._kept.send(version, stream(), lambda taken, onto: self._offer(version, taken, onto))

    def send_whole(self, version: Version) -> WeightUpdate:
        """See `weight_slices.KeepsSent`. It is offered, for `send_offered` to send."""
        return replace(self._offer(*self._kept.latest(version), None), followed=True)

    def _offer(self, version: Version, slices: Iterable[Slice], onto: AddedTo | None) -> WeightUpdate:
        held = list(slices)
        return self._sender.offer(version, (replace(s, tensor=s.tensor.to("meta")) for s in held), lambda: held, onto)

    def send_offered(self, update: WeightUpdate, stop: Event) -> None:
        """See `LiveSender`."""
        self._sender.send_offered(update, stop)

    def close(self) -> None:
        self._sender.close()


def _expect_whole(version: Version, onto: AddedTo | None) -> None:
    if onto is not None:
        raise ValueError(f"{version} is added to {onto.base}: only changes of whole weights are coded; send it as it is")


def _alike(old: Slice, new: Slice) -> bool:
    return (old.shape, old.tensor.shape, old.tensor.dtype) == (new.shape, new.tensor.shape, new.tensor.dtype)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()
