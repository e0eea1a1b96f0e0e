"""Ranks of a trainer: processes that share its weights, or its rows, and add up their gradients.

    none    every rank holds all weights                  gradients are added up before the optimizer's step
    zero2   a rank holds its rows of weights, gradients   weights are gathered for a call, gradients reduced after its last
            and moments                                   micro-batch
    zero3   the same                                      a layer is gathered for each pass, and reduced after it
    hsdp    `replicas` groups of ranks, each as zero3     the groups' gradients are added up before the optimizer's step

PyTorch's `fully_shard` (FSDP2, 2304.11277) moves weights and gradients within a group. Gradients are sums, never averages
(I6). All ranks take part in the same collective operations in the same order: a rank with fewer micro-batches than the
others runs idle passes, whose gradient is zero.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from tidemill.core import fault_injection
from tidemill.models.quantised_base import bases
from tidemill.models.weight_slices import Slice
from tidemill.trainer.replica_sums import ReplicaSums

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
COLLECTIVE_S = 3600.0  # limit of a collective operation; a rank that dies ends it at once


class Ranks:
    """The only rank of a trainer: it waits for nobody."""

    rank, size, replica, replicas = 0, 1, 0, 1
    keeps_copies = True  # prepared copies of matrices may be kept from one pass to the next
    gathers = True  # gradients of matrices may be added up in their `.grad`, unseen by autograd

    def shard(self, *modules: nn.Module) -> None:
        """Keep only this rank's part of the modules' weights."""

    def rounds(self, parts: Sequence[T], idle: T, modules: Sequence[nn.Module], gradient: bool) -> Iterator[Sequence[T]]:
        """The micro-batches of this rank, `idle` ones among them, in the portions to run one after another.

        modules: that take part. gradient: whether each micro-batch runs backward, too.
        """
        yield parts

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of one micro-batch's loss to the weights' gradients."""
        loss.backward()

    def replica_sums(self, parameters: Mapping[str, nn.Parameter], kind: str) -> ReplicaSums:
        """Sums of these parameters' gradients over replicas, which complete them before each update."""
        return ReplicaSums(parameters)

    def own(self, blocks: Iterable[Slice]) -> Iterable[Slice]:
        """The blocks as this rank writes them for all, empty ones where others do: together, every element once."""
        return blocks

    def sums(self, numbers: Sequence[int]) -> list[int]:
        """The sums of all ranks' numbers, modulo 2^64."""
        return list(numbers)

    def close(self) -> None: ...


class ShardedRanks(Ranks):
    """One of several ranks."""

    _passes = 0  # backward passes begun

    def __init__(self, rank: int, size: int, shard: str, replicas: int, device: torch.device, meeting: str) -> None:
        """Meet the other ranks, at a file that all can open ("" for a rank that is alone). Blocks until all have come."""
        import torch.distributed as dist
        from torch._C._distributed_c10d import FileStore, HashStore
        from torch.distributed.device_mesh import init_device_mesh

        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        limit = datetime.timedelta(seconds=COLLECTIVE_S)
        if not dist.is_initialized():
            store = FileStore(meeting, size) if meeting else HashStore()
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        self.rank, self.size = rank, size
        self.replicas = {"none": size, "hsdp": replicas}.get(shard, 1)
        self.replica = rank // (size // self.replicas)
        self._at_once = self.keeps_copies = shard not in ("zero3", "hsdp")
        shape = (self.replicas, size // self.replicas)
        self._mesh: DeviceMesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicas", "shards"))

    def shard(self, *modules: nn.Module) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = self._mesh["shards"]
        for module in modules if self.size > self.replicas else ():
            for layer in getattr(module, "layers", ()):
                fully_shard(layer, mesh=mesh, reshard_after_forward=not self._at_once)
            # The head is read after the last layer, so the rest of the weights stays gathered until the backward pass.
            fully_shard(module, mesh=mesh, reshard_after_forward=False)
            for part in _sharded([module]):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)  # without it the factor above has no effect over gloo
            for number, base in enumerate(bases(module)):  # which all ranks hold whole
                base.owned = number % mesh.size() == mesh.get_local_rank()

    def rounds(self, parts: Sequence[T], idle: T, modules: Sequence[nn.Module], gradient: bool) -> Iterator[Sequence[T]]:
        sharded = _sharded(modules)
        if not sharded:  # nobody waits for another rank
            yield parts
            return
        if not (most := self._most(len(parts))):
            return
        mine = [*parts, *[idle] * ((1 if self._at_once else most) - len(parts))]
        try:
            if self._at_once:
                for part in sharded:
                    part.unshard()
                    part.set_reshard_after_backward(False)
                    part.set_requires_gradient_sync(False)
                yield mine[:-1]
                for part in sharded:
                    part.set_requires_gradient_sync(gradient)
                yield mine[-1:]
            else:
                yield mine
        finally:
            for part in sharded:
                part.reshard()

    def backward(self, loss: Tensor) -> None:
        self._passes += 1
        fault_injection.reach(f"trainer-{self.rank}" if self.rank else "trainer", "reduce", self._passes)
        loss.backward()

    def replica_sums(self, parameters: Mapping[str, nn.Parameter], kind: str) -> ReplicaSums:
        return ReplicaSums(parameters, kind, self._mesh["replicas"].get_group(), self.replica, self.replicas)

    def own(self, blocks: Iterable[Slice]) -> Iterator[Slice]:
        for number, block in enumerate(blocks):
            mine = number % self.replicas == self.replica
            yield block if mine else replace(block, tensor=block.tensor[:0])

    def sums(self, numbers: Sequence[int]) -> list[int]:
        import torch.distributed as dist

        wrapped = torch.tensor([n - 2**64 if n >= 2**63 else n for n in numbers], dtype=torch.int64)
        dist.all_reduce(wrapped)
        return [n % 2**64 for n in wrapped.tolist()]

    def _most(self, count: int) -> int:
        import torch.distributed as dist

        found = torch.tensor(count)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found)

    def close(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def _sharded(modules: Sequence[nn.Module]) -> list[Any]:
    """The modules whose weights `fully_shard` moves, each once."""
    from torch.distributed.fsdp import FSDPModule

    return list(dict.fromkeys(each for module in modules for each in module.modules() if isinstance(each, FSDPModule)))
