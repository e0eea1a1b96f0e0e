"""Explains why an update left the served weights unchanged, since such a run otherwise looks sound.

An update may be too small for the dtype of the served weights, or for float32 itself; or the update was zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.core.types import Metrics
from tidemill.models.served_weights import Contents


@dataclass(frozen=True, slots=True)
class Announced:
    """One publication: the contents that were sent, and the weights they were made from."""

    contents: Contents
    masters: dict[str, int]  # sums of the float32 weights, see `words_of`
    updates: int  # optimizer updates done by then


def why_unchanged(before: Announced | None, now: Announced, applied: Metrics, dtype: str) -> str:
    """The reason why the weights are unchanged; "" when they changed, or there was no update.

    applied: the optimizer's metrics of the latest update. dtype: the dtype of the served weights.
    """
    if before is None or before.updates == now.updates or before.contents.fingerprint != now.contents.fingerprint:
        return ""
    if before.masters != now.masters:
        reason = f"the update is below the resolution of {dtype}, in which they are served (the trainer's own did change)"
    elif applied["lr"] == 0:
        reason = "the learning rate is 0"
    elif applied["grad_norm"] == 0:
        reason = "the gradient is zero"
    else:
        reason = "the update is below the resolution of float32"
    return reason
