"""Both ends of a live transport, but for the way in which the bytes go: rendezvous, manifest, deadline, and break-off.

    sender      offer: manifest of the slices to come        send_offered: link -> manifest, slices -> receivers
    receiver    a link to each sender -> their manifests, which must tile every tensor -> slices

A link stays open for the next version as long as the rendezvous names the same group. Each sender has a group of its own
with all receivers, so no rank of a trainer waits for another one.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from threading import Event

import msgspec
import torch
from torch import Tensor

from tidemill.core.errors import PolicyMismatch
from tidemill.core.types import Version
from tidemill.core.weight_update import AddedTo, Rendezvous, WeightPart, WeightUpdate
from tidemill.models.weight_slices import Slice, Stream
from tidemill.weight_sync.manifest import CARRIES, MAX_BYTES, Block, WeightManifest, expect_parts, expect_whole
from tidemill.weight_sync.process_groups import Link, Lobby, Watch, connected, store_at


class LiveEnd(ABC):
    """A sender: see `weight_slices.LiveSender`."""

    transport: str

    def __init__(self, partial: bool = False) -> None:
        """partial: it sends one part of each version, and only all parts together fill the tensors."""
        self._partial = partial
        self._lobby: Lobby | None = None
        self._offered: tuple[WeightManifest, Stream] | None = None
        self._link: tuple[str, Link] | None = None  # of the latest group, by its name

    def offer(self, version: Version, forms: Iterable[Slice], stream: Stream, onto: AddedTo | None = None) -> WeightUpdate:
        """See `LiveSender`."""
        blocks, end = list[Block](), 0
        for form in forms:
            blocks.append(Block.of(form, start=end))
            end += blocks[-1].length
        manifest = WeightManifest(version, blocks, onto)
        manifest.check(self._partial)
        self._lobby = self._lobby or Lobby()
        self._offered = manifest, stream
        return manifest.update(WeightPart(self.transport, self._lobby.location, *manifest.sizes, live=True))

    def send_offered(self, update: WeightUpdate, stop: Event) -> None:
        """See `LiveSender`."""
        assert self._offered is not None and self._lobby is not None and update.rendezvous is not None
        manifest, stream = self._offered
        watch = Watch.over(update.rendezvous, stop)
        link = self._linked(self._lobby, update.rendezvous, watch)
        try:
            self._send_all(link, manifest, _matching(manifest, stream()), watch)
        except BaseException as error:
            link.abort(str(error))
            raise

    def _linked(self, lobby: Lobby, rendezvous: Rendezvous, watch: Watch) -> Link:
        if self._link is not None and self._link[0] == rendezvous.group:
            return self._link[1]
        self._let_go("another group follows")
        link = connected(lobby.store, lobby.location, rendezvous, 0, watch)
        self._link = rendezvous.group, link
        return link

    @abstractmethod
    def _send_all(self, link: Link, manifest: WeightManifest, tensors: Iterable[Tensor], watch: Watch) -> None:
        """Send the manifest and these contiguous tensors, one for each of its blocks."""

    def _let_go(self, why: str) -> None:
        if self._link is not None:
            self._link[1].abort(why)
            self._link = None

    def close(self) -> None:
        self._let_go("the sender was closed")
        self._offered = self._lobby = None


class LiveReceivingEnd(ABC):
    """A receiver: see `weight_slices.LiveReceiver`."""

    transport: str
    takes = CARRIES

    def __init__(self) -> None:
        self._group = ""
        self._links: dict[str, Link] = {}  # by location

    def receive(self, update: WeightUpdate) -> Iterator[Slice]:
        """See `Receiver`."""
        return self.receive_into(update, {}, Event())

    def receive_into(self, update: WeightUpdate, into: Mapping[str, Tensor], stop: Event) -> Iterator[Slice]:
        """See `LiveReceiver`."""
        expect_parts(update, self.transport, self.takes)
        if update.rendezvous is None:
            raise PolicyMismatch(f"{update.version} is sent while engines receive, and no rendezvous for it was given")
        watch = Watch.over(update.rendezvous, stop)
        if update.rendezvous.group != self._group:
            self._let_go("another group follows")
            self._group = update.rendezvous.group
        try:
            links = [self._linked(part.location, update.rendezvous, watch) for part in update.parts]
            manifests = [self._manifest(link, watch, len(links) > 1) for link in links]
            expect_whole(manifests, update)
            for link, manifest in zip(links, manifests, strict=True):
                for block, tensor in self._receive_all(link, manifest, into, watch):
                    yield block.slice(tensor)
        except BaseException as error:  # an iteration that is left early, too: the others wait for this one
            self._let_go(str(error) or "the receiver gave up")
            raise

    def _linked(self, location: str, rendezvous: Rendezvous, watch: Watch) -> Link:
        if (link := self._links.get(location)) is None:
            link = connected(store_at(location, watch), location, rendezvous, rendezvous.first, watch)
            self._links[location] = link
        return link

    @abstractmethod
    def _manifest(self, link: Link, watch: Watch, partial: bool) -> WeightManifest:
        """Receive a sender's manifest."""

    @abstractmethod
    def _receive_all(
        self, link: Link, manifest: WeightManifest, into: Mapping[str, Tensor], watch: Watch
    ) -> Iterator[tuple[Block, Tensor]]:
        """Receive a sender's blocks, or those of their parts that this process needs."""

    def _let_go(self, why: str) -> None:
        for link in self._links.values():
            link.abort(why)
        self._links.clear()
        self._group = ""

    def close(self) -> None:
        self._let_go("the receiver was closed")


