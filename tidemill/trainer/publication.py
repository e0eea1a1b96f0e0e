"""Publications of a trainer's weights: what is sent, how it is sent, and what was announced.

    whole weights    blocks of the decoder, an adapter merged into them -> cast to the served dtype
    an adapter       its A and B in float32, and its configuration; the update names the base that they are added to

The fingerprint comes from the trainer's own parameters, the bytes from a stream of slices, which `checked` compares.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from tidemill.core import fault_injection
from tidemill.core.errors import PolicyMismatch, WeightsMoved
from tidemill.core.types import Metrics, Version
from tidemill.core.weight_update import AddedTo, WeightUpdate
from tidemill.models.adapter_config import AdapterConfig
from tidemill.models.adapter_update import base_version, config_block
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import held_blocks, serving_slices
from tidemill.models.lora import adapter_blocks, gathered_factors, merged_slices, trained_blocks
from tidemill.models.served_weights import Contents, checked, words_of
from tidemill.models.weight_slices import KeepsSent, LiveSender, Sender, Slice
from tidemill.trainer.announced import Announced, why_unchanged
from tidemill.trainer.ranks import Ranks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Payload:
    """The weights of one version, as one rank sends them."""

    own: Contents  # of all ranks' blocks
    masters: dict[str, int]  # sums of the float32 weights that they were made from
    blocks: list[Slice]  # this rank's, not cast, without empty ones; their forms are read
    stream: Callable[[], Iterator[Slice]]  # the same as they travel
    onto: AddedTo | None = None  # of an adapter
    beside: int = 0  # bytes of this rank's blocks of that base


def own_blocks(decoder: Decoder, ranks: Ranks) -> Callable[[], Iterable[Slice]]:
    """The blocks that this rank sends, as it holds them now. Each call makes what is held in few bits, one after another."""
    blocks = held_blocks(decoder)
    return lambda: ranks.own(make() for make in blocks)


@dataclass(frozen=True, slots=True)
class TrainedAdapter:
    """An adapter's configuration, and the frozen weights that it is trained on."""

    config: AdapterConfig
    base: str  # fingerprint of the frozen weights as they are held
    served: Version  # their name in the served dtype
    bytes: int  # of this rank's part of them in that dtype
    critic: str = ""  # fingerprint of a critic's frozen weights, if it has an adapter of its own

    @property
    def bases(self) -> dict[str, str]:
        """The fingerprints that a checkpoint names, because it goes on with these frozen weights only."""
        return {"base": self.base} | ({"critic_base": self.critic} if self.critic else {})

    @classmethod
    def of(
        cls, config: AdapterConfig, decoder: Decoder, ranks: Ranks, dtype: str, critic: Decoder | None = None
    ) -> TrainedAdapter:
        """Sum up the frozen weights; all ranks must do so at the same time.

        dtype: that is served. critic: its decoder, if that has an adapter of its own.
        """
        held, served, blocks = decoder.embed.weight.dtype, DTYPES[dtype], own_blocks(decoder, ranks)
        found = [
            Contents.of_blocks(decoder, blocks(), each, ranks.sums).fingerprint for each in dict.fromkeys((held, served))
        ]
        size = sum(block.tensor.numel() for block in blocks()) * served.itemsize
        beside = critic and Contents.of_blocks(critic, own_blocks(critic, ranks)(), held, ranks.sums).fingerprint
        return cls(config, found[0], base_version(found[-1]), size, beside or "")


