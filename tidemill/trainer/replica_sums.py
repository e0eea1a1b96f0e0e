"""Sums of gradients over replicas of the weights, in float32, or in fewer bits with error feedback.

    float32          one all-reduce
    bfloat16, int8   every replica encodes its gradient and sends each replica one part of it (all-to-all). Each adds up its
                     part in float32, encodes the sum and sends it to all (all-gather)

Each error of encoding is known to one replica, which adds it to its own gradient before the next sum (Seide et al. 2014;
Karimireddy et al. 2019, 1901.09847). Where others add up, it is the error of its gradient. Where it adds up itself, its
gradient is not encoded, and it is the error of the sum. So one tensor holds both, and the errors of all replicas together
are what no update has had yet. They are kept times the scale of their update, because the next one may have another.
An all-reduce in bfloat16 would round what it adds up, too, and nobody would know these errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tidemill.models.local_shards import block_of, local
from tidemill.models.weight_slices import Slice
from tidemill.trainer.narrow_blocks import BLOCK, decoded, encoded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BUCKET = 8 << 20  # elements that are added up together: small ones would each wait for the slowest rank
FEEDBACK = "feedback."  # prefix of errors in a checkpoint


class ReplicaSums:
    """Adds up one replica's gradients with those of the others, and keeps its errors."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        kind: str = "float32",
        group: ProcessGroup | None = None,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        """parameters: by the names that their errors have in a checkpoint. group: of the replicas; None for one alone."""
        self._parameters, self._kind, self._group = dict(parameters), kind, group
        self._replica, self._replicas = replica, replicas
        self._narrow = replicas > 1 and kind != "float32"
        self._errors = dict[str, Tensor]()  # by name; empty if nothing is owed and nothing will be
        self.restore([])

    @torch.no_grad()
    def add_up(self, scale: float) -> int:
        """Replace each gradient by its sum over replicas, to the same bits on all; returns the bytes that this one sent.

        scale: by which the update multiplies its gradient. If it is 0, the update uses none, and what is owed stays owed.
        """
        if self._replicas == 1 and not self._errors:
            return 0
        gradients = {name: _gradient(parameter) for name, parameter in self._parameters.items()}
        for name, error in self._errors.items() if scale else ():
            gradients[name].add_(error, alpha=1 / scale)
        if scale and not self._narrow:
            self._errors.clear()
        if self._replicas == 1:
            return 0
        add_up = self._encoded_sum if self._narrow else self._plain_sum
        return sum(add_up(bucket, scale) for bucket in _buckets(gradients))

    def _plain_sum(self, bucket: dict[str, Tensor], scale: float) -> int:
        import torch.distributed as dist

        flat = torch.cat([gradient.reshape(-1) for gradient in bucket.values()])
        dist.all_reduce(flat, group=self._group)
        for gradient, total in zip(bucket.values(), flat.split([each.numel() for each in bucket.values()]), strict=True):
            gradient.copy_(total.view_as(gradient))
        return 2 * (self._replicas - 1) * flat.nbytes // self._replicas  # each element is sent by all but one, twice

    def _encoded_sum(self, bucket: dict[str, Tensor], scale: float) -> int:
        import torch.distributed as dist

        own = torch.cat([_blocks(gradient) for gradient in bucket.values()])
        own = F.pad(own, (0, 0, 0, -len(own) % self._replicas))
        own = own.view(self._replicas, len(own) // self._replicas, BLOCK)
        kind, dtype, others = self._kind, own.dtype, self._replicas - 1
        sent = encoded(own, kind)  # [replicas, blocks, bytes]
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        parts = decoded(received, kind, dtype)
        parts[self._replica] = own[self._replica]
        total = parts.sum(0)
        mine = encoded(total, kind)
        dist.all_gather(list(received), mine, group=self._group)
        errors = own.sub_(decoded(sent, kind, dtype))
        errors[self._replica] = total - decoded(mine, kind, dtype)
        _unpack(decoded(received, kind, dtype), bucket)
        if scale:
            _unpack(errors.mul_(scale).nan_to_num_(0.0, 0.0, 0.0), {name: self._errors[name] for name in bucket})
        return others * (sent[0].nbytes + mine.nbytes)

    def state(self) -> list[Slice]:
        """This replica's errors as blocks for a checkpoint."""
        return [self._block(self._replica, name, error) for name, error in self._errors.items()]

    def saved(self, names: Iterable[str]) -> list[list[Slice]]:
        """The blocks that must be among tensors of these names if any errors are, by replica."""
        replicas = len({name.split(".")[1] for name in names if name.startswith(FEEDBACK)})
        return [[self._block(n, *each) for each in self._parameters.items()] for n in range(replicas)]

    def owed(self, saved: list[list[Slice]], read: Callable[[list[Slice]], dict[str, Tensor]]) -> list[Tensor]:
        """This replica's errors, read from `saved`, in the order of the parameters; empty if there are none.

        As many replicas as before go on with their own errors. Of another number, or if sums are not encoded any more, the
        first one has the errors of all.
        """
        same, sums = self._narrow and len(saved) == self._replicas, list[Tensor]()
        for blocks in saved[self._replica :][:1] if same else saved if self._replica == 0 else []:
            found = read(blocks)
            tensors = [found[block.name] for block in blocks]
            sums = [total.add_(each) for total, each in zip(sums, tensors, strict=True)] if sums else tensors
        return sums

    @torch.no_grad()
    def restore(self, owed: list[Tensor]) -> None:
        self._errors = {}
        if owed or self._narrow:
            self._errors = {name: torch.zeros_like(local(p.detach())) for name, p in self._parameters.items()}
        for error, given in zip(self._errors.values(), owed, strict=bool(owed)):
            error.copy_(given)

    def _block(self, replica: int, name: str, tensor: Tensor) -> Slice:
        return block_of(f"{FEEDBACK}{replica}.{name}", self._parameters[name], local(tensor.detach()))


def _gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's rows of a gradient; zeros where there was none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)


def _blocks(tensor: Tensor) -> Tensor:
    """A tensor's numbers in blocks of its own, the last one filled with zeros."""
    flat = tensor.reshape(-1)
    return F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def _unpack(blocks: Tensor, into: Mapping[str, Tensor]) -> None:
    """Copy numbers out of the blocks of several tensors in a row."""
    flat, at = blocks.view(-1), 0
    for tensor in into.values():
        tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
        at += tensor.numel() + -tensor.numel() % BLOCK


def _buckets(gradients: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Tensors in order, of at least BUCKET elements together but for the last ones."""
    bucket = dict[str, Tensor]()
    for name, gradient in gradients.items():
        bucket[name] = gradient
        if sum(each.numel() for each in bucket.values()) >= BUCKET:
            yield bucket
            bucket = {}
    if bucket:
        yield bucket
