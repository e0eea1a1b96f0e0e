"""Attention inside packed sequences, for the trainer: each sequence sees itself, causally, within its layer's window.

The rest of the decoder works on the packed row, so padding exists here only, and only up to the longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.models.decoder import Attend


def packed_positions(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """[sum(lengths)] int64: 0..length-1 of each sequence, one after another."""
    return torch.cat([torch.arange(n, device=device) for n in lengths])


def packed_attention(lengths: Sequence[int], windows: Sequence[int | None], device: torch.device | str = "cpu") -> Attend:
    """An `attend` for sequences of these lengths packed one after another."""
    longest = max(lengths)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(list(lengths))).to(device)
    columns = packed_positions(lengths, device)
    same = len(set(lengths)) == 1
    masks: dict[int | None, Tensor] = {
        w: window_mask(longest, w, device) for w in set(windows) if w is not None and w < longest
    }

    def unpack(x: Tensor) -> Tensor:  # [N, heads, E] -> [rows, heads, longest, E]
        if same:
            return x.view(len(lengths), longest, *x.shape[1:]).transpose(1, 2)
        padded = x.new_zeros(len(lengths), longest, *x.shape[1:])
        return padded.index_put((rows, columns), x).transpose(1, 2)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = masks.get(windows[layer])
        # Rows are padded on the right, so causality alone keeps padding out of every real position.
        out = F.scaled_dot_product_attention(
            unpack(q), unpack(k), unpack(v), attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        ).transpose(1, 2)
        return out.reshape(q.shape) if same else out[rows, columns]

    return attend


def window_mask(length: int, window: int, device: torch.device | str = "cpu") -> Tensor:
    """[length, length] bool: position i sees j for i - window < j <= i."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)
