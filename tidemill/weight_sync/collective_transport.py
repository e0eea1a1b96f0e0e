"""Collective transport: each rank of the trainer broadcasts the slices that it holds to all engines, in buckets.

    header | manifest | bytes of all blocks, one after another, in `BUCKET`s    (a broadcast each)

Nothing is gathered. A tensor that fills a bucket is broadcast from its own memory. A receiver copies from buckets: what a
broadcast that was broken off still writes is no part of any weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

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
from tidemill.weight_sync.manifest import Block, WeightManifest
from tidemill.weight_sync.process_groups import Link, Watch

BUCKET = 8 << 20  # bytes: a broadcast of fewer spends its time on latency


class CollectiveSender(LiveEnd):
    """The trainer's side, for one rank."""

    transport = "collective"

    def _send_all(self, link: Link, manifest: WeightManifest, tensors: Iterable[Tensor], watch: Watch) -> None:
        encoded = manifest.encode()
        link.broadcast(header_of(manifest, encoded), watch)
        link.broadcast(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), watch)
        bucket, filled = torch.empty(min(BUCKET, _size(manifest)), dtype=torch.uint8), 0
        for tensor in tensors:
            left = flat(tensor)
            while len(left):
                if not filled and len(left) >= BUCKET:
                    link.broadcast(left[:BUCKET], watch)
                    left = left[BUCKET:]
                    continue
                taken = min(BUCKET - filled, len(left))
                bucket[filled : filled + taken] = left[:taken]
                filled, left = filled + taken, left[taken:]
                if filled == BUCKET:
                    link.broadcast(bucket, watch)
                    filled = 0
        if filled:
            link.broadcast(bucket[:filled], watch)


class CollectiveReceiver(LiveReceivingEnd):
    """An engine's side."""

    transport = "collective"

    def _manifest(self, link: Link, watch: Watch, partial: bool) -> WeightManifest:
        header = empty_header()
        link.broadcast(header, watch)
        encoded = room_for(header)
        link.broadcast(encoded, watch)
        return manifest_of(header, encoded, partial)

    def _receive_all(
        self, link: Link, manifest: WeightManifest, into: Mapping[str, Tensor], watch: Watch
    ) -> Iterator[tuple[Block, Tensor]]:
        size = _size(manifest)
        bucket, rest = torch.empty(min(BUCKET, size), dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
        for block in manifest.blocks:
            tensor = target(block, into)
            left = flat(tensor)
            while len(left):
                if not len(rest):
                    rest = bucket[: min(BUCKET, size)]
                    link.broadcast(rest, watch)
                    size -= len(rest)
                taken = min(len(rest), len(left))
                left[:taken] = rest[:taken]
                rest, left = rest[taken:], left[taken:]
            yield block, tensor


def _size(manifest: WeightManifest) -> int:
    return sum(block.length for block in manifest.blocks)
