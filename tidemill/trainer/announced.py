"""Publications of a trainer: what was announced, and why it may equal the publication before."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.core.types import Metrics, Version
from tidemill.models.served_weights import Contents


@dataclass(frozen=True, slots=True)
class Announced:
    """One publication: the contents that were sent, and the weights they were made from."""

    version: Version
    contents: Contents
    masters: dict[str, int]  # sums of the float32 weights, see `words_of`
    updates: int  # optimizer updates done by then


def why_unchanged(before: Announced | None, now: Announced, applied: Metrics, dtype: str) -> str:
    """The reason why the served weights are unchanged; "" if they changed."""
    if before is None or before.updates == now.updates or before.contents.fingerprint != now.contents.fingerprint:
        return ""
    if before.masters != now.masters:
        return f"the update is below the resolution of {dtype}, in which they are served (the trainer's own did change)"
    if applied["lr"] == 0:
        return "the learning rate is 0"
    return "the gradient is zero" if applied["grad_norm"] == 0 else "the update is below the resolution of float32"
