"""Shards of parameters: the rows that this process holds of a tensor that FSDP2 cut along its first dimension.

A parameter that is not sharded is its own only shard. `DTensor` is not imported here, because its import takes half a
second that a trainer of one rank does not need.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tidemill.models.weight_slices import Slice


def local(tensor: Tensor) -> Tensor:
    """The rows of a tensor that this process holds; they share its memory."""
    sharded: Any = tensor
    return sharded.to_local() if is_sharded(tensor) else tensor


def first_row(tensor: Tensor) -> int:
    """The index in the whole tensor of the first row that this process holds."""
    if not is_sharded(tensor):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = tensor
    _, offset = compute_local_shape_and_global_offset(tensor.shape, sharded.device_mesh, sharded.placements)
    return offset[0]


def block_of(name: str, parameter: Tensor, tensor: Tensor | None = None) -> Slice:
    """The rows of a parameter that this process holds, as a block of that name; `tensor`: of the same rows, instead."""
    offset = (first_row(parameter), *(0,) * (parameter.ndim - 1))
    return Slice(name, tuple(parameter.shape), offset, local(parameter.detach()) if tensor is None else tensor)


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor. All processes that hold a part of it must ask."""
    sharded: Any = tensor
    return sharded.full_tensor() if is_sharded(tensor) else tensor
