"""The weights an engine serves, and the staging of the next ones beside them.

    receive -> copy into the spare decoder -> fingerprint the staged weights -> compare     (the commit is the engine's)
    after the commit: verify the weights that are served now
    live weights: a thread receives, into the spare decoder as far as it can, and what follows is the same
    adapters: received whole and verified, added to the base in the spare decoder: see `adapted_base`

Several policies side by side are staged otherwise: see `adapter_staging`.

All of it is done in pieces, between which steps are taken: see `weight_updates.in_turns`. An engine that sleeps may have
given both decoders back. Then a stage allocates one, and it is served without a spare beside it.
The fingerprint is taken of the staged decoder, not of the received data, so it covers the copy as well. Two decoders take
turns, so staging allocates nothing and generation continues meanwhile. A commit that changed only the label, or the decoder
without its head or without the weights of decoding steps, is found before its version is confirmed: the sums of the bytes in
use are compared with those of the verified bytes.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.core.errors import PolicyMismatch
from tidemill.core.types import Version
from tidemill.core.weight_update import UpdateKind, UpdateSupport, WeightUpdate
from tidemill.models.adapted_base import AdaptedBase, expect_base
from tidemill.models.adapter_update import ReceivedAdapter, received_adapter
from tidemill.models.decoder import Decoder, decoding_weights
from tidemill.models.grouped_adapters import SideAdapters
from tidemill.models.hf_weights import empty_decoder, hf_views, loading
from tidemill.models.kernels.cpu.decode_pass import DecodingWeights
from tidemill.models.kernels.cuda.transfers import Uploads
from tidemill.models.piecewise import Work, at_once, by_rows
from tidemill.models.served_linear import wide_product, widens
from tidemill.models.served_weights import Contents, words_by_matrix, words_in_use
from tidemill.models.weight_slices import LiveReceiver, ReadsBase, Receiver, Slice


@dataclass(slots=True)
class Weights:
    """Weights that are served, in the forms that steps use."""

    decoder: Decoder
    head: Tensor  # [V, D]: the decoder's own, or a float32 copy if no product takes it as it is
    version: Version
    decoding: DecodingWeights | None  # layers for compiled decoding steps, if there are any
    adapters: SideAdapters | None = None  # of several policies, which the decoder's matrices add

    @property
    def held(self) -> bool:
        """False if only their version is known: see `forgotten`."""
        return not self.head.is_meta

    def forgotten(self) -> Weights:
        """Placeholder for weights that were given back: the same version, with nothing to compute with."""
        shape = empty_decoder(self.decoder.arch, self.decoder.embed.weight.dtype, "meta")
        return Weights(shape, shape.head_weight.detach(), self.version, None)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] float32 of hidden [n, D], accumulated in float32."""
        product = self.decoder.packed_head.product(hidden, len(self.head), wide=True)
        product = wide_product(hidden, self.head) if product is None else product
        return F.linear(hidden.float(), self.head.float()) if product is None else product


def serve(decoder: Decoder, version: Version, pack: bool) -> Weights:
    """Prepare a decoder for serving. pack: use faster copies of the matrices if there are any."""
    return at_once(_serving(decoder, version, pack))


def _serving(decoder: Decoder, version: Version, pack: bool) -> Work[Weights]:
    if pack:
        yield from decoder.packing()
    weight = head = decoder.head_weight.detach()
    if decoder.packed_head.numbers is None and not widens(head) and head.dtype != torch.float32:
        head = torch.empty_like(weight, dtype=torch.float32)
        for wide, rows in by_rows(head, weight):
            wide.copy_(rows)
            yield
    return Weights(decoder, head, version, decoding_weights(decoder))


