"""Causal attention inside packed sequences, for the trainer.

    lengths, shared -> Families -> packed_attention -> attend(layer, q, k, v)

The compiled kernel `cpu.packed_sequences` reads keys and values where they are packed. Without it, PyTorch's attention
is used: tokens that sequences share are copied to each of them, and sequences of similar length share a bucket, padded
to its longest. 128 sequences of 30 to 90 tokens then take two thirds of the time of one padded batch. Rows are padded on
the right, so causality alone keeps padding out of every real position.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.models.decoder import Attend
from tidemill.models.kernels.cpu.packed_sequences import Families
from tidemill.models.kernels.cpu.trained_kernels import attention_for

_RATIO, _SLACK = 0.85, 8  # a bucket holds lengths >= RATIO * its longest - SLACK: few buckets when sequences are tiny


def packed_positions(lengths: Sequence[int]) -> Tensor:
    """[sum(lengths)] int64: 0..length-1 of each sequence, one after another."""
    return torch.cat([torch.arange(n) for n in lengths])


def packed_attention(
    sequences: Sequence[int] | Families, windows: Sequence[int | None], device: torch.device | str = "cpu"
) -> Attend:
    """An `attend` for sequences packed one after another.

    sequences: their lengths, or `Families` if they share what they begin with. On a CPU, PyTorch's attention computes in
    float32 (float64 stays), because the backward pass of its bfloat16 kernel is three times slower there.
    """
    families = sequences if isinstance(sequences, Families) else Families.of(sequences)

    @cache
    def padded() -> Attend:
        return _padded_attention(families, windows, device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if (see := attention_for(q, k, v)) is not None:
            return see(q, k, v, families, windows[layer])
        return padded()(layer, q, k, v)

    return attend


def _padded_attention(families: Families, windows: Sequence[int | None], device: torch.device | str) -> Attend:
    lengths = np.diff(families.sequences).tolist()
    buckets = length_buckets(lengths)
    shapes = [(len(bucket), lengths[bucket[0]]) for bucket in buckets]  # (rows, padded length)
    sizes = [rows * longest for rows, longest in shapes]
    slots = None if len(set(lengths)) == 1 else _slots(lengths, buckets).to(device)
    masks: dict[tuple[int, int], Tensor] = {
        (n, w): window_mask(n, w, device) for _, n in shapes for w in set(windows) if w is not None and w < n
    }
    shares = len(families.places) > families.tokens
    spread = torch.from_numpy(families.places).to(device) if shares else None
    collect = torch.from_numpy(np.unique(families.places, return_index=True)[1]).to(device) if shares else None

    def unpack(x: Tensor) -> list[Tensor]:  # [N, heads, E] -> of each bucket [rows, heads, longest, E]
        if spread is not None:
            x = x.index_select(0, spread)
        if slots is not None:
            x = x.new_zeros(sum(sizes), *x.shape[1:]).index_copy(0, slots, x)
        return [part.view(*shape, *x.shape[1:]).transpose(1, 2) for part, shape in zip(x.split(sizes), shapes, strict=True)]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dtype, window = v.dtype, windows[layer]
        if q.device.type == "cpu" and dtype != torch.float64:
            q, k, v = q.float(), k.float(), v.float()
        with torch.autocast(q.device.type, enabled=False):
            q, k = q.to(v.dtype), k.to(v.dtype)  # they may be wider than the values
            parts = []
            for query, key, value, (_, n) in zip(unpack(q), unpack(k), unpack(v), shapes, strict=True):
                mask = None if window is None else masks.get((n, window))
                out = F.scaled_dot_product_attention(
                    query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
                )
                parts.append(out.transpose(1, 2).reshape(-1, *q.shape[1:]))
            seen = parts[0] if len(parts) == 1 else torch.cat(parts)
            seen = seen if slots is None else seen.index_select(0, slots)
            return (seen if collect is None else seen.index_select(0, collect)).to(dtype)

    return attend


def length_buckets(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of `lengths` in groups of similar length, the longest of each group first."""
    buckets: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not buckets or lengths[index] < _RATIO * lengths[buckets[-1][0]] - _SLACK:
            buckets.append([])
        buckets[-1].append(index)
    return buckets


def window_mask(length: int, window: int, device: torch.device | str = "cpu") -> Tensor:
    """[length, length] bool: position i sees j for i - window < j <= i."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


def _slots(lengths: Sequence[int], buckets: list[list[int]]) -> Tensor:
    """[N] int64: each packed token's place in the padded buckets, which lie one after another."""
    starts, at = [0] * len(lengths), 0
    for bucket in buckets:
        longest = lengths[bucket[0]]
        for index in bucket:
            starts[index] = at
            at += longest
    return torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])