class Publication:
    """Publishes one policy's weights through a transport."""

    def __init__(
        self,
        sender: Sender | LiveSender,
        decoder: Decoder,
        ranks: Ranks,
        dtype: str,
        process: str,
        adapter: TrainedAdapter | None = None,
    ) -> None:
        """dtype: that is served. process: named by injected faults. adapter: it travels alone; None: whole weights do."""
        self._decoder, self._sender, self._ranks = decoder, sender, ranks
        self._dtype, self._process, self._adapter = dtype, process, adapter
        self._announced: Announced | None = None  # the latest publication; None before the first, and after `forget`

    def publish(self, version: Version, updates: int, applied: Metrics) -> WeightUpdate:
        """Send or offer the weights as they are now.

        updates: done so far. applied: metrics of the latest one. Raises PolicyMismatch, and nothing becomes visible, for
        other names or shapes than this model's.
        """
        payload, before = self._whole() if self._adapter is None else self._alone(self._adapter), self._announced
        version = replace(version, fingerprint=payload.own.fingerprint)
        announced = Announced(version, payload.own, payload.masters, updates)
        published = self._sent(version, payload)
        if published.version != version:
            raise PolicyMismatch(
                f"the transport announces {published.version} ({published.version.fingerprint}), not {version}"
            )
        self._announced = announced
        parts = tuple(replace(part, whole=part.whole + payload.beside) for part in published.parts)
        return replace(published, parts=parts, note=why_unchanged(before, announced, applied, self._dtype))

    def publish_again(self, version: Version) -> WeightUpdate:
        """Send or offer the latest version once more, in full. Raises WeightsMoved without a copy of it."""
        if not isinstance(self._sender, KeepsSent):
            raise WeightsMoved(f"{version.exact} cannot be published once more: this trainer keeps no copy of it")
        return self._sender.send_whole(version)

    def expect_sendable(self, update: WeightUpdate, updates: int) -> None:
        """Raise WeightsMoved unless this update was published last, and the weights are still those."""
        now, copied = self._announced, isinstance(self._sender, KeepsSent)  # it sends copies, whatever the weights are now
        if now is None or now.version != update.version or (now.updates != updates and not copied):
            raise WeightsMoved(f"{update.version.exact} cannot be sent any more: the trainer has other weights by now")

    def send_offered(self, update: WeightUpdate, stop: threading.Event) -> None:
        """Send the live update that was published last. Blocking; raises TransferFailed."""
        assert isinstance(self._sender, LiveSender)
        self._sender.send_offered(update, stop)

    @property
    def live(self) -> bool:
        """True if updates are sent while engines receive."""
        return isinstance(self._sender, LiveSender)

    def forget(self) -> None:
        """Forget what was announced: other weights were loaded."""
        self._announced = None

    def close(self) -> None:
        self._sender.close()

    def _whole(self) -> _Payload:
        dtype, decoder, ranks = DTYPES[self._dtype], self._decoder, self._ranks
        factors = gathered_factors(decoder)  # added to a matrix twice, here and as it is sent: no second copy of all
        blocks = own_blocks(decoder, ranks)  # now: a live update is sent while a pass may have gathered the parameters
        own = Contents.of_blocks(decoder, merged_slices(blocks(), factors), dtype, ranks.sums)
        masters = own.words if dtype == torch.float32 else words_of(trained_blocks(decoder), ranks.sums)
        held = (block for block in blocks() if block.tensor.numel())
        sent = [replace(block, tensor=block.tensor.to("meta")) for block in held]

        def stream() -> Iterator[Slice]:
            return serving_slices(decoder, dtype, merged_slices(blocks(), factors))

        return _Payload(own, masters, sent, stream)

    def _alone(self, adapter: TrainedAdapter) -> _Payload:
        decoder = self._decoder
        blocks = [*self._ranks.own(adapter_blocks(decoder)), config_block(adapter.config, whole=self._ranks.rank == 0)]
        own = Contents.of_adapter(decoder, blocks, self._ranks.sums)
        sent = [block for block in blocks if block.tensor.numel()]
        return _Payload(own, own.words, sent, lambda: iter(sent), AddedTo(adapter.served, "adapter"), adapter.bytes)

    def _sent(self, version: Version, payload: _Payload) -> WeightUpdate:
        def stream() -> Iterator[Slice]:
            return checked(self._reaching(version, payload.stream()), payload.own, payload.blocks)

        if not isinstance(self._sender, LiveSender):
            return self._sender.send(version, stream(), payload.onto)
        outlines, totals = payload.own.outlines, payload.own.totals
        forms = (replace(b, tensor=b.tensor.to("meta", outlines[b.name][1]), total=totals[b.name]) for b in payload.blocks)
        return self._sender.offer(version, forms, stream, payload.onto)

    def _reaching(self, version: Version, slices: Iterator[Slice]) -> Iterator[Slice]:
        """The slices, with a place for an injected fault after the first one."""
        for count, piece in enumerate(slices):
            yield piece
            if count == 0:
                fault_injection.reach(self._process, "stream", version.step)