class VersionStaging(ABC):
    """An engine's receiver, and how a version that it brings is staged and verified. One stage at a time."""

    def __init__(self, receiver: Receiver, decoder: Decoder, kinds: tuple[UpdateKind, ...], name: str) -> None:
        """decoder: that is served. kinds: of updates that are taken. name: of the engine."""
        self._receiver, self._name = receiver, f"engine {name}"
        self.takes = UpdateSupport(kinds, several_parts=True).both(receiver.takes)
        self._device = decoder.embed.weight.device
        self._uploads = Uploads(self._device) if self._device.type == "cuda" else None
        self._adapter: ReceivedAdapter | None = None  # of a live update that has arrived

    @abstractmethod
    def arrive(self, update: WeightUpdate, serving: Weights, stop: threading.Event) -> None:
        """Receive a live update, in a thread. `stage` then verifies it. Raises TransferFailed, and PolicyMismatch."""

    @abstractmethod
    def stage(self, update: WeightUpdate, serving: Weights) -> Work[Weights]:
        """Receive and verify a version. Raises PolicyMismatch if it is not the announced one."""

    @abstractmethod
    def prove(self, serving: Weights, version: Version) -> Work[None]:
        """Verify weights in use. Raises PolicyMismatch unless they are the latest stage, as `version`."""

    def close(self) -> None:
        self._receiver.close()

    def _receive_adapter(self, receiver: LiveReceiver, update: WeightUpdate, stop: threading.Event) -> None:
        """Receive a live update that is an adapter."""
        self._adapter = received_adapter(receiver.receive_into(update, {}, stop), update, self._name)

    def _adapter_of(self, update: WeightUpdate, base: Contents) -> ReceivedAdapter:
        """The adapter of an update, which has arrived or is received now. Raises PolicyMismatch for one of another base."""
        adapter, self._adapter = self._adapter if update.live else None, None
        assert adapter is not None or not update.live, "a live update must arrive first"
        expect_base(update, base, self._name)
        return adapter or received_adapter(self._receiver.receive(update), update, self._name)


class Staging(VersionStaging):
    """The spare decoder, into which the next version is staged.

    The result of a stage is served until `retire` gives the old decoder back.
    """

    def __init__(
        self, receiver: Receiver, serving: Weights, pack: bool, spare: bool = True, name: str = "", adapted: bool = False
    ) -> None:
        """spare: allocate the spare decoder now; otherwise the first stage does. name: of the engine.

        adapted: versions are adapters, which are added to the weights of `serving`."""
        super().__init__(receiver, serving.decoder, ("adapter",) if adapted else ("full", "delta"), name)
        self._pack = pack
        self._adapted = AdaptedBase(serving.decoder) if adapted else None
        self._base: Weights | None = None  # what a change applies to, while it is received
        if isinstance(receiver, ReadsBase):
            receiver.served = self._served
        self._spare: Decoder | None = _spare_of(serving.decoder, pack) if spare else None
        self._arch, self._dtype = serving.decoder.arch, serving.decoder.embed.weight.dtype
        self._arrived: dict[str, int | None] | None = None  # sums by name, of a live update that is in the spare decoder
        self._proven: tuple[Version, dict[str, int]] | None = None  # version and words of the latest stage

    def _served(self) -> tuple[Version, dict[str, Tensor]] | None:
        base = self._base
        return None if base is None or not base.held else (base.version, dict(hf_views(base.decoder)))

    def arrive(self, update: WeightUpdate, serving: Weights, stop: threading.Event) -> None:
        assert isinstance(self._receiver, LiveReceiver)
        if update.kind == "adapter":
            self._receive_adapter(self._receiver, update, stop)
            return
        self._arrived, totals = None, dict[str, int | None]()
        spare = self._spare_decoder()
        into = dict(hf_views(spare)) if self._uploads is None else {}
        with beside(self._device):
            at_once(self._filling(update, self._receiver.receive_into(update, into, stop), totals, serving))
        self._arrived = totals

    def stage(self, update: WeightUpdate, serving: Weights) -> Work[Weights]:
        if not update.version.fingerprint:
            raise PolicyMismatch(f"{update.version} was published without a fingerprint, so it cannot be verified")
        with beside(self._device):
            return (yield from self._stage(update, serving))

    def _stage(self, update: WeightUpdate, serving: Weights) -> Work[Weights]:
        version, spare = update.version, self._spare_decoder()
        if update.kind == "adapter":
            held = yield from self._adding(update, spare)
            self._proven = version, words_by_matrix(spare, held.words)
            return (yield from _serving(spare, version, self._pack))
        totals, self._arrived = self._arrived if update.live else {}, None
        assert totals is not None, "a live update must arrive first"
        if not update.live:
            yield from self._filling(update, self._receiver.receive(update), totals, serving)
        held = yield from Contents.summing(spare, self._dtype)
        if held.fingerprint != version.fingerprint:
            raise PolicyMismatch(f"{version}: {_difference(held, version, totals, serving.version)}")
        yield
        self._proven = version, words_by_matrix(spare, held.words)
        return (yield from _serving(spare, version, self._pack))

    def _adding(self, update: WeightUpdate, spare: Decoder) -> Work[Contents]:
        """Fill the spare decoder with the base and an adapter; returns its contents."""
        assert self._adapted is not None
        adapter = self._adapter_of(update, self._adapted.contents)
        yield
        return (yield from self._adapted.merging(adapter, spare, self._uploads))

    def _filling(
        self, update: WeightUpdate, slices: Iterable[Slice], totals: dict[str, int | None], serving: Weights
    ) -> Work[None]:
        """Copy what is received into the spare decoder, and note the sums that its owner says."""
        self._base = serving
        try:
            yield from loading(self._spare_decoder(), _noting(slices, totals), self._uploads)
        except ValueError as error:
            raise PolicyMismatch(f"{update.version}: what was received is not this model's weights: {error}") from error
        finally:
            self._base = None

    def _spare_decoder(self) -> Decoder:
        if self._spare is None:
            self._spare = empty_decoder(self._arch, self._dtype, self._device).requires_grad_(False)
        return self._spare

    def prove(self, serving: Weights, version: Version) -> Work[None]:
        assert self._proven is not None, "nothing was staged"
        proven, words = self._proven
        expect_committed(version, proven, serving.version)
        decoding = decoding_weights(serving.decoder)
        if (decoding and decoding.places) != (serving.decoding and serving.decoding.places):
            raise PolicyMismatch(f"{version} was staged and committed, but decoding steps compute with other weights")
        with beside(self._device):
            yield from expect_words(serving, words, version)

    def retire(self, weights: Weights) -> None:
        """Take back weights that are served no more: their decoder receives the next version."""
        self._spare = weights.decoder if weights.held else None

    def forget(self) -> None:
        """Free the spare decoder. The next stage allocates another one."""
        self._spare = None


