"""How the queries and keys of a layer are normed and turned: the same for every kind of kernel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """Of heads [n, queries + keys + others, E]: rotary embedding in halves, after a root-mean-square norm of each head."""

    cos: Tensor  # [n, 1, E / 2] of each row's position
    sin: Tensor
    queries: int  # heads
    keys: int
    norms: tuple[Tensor, Tensor] | None = None  # weights [E] of the norm of queries, and of keys
    eps: float = 0.0
