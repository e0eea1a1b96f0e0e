"""Weights in motion: named slices of global tensors, what carries them, and the fingerprint that identifies them.

A sharded trainer never has to gather: it sends the slices it holds. A fingerprint is a sum over elements, each mixed with
its index in the whole tensor, so slices of any cut add up to the same number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tidemill.types import Published, Version


@dataclass(frozen=True, slots=True)
class Slice:
    """A block of a tensor by its Hugging Face name. A whole tensor has zero offsets and the tensor's own shape."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]  # where this block begins, one number per dimension
    tensor: Tensor  # the block, in the dtype that is served


class Sender(Protocol):
    """The trainer's side of a carrier."""

    def send(self, version: Version, slices: Iterable[Slice]) -> Published:
        """Write the slices where receivers can stage them. The result's version carries their fingerprint. Blocking."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """An engine's side of a carrier."""

    def receive(self, published: Published) -> Iterable[Slice]:
        """The slices of what was published, checked against its manifest (names, shapes, dtypes), in any order.

        Tensors may be views of memory that is valid until the next call: copy them. Raises PolicyMismatch. Blocking.
        """
        ...

    def close(self) -> None: ...
