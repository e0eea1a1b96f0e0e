"""The weights that this rank computes with, read back as blocks of the tensors of a Hugging Face folder.

A fused parameter is cut up by the sizes that its layer computes with, and each block gets its offset in the whole tensor,
so that the sums of all ranks add up to the fingerprint. On CPUs a linear layer packs its weight and drops the parameter.
It is read through the layer's own product: a row of the identity times the weight is a row of the weight, exactly, because
all other terms are zero. Only the sign of a zero is lost in such a sum, and comes from what was loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from tidemill.models.fingerprint import Fingerprint
from tidemill.models.weight_slices import Slice

ROWS = 1024  # of the identity at a time


@dataclass(frozen=True, slots=True)
class ServedBlock:
    """A block of a tensor, with its sum."""

    piece: Slice
    total: int

    def report(self) -> dict[str, Any]:
        piece = self.piece
        return {
            "name": piece.name,
            "dtype": str(piece.tensor.dtype).removeprefix("torch."),
            "shape": list(piece.shape),
            "offset": list(piece.offset),
            "size": list(piece.tensor.shape),
            "sum": str(self.total),
        }


def negative_zeros(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Masks of the elements that are -0.0, of the tensors that hold any."""
    masks = ((name, (tensor == 0) & tensor.signbit()) for name, tensor in tensors.items())
    return {name: mask for name, mask in masks if bool(mask.any())}


def repack_tied(model: nn.Module) -> None:
    """Let a head that is the embedding pack it anew: a reload does that only for the layers that got weights by name."""
    seen = set[int]()
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding):
            if id(layer.weight) in seen and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)
            seen.add(id(layer.weight))


@torch.no_grad()
def served_blocks(model: nn.Module, zeros: Mapping[str, Tensor]) -> list[ServedBlock]:
    """The sums of everything that this rank computes with."""
    found = list[ServedBlock]()
    for piece in _pieces(model, zeros):
        one = Fingerprint()
        one.add(piece)
        found.append(ServedBlock(piece, one.partial()[piece.name][0]))
    return found


def _pieces(model: nn.Module, zeros: Mapping[str, Tensor]) -> Iterator[Slice]:
    fused = {name: parts for name, parts in getattr(model, "packed_modules_mapping", {}).items() if len(parts) > 1}
    tables = dict[int, str]()  # a head that is the embedding has its name
    for path, layer in model.named_modules():
        parent, _, own = path.rpartition(".")
        prefix = f"{parent}." if parent else ""
        for leaf, parameter in layer.named_parameters(recurse=False):
            names = [f"{prefix}{part}.{leaf}" for part in fused.get(own, (own,))]
            if isinstance(layer, VocabParallelEmbedding) and leaf == "weight":
                yield from _of_vocabulary(layer, tables.setdefault(id(parameter), names[0]), parameter, zeros)
            elif isinstance(layer, LinearBase):
                packed = leaf == "weight" and not parameter.numel()
                matrix = _by_product(layer, layer.input_size_per_partition) if packed else parameter
                yield from _of_linear(layer, names, matrix.to(layer.params_dtype), zeros, signed=not packed)
            else:
                yield Slice.whole(f"{path}.{leaf}" if path else leaf, parameter)


def _of_linear(
    layer: LinearBase, names: list[str], matrix: Tensor, zeros: Mapping[str, Tensor], signed: bool
) -> Iterator[Slice]:
    """The blocks of a linear layer's weight or bias, one for each tensor that is fused in it."""
    if isinstance(layer, RowParallelLinear):
        shape, offset = (matrix.shape[0],), (0,)
        if matrix.ndim == 2:
            shape, offset = (*shape, layer.input_size), (0, layer.tp_rank * layer.input_size_per_partition)
        yield _block(names[0], shape, offset, matrix, zeros, signed)
        return
    sizes = list(layer.output_partition_sizes) if isinstance(layer, ColumnParallelLinear) else [matrix.shape[0]]
    for name, (rows, first), part in zip(names, _rows(layer, sizes), matrix.split(sizes, 0), strict=True):
        rest = tuple(part.shape[1:])
        yield _block(name, (rows, *rest), (first, *(0 for _ in rest)), part, zeros, signed)


def _rows(layer: LinearBase, sizes: list[int]) -> list[tuple[int, int]]:
    """(rows of the whole tensor, first row here) of each tensor that is fused in a layer."""
    if isinstance(layer, QKVParallelLinear):
        heads = (layer.total_num_heads, layer.head_size), (layer.total_num_kv_heads, layer.head_size)
        whole = [count * size for count, size in (*heads, (layer.total_num_kv_heads, layer.v_head_size))]
        own = [layer.tp_rank] + [layer.tp_rank // layer.num_kv_head_replicas] * 2
        return [(rows, rank * size) for rows, rank, size in zip(whole, own, sizes, strict=True)]
    if isinstance(layer, ColumnParallelLinear):
        return [(size * layer.tp_size, size * layer.tp_rank) for size in sizes]
    return [(size, 0) for size in sizes]


def _of_vocabulary(layer: VocabParallelEmbedding, name: str, weight: Tensor, zeros: Mapping[str, Tensor]) -> Iterator[Slice]:
    """The rows that a table is looked up in and, where its product has a copy of its own, those that it multiplies by."""
    held = layer.shard_indices
    count, width = held.num_org_elements, weight.shape[1]
    shape, offset = (layer.org_vocab_size, width), (held.org_vocab_start_index, 0)
    yield _block(name, shape, offset, weight[:count], zeros, signed=True)
    if hasattr(layer, "cpu_linear"):
        yield _block(name, shape, offset, _by_product(layer, width)[:count], zeros, signed=False)


def _by_product(layer: Any, inputs: int) -> Tensor:
    """The weight [outputs, inputs] that a layer's product computes with."""
    dtype = layer.weight.dtype
    columns = []
    for first in range(0, inputs, ROWS):
        rows = torch.zeros(min(ROWS, inputs - first), inputs, dtype=dtype, device=layer.weight.device)
        rows[torch.arange(len(rows)), torch.arange(first, first + len(rows))] = 1
        columns.append(layer.quant_method.apply(layer, rows).T)
    return torch.cat(columns, 1).contiguous()


def _block(
    name: str, shape: tuple[int, ...], offset: tuple[int, ...], block: Tensor, zeros: Mapping[str, Tensor], signed: bool
) -> Slice:
    if not signed and name in zeros:
        place = tuple(slice(at, at + size) for at, size in zip(offset, block.shape, strict=True))
        block = torch.where(zeros[name][place] & (block == 0), -torch.zeros_like(block), block)
    return Slice(name, shape, offset, block)