def expect_committed(version: Version, staged: Version, served: Version) -> None:
    """Raise PolicyMismatch unless the version to verify is the one that was staged, and the one that is served."""
    if not served == staged == version:
        raise PolicyMismatch(f"committed was {version}, staged {staged}, and {served} is served")


def expect_words(serving: Weights, words: dict[str, int], version: Version) -> Work[None]:
    """Raise PolicyMismatch unless the numbers that are computed with have these word sums, and the head is the decoder's."""
    found = yield from words_in_use(serving.decoder)
    same_head = yield from _same(serving.head, serving.decoder.head_weight.detach())
    if other := next((name for name in words if found.get(name) != words[name]), None):
        raise PolicyMismatch(f"{version} was staged and committed, but other weights are served: {other} differs")
    if not same_head:
        raise PolicyMismatch(f"{version} was staged and committed, but the head that is served is another one")


def _spare_of(decoder: Decoder, pack: bool) -> Decoder:
    """A decoder of the same shape, all zeros.

    Every byte is written, copies included, so that its memory is allocated now. Allocating it page by page takes several
    times as long as writing it, and would slow down the first update.
    """
    weight = decoder.embed.weight
    spare = empty_decoder(decoder.arch, weight.dtype, weight.device).requires_grad_(False)
    for parameter in spare.parameters():
        parameter.zero_()
    if pack:
        at_once(spare.packing())
    return spare


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Run CUDA work on a stream of its own, so that it does not queue with the sampling steps.

    It is complete at the end of the context, which must end in the thread in which it began.
    """
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:  # also after an error: the next stage writes to the same memory
        stream.synchronize()  # bounded: by the copies and sums above


@lru_cache(maxsize=8)
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream for all work beside the steps: memory freed on a stream is reused only there."""
    return torch.cuda.Stream(device)


def _same(head: Tensor, weight: Tensor) -> Work[bool]:
    for rows, theirs in by_rows(head, weight):
        if not torch.equal(rows, theirs.to(rows.dtype)):
            return False
        yield
    return True


def _noting(slices: Iterable[Slice], totals: dict[str, int | None]) -> Iterator[Slice]:
    for piece in slices:
        totals[piece.name] = piece.total
        yield piece


def _difference(held: Contents, announced: Version, totals: dict[str, int | None], served: Version) -> str:
    """The difference between the staged and the announced weights, in words."""
    other = next((name for name, total in totals.items() if total is not None and held.totals[name] != total), None)
    first = f"; the first tensor that differs is {other}" if other else ""
    stale = f" (these are the weights of {served})" if held.fingerprint == served.fingerprint else ""
    return (
        f"announced with fingerprint {announced.fingerprint}, received {held.fingerprint}{stale}{first}; "
        f"still serving {served}"
    )
