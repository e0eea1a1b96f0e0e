"""Direct transport: each slice goes from the rank that holds it to the processes that need it, and is received in place.

    receiver -> its needs, once in a group      sender -> header | manifest | the pieces of the plan, in its order

This is LlamaRL's distributed direct access to weights (2505.24034), point to point over gloo. What a receiver does not need
is not sent to it. A piece that fills contiguous memory of the engine is received there. Once a receive has failed, nothing
writes there any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from tidemill.core.errors import PolicyMismatch
from tidemill.core.weight_update import UpdateSupport
from tidemill.weight_sync.live_ends import (
    LiveEnd,
    LiveReceivingEnd,
    empty_header,
    flat,
    header_of,
    manifest_of,
    room_for,
    target,
)
from tidemill.weight_sync.manifest import MAX_BYTES, Block, WeightManifest
from tidemill.weight_sync.process_groups import Link, Watch
from tidemill.weight_sync.transfer_plan import Needs, Piece, pieces_for, within

MESSAGE = 32 << 20  # most bytes at once: between two messages a transfer can be ended
_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
_Region = tuple[tuple[_Number, ...], tuple[_Number, ...]]


class DirectSender(LiveEnd):
    """The trainer's side, for one rank."""

    transport = "direct"

    def __init__(self, partial: bool = False) -> None:
        super().__init__(partial)
        self._needs: tuple[Link, list[Needs | None]] | None = None  # of each receiver of a group

    def _send_all(self, link: Link, manifest: WeightManifest, tensors: Iterable[Tensor], watch: Watch) -> None:
        if self._needs is None or self._needs[0] is not link:
            self._needs = link, [_received_needs(link, rank, watch) for rank in range(1, link.size)]
        encoded = manifest.encode()
        for rank in range(1, link.size):
            link.send(header_of(manifest, encoded), rank, watch)
            link.send(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), rank, watch)
        plans = [iter(pieces_for(manifest.blocks, needs)) for needs in self._needs[1]]
        following = [next(plan, None) for plan in plans]
        for number, (block, tensor) in enumerate(zip(manifest.blocks, tensors, strict=True)):
            for i, plan in enumerate(plans):
                while (piece := following[i]) is not None and piece.block == number:
                    wanted = tensor if block.packed is not None else tensor[within(piece, block)].contiguous()
                    for part in _messages(wanted):
                        link.send(part, i + 1, watch)
                    following[i] = next(plan, None)


class DirectReceiver(LiveReceivingEnd):
    """An engine process's side."""

    transport = "direct"

    def __init__(self, needs: Needs | None = None) -> None:
        """needs: the regions of tensors that this process takes, such as a tensor-parallel rank's; None: everything."""
        super().__init__()
        self._needs, self._told = needs, list[Link]()
        if needs is not None:  # a change is that of a whole block, of which parts are held here
            self.takes = UpdateSupport(several_parts=True)

    def _manifest(self, link: Link, watch: Watch, partial: bool) -> WeightManifest:
        if not any(each is link for each in self._told):
            raw = msgspec.json.encode(self._needs)
            link.send(torch.tensor([len(raw)]), 0, watch)
            link.send(torch.frombuffer(bytearray(raw), dtype=torch.uint8), 0, watch)
            self._told = [*(each for each in self._told if not each.broken), link]
        header = empty_header()
        link.receive(header, 0, watch)
        encoded = room_for(header)
        link.receive(encoded, 0, watch)
        return manifest_of(header, encoded, partial)

    def _receive_all(
        self, link: Link, manifest: WeightManifest, into: Mapping[str, Tensor], watch: Watch
    ) -> Iterator[tuple[Block, Tensor]]:
        plan = pieces_for(manifest.blocks, self._needs)
        if self._needs is None:  # empty blocks do not travel, and are blocks all the same
            sent = {piece.block for piece in plan}
            for number, block in enumerate(manifest.blocks):
                if number not in sent:
                    yield block, target(block, into)
        for piece in plan:
            block = _block_of(piece, manifest.blocks[piece.block])
            tensor = target(block, into)
            for part in _messages(tensor):
                link.receive(part, 0, watch)
            yield block, tensor


def _messages(tensor: Tensor) -> tuple[Tensor, ...]:
    return flat(tensor).split(MESSAGE) if tensor.numel() else ()


def _block_of(piece: Piece, block: Block) -> Block:
    return msgspec.structs.replace(block, offset=piece.offset, size=piece.size)


def _received_needs(link: Link, rank: int, watch: Watch) -> Needs | None:
    length = torch.empty(1, dtype=torch.int64)
    link.receive(length, rank, watch)
    if not 0 < int(length) <= MAX_BYTES:
        raise link.abort(f"receiver {rank} announced needs of {int(length)} bytes; at most {MAX_BYTES} are read")
    raw = torch.empty(int(length), dtype=torch.uint8)
    link.receive(raw, rank, watch)
    try:
        return msgspec.json.decode(raw.numpy().tobytes(), type=dict[str, list[_Region]] | None)
    except msgspec.MsgspecError as error:
        raise PolicyMismatch(f"receiver {rank} does not say what it needs: {error}") from None
