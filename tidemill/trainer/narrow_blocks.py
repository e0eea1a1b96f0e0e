"""Blocks of 256 numbers in 8 or 16 bits each, for the way between replicas.

    int8        one byte a number, and a scale for each block in bfloat16: 258 bytes
    bfloat16    two bytes a number: 512 bytes

An int8 number q stands for q times the scale of its block, which is the block's largest magnitude / 127. Such a product has
15 bits. So float32 holds it exactly, and what was decoded is encoded to the same bytes again. No number moves by more than
half a scale. A block that is not finite is decoded to NaN, so that a broken gradient is seen after any sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
_LEAST = 2.0**-119  # smaller blocks are 0: their scale would have too few bits


def encoded(values: Tensor, kind: str) -> Tensor:
    """Bytes [..., n] of blocks [..., 256]."""
    if kind == "bfloat16":
        return values.to(torch.bfloat16).view(torch.uint8)
    largest = values.abs().amax(-1, keepdim=True)
    scales = torch.where(largest < _LEAST, 0.0, largest / 127).to(torch.bfloat16)
    shares = (values / scales).nan_to_num(0.0, 0.0, 0.0).round_().clamp_(-127, 127)
    return torch.cat([shares.to(torch.int8).view(torch.uint8), scales.view(torch.uint8)], -1)


def decoded(encoded: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Blocks [..., 256] of bytes [..., n]."""
    if kind == "bfloat16":
        return encoded.view(torch.bfloat16).to(dtype)
    numbers, scales = encoded[..., :BLOCK].view(torch.int8), encoded[..., BLOCK:].view(torch.bfloat16)
    return numbers.to(dtype) * scales.to(dtype)  # 0 times what is not finite is NaN