def target(block: Block, into: Mapping[str, Tensor]) -> Tensor:
    """The contiguous memory for a block: its place in the tensor to fill, where it fits, or a tensor of its own."""
    (size, dtype), whole = block.form, into.get(block.name)
    if block.packed is None and whole is not None and tuple(whole.shape) == block.shape and whole.dtype == dtype:
        place = whole[tuple(slice(at, at + n) for at, n in zip(block.offset, block.size, strict=True))]
        if place.is_contiguous():
            return place
    return torch.empty(size, dtype=dtype)


def flat(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as a view."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def header_of(manifest: WeightManifest, encoded: bytes) -> Tensor:
    """Three numbers that go before a manifest: its length, and a digest of the layout by which its sender sends."""
    return torch.tensor([len(encoded), *_digest(manifest)])


def empty_header() -> Tensor:
    return torch.zeros(3, dtype=torch.int64)


def room_for(header: Tensor) -> Tensor:
    """Memory for the manifest that a header announces. Raises PolicyMismatch for one that cannot be."""
    length = int(header[0])
    if not 0 < length <= MAX_BYTES:
        raise PolicyMismatch(f"a manifest of {length} bytes was announced; at most {MAX_BYTES} are read")
    return torch.empty(length, dtype=torch.uint8)


def manifest_of(header: Tensor, encoded: Tensor, partial: bool) -> WeightManifest:
    """The manifest that was received. Raises PolicyMismatch if its sender sends by another layout.

    Gloo ends a process that is to receive another number of bytes than are sent, so this is found out before.
    """
    manifest = WeightManifest.decode(encoded.numpy().tobytes(), partial)
    if header[1:].tolist() != _digest(manifest):
        raise PolicyMismatch(f"{manifest.version}: the manifest is not the one by which its sender sends")
    return manifest


def _digest(manifest: WeightManifest) -> list[int]:
    found = hashlib.blake2b(msgspec.json.encode(manifest.layout()), digest_size=16).digest()
    return [int.from_bytes(half, "little", signed=True) for half in (found[:8], found[8:])]


def _matching(manifest: WeightManifest, stream: Iterable[Slice]) -> Iterator[Tensor]:
    """The tensors of a stream on the CPU. Raises PolicyMismatch unless they are the manifest's blocks, in its order."""
    left = iter(manifest.blocks)
    for piece in stream:
        if (block := next(left, None)) is None or (piece.name, piece.offset) != (block.name, block.offset):
            wanted = "nothing more" if block is None else block.key
            raise PolicyMismatch(
                f"{manifest.version}: the weights that were about to be sent are not those that were offered: {piece.name} "
                f"came, expected was {wanted}"
            )
        block.slice(piece.tensor)
        yield piece.tensor.detach().cpu().contiguous()
    if (block := next(left, None)) is not None:
        raise PolicyMismatch(f"{manifest.version}: the weights that were about to be sent are not all: {block.key} left out")
