"""Norm and rotary embedding of a layer's queries and keys, as every kernel takes it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """Parameters of the norm and rotary embedding of heads [n, queries + keys + others, E].

    Each head of queries and keys gets a root-mean-square norm, then the rotary embedding in half-split layout.
    """

    cos: Tensor  # [n, 1, E / 2] for each row's position
    sin: Tensor
    queries: int  # heads
    keys: int
    norms: tuple[Tensor, Tensor] | None = None  # norm weights [E] of queries and of keys
    eps: float = 0.0
