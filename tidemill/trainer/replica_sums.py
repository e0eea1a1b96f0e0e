"""Sums of gradients over replicas of the weights, in buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BUCKET = 8 << 20  # elements that are added up together: small ones would each wait for the slowest rank


def add_up(gradients: Sequence[Tensor], group: ProcessGroup) -> None:
    """Replace each tensor by its sum over the group's ranks, to the same bits on all of them."""
    import torch.distributed as dist

    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        for gradient, total in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype and device each, in order, of at least BUCKET elements but for the last."""
    bucket = list[Tensor]()
    for gradient in gradients:
        bucket.append(gradient)
        if sum(each.numel() for each in bucket) >= BUCKET:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
