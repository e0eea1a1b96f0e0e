"""Low-rank adapters (LoRA, 2106.09685) on a decoder's matrices: computed beside them, merged into them, turned off.

    attach(decoder, config)            adds A and B, whose product is 0, and freezes all other weights
    y[:, rows] += scale * (x A^T) B^T  what `Linear` adds for each projection that is stacked in its matrix
    merged_slices: W + scale * B A     the same weights as one matrix, which engines and exports get
    without(decoder)                   the model without its adapter, such as a reference policy

Every A and B has a Hugging Face name, as every other tensor has; `adapter_files` maps them to PEFT's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tidemill.core.errors import UnsupportedModel
from tidemill.models.adapter_config import PROJECTIONS, AdapterConfig
from tidemill.models.adapter_dropout import dropped_product, dropped_rows
from tidemill.models.decoder import Decoder, Layer
from tidemill.models.hf_weights import hf_blocks, stacked_modules
from tidemill.models.local_shards import block_of, full
from tidemill.models.served_linear import Linear
from tidemill.models.weight_slices import Slice

A, B = "lora_A.weight", "lora_B.weight"


@dataclass(frozen=True, slots=True)
class Factor:
    """The adapter of one projection."""

    module: str  # Hugging Face name
    first: int  # its first row in the stacked matrix
    rows: int
    rank: int
    scale: float


class Adapter(nn.Module):
    """The adapters of the projections that are stacked in one matrix [N, K]."""

    def __init__(
        self, factors: Sequence[Factor], inputs: int, beside: Tensor, dropout: float = 0.0, last: bool = False
    ) -> None:
        """beside: a tensor of the dtype and on the device that the adapters are to have. dropout: share of its inputs that a
        training pass drops. last: only tokens that predict something come to it, see `Decoder.forward`."""
        super().__init__()
        self.factors, self.dropout, self.last = tuple(factors), dropout, last
        kept = {"dtype": beside.dtype, "device": beside.device}
        self.a = nn.ParameterList(nn.Parameter(torch.empty(each.rank, inputs, **kept)) for each in factors)
        self.b = nn.ParameterList(nn.Parameter(torch.zeros(each.rows, each.rank, **kept)) for each in factors)
        self.off = False

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        """out [n, N] plus what the adapters add for x [n, K]."""
        if self.off:
            return out
        low = self._low(x)
        added = [F.linear(h, b) * each.scale for each, h, b in zip(self.factors, low, self.b, strict=True)]
        if len(added) == 1 and self.factors[0].rows == out.shape[1]:
            return out + added[0]
        ends = [0, *(each.first + each.rows for each in self.factors)]
        pieces = list[Tensor]()
        for end, each, piece in zip(ends[:-1], self.factors, added, strict=True):
            if end < each.first:
                pieces.append(out.new_zeros(len(out), each.first - end))
            pieces.append(piece)
        if ends[-1] < out.shape[1]:
            pieces.append(out.new_zeros(len(out), out.shape[1] - ends[-1]))
        return out + torch.cat(pieces, dim=1)

    def _low(self, x: Tensor) -> Iterator[Tensor]:
        """x A^T of each projection, [n, rank], in a training pass of x with its own numbers dropped."""
        dropped = dropped_rows() if self.dropout else None
        for each, a in zip(self.factors, self.a, strict=True):
            if dropped is None:
                yield F.linear(x, a)
            else:
                yield dropped_product(x, a, dropped.mask(each.module, self.dropout, self.last))


def attach(decoder: Decoder, config: AdapterConfig, generator: torch.Generator | None = None) -> None:
    """Give the decoder an adapter, and freeze its other weights.

    A begins uniform in 1 / sqrt(inputs), as PEFT's (Kaiming with a = sqrt(5)), B at 0. Raises UnsupportedModel when the
    configuration names no matrix of this model, or one that is none of a layer's.
    """
    _expect_targets(decoder, config)
    end = decoder.layers[-1]
    assert isinstance(end, Layer)
    decoder.requires_grad_(False)
    for linear, projections in stacked_modules(decoder):
        factors = [
            Factor(name, first, rows, *shape) for name, first, rows in projections if (shape := config.of(name)) is not None
        ]
        if not factors:
            continue
        last = linear in (end.o, end.gate_up, end.down)
        linear.adapter = Adapter(factors, linear.in_features, decoder.embed.weight, config.dropout, last)
        bound = 1 / math.sqrt(linear.in_features)
        for a in linear.adapter.a:
            with torch.no_grad():
                a.uniform_(-bound, bound, generator=generator)


def _expect_targets(decoder: Decoder, config: AdapterConfig) -> None:
    names = [name for _, projections in stacked_modules(decoder) for name, _, _ in projections]
    known = f"{', '.join(PROJECTIONS)}, or 'all-linear'"
    if not any(config.of(name) for name in names):
        raise UnsupportedModel(f"targets {config.targets!r:.200} name no matrix of this model's layers; known: {known}")
    for target in () if isinstance(config.targets, str) else config.targets:
        if not any(replace(config, targets=(target,)).of(name) for name in names):
            raise UnsupportedModel(
                f"target {target!r:.80} is no matrix of this model's layers, so it can have no adapter; known: {known}"
            )


def adapters(decoder: Decoder) -> Iterator[tuple[Linear, Adapter]]:
    for module in decoder.modules():
        if isinstance(module, Linear) and isinstance(module.adapter, Adapter):
            yield module, module.adapter


def has_adapter(decoder: Decoder) -> bool:
    return next(adapters(decoder), None) is not None


def adapter_blocks(decoder: Decoder) -> Iterator[Slice]:
    """The rows of every A and B that this process holds, as views, by the names `MODULE.lora_A.weight`, `...lora_B...`."""
    for _, adapter in adapters(decoder):
        for factor, a, b in zip(adapter.factors, adapter.a, adapter.b, strict=True):
            yield block_of(f"{factor.module}.{A}", a)
            yield block_of(f"{factor.module}.{B}", b)


def trained_blocks(decoder: Decoder) -> Iterator[Slice]:
    """The blocks of `adapter_blocks`, or of `hf_blocks` where there is no adapter."""
    return adapter_blocks(decoder) if has_adapter(decoder) else hf_blocks(decoder)


@contextmanager
def without(decoder: Decoder) -> Iterator[None]:
    """Context in which the decoder computes without its adapter."""
    found = [adapter for _, adapter in adapters(decoder)]
    for each in found:
        each.off = True
    try:
        yield
    finally:
        for each in found:
            each.off = False


Factors = dict[str, tuple[Tensor, Tensor, float]]  # whole A, whole B and the scale, by the matrix's name


def gathered_factors(decoder: Decoder) -> Factors:
    """The whole adapters. Of a sharded decoder all ranks must ask at the same time."""
    return {
        f"{factor.module}.weight": (full(a.detach()), full(b.detach()), factor.scale)
        for _, adapter in adapters(decoder)
        for factor, a, b in zip(adapter.factors, adapter.a, adapter.b, strict=True)
    }


@torch.no_grad()
def merged_slices(slices: Iterable[Slice], factors: Factors) -> Iterator[Slice]:
    """The slices of matrices by their names, each with the rows of its adapter added, in float32, one after another."""
    for block in slices:
        if block.name not in factors or not block.tensor.numel():
            yield block
            continue
        a, b, scale = factors[block.name]
        rows = b[block.offset[0] : block.offset[0] + len(block.tensor)]
        yield replace(block, tensor=merged(block.tensor, a, rows, scale))


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale B A in float32 at least, rounded once to W's dtype."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=scale).to(weight.dtype)


@torch.no_grad()
def merge(decoder: Decoder) -> None:
    """Add the adapters to the float32 matrices of an unsharded decoder, and take them away."""
    assert all(linear.base is None for linear, _ in adapters(decoder)), "load the base by `load_served`"
    for block, sum_of_both in zip(
        hf_blocks(decoder), merged_slices(hf_blocks(decoder), gathered_factors(decoder)), strict=True
    ):
        block.tensor.copy_(sum_of_both.tensor)
    for linear, _ in list(adapters(decoder)):
        linear.adapter = None
