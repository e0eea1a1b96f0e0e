"""Why the served weights are the same after an update as before it. It is said, for a run where nothing changes looks sound.

An update may be too small for the dtype that weights are served in, or for float32 itself; or there was none to speak of.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.core.types import Metrics
from tidemill.models.served_weights import Contents


@dataclass(frozen=True, slots=True)
class Announced:
    """What was published, and what it was made from."""

    contents: Contents
    masters: dict[str, int]  # sums of the float32 weights, see `words_of`
    updates: int  # done by then


def why_unchanged(before: Announced | None, now: Announced, applied: Metrics, dtype: str) -> str:
    """The reason, or "" when the weights changed, or no update was made in between.

    applied: what the optimizer said of the latest update. dtype: that weights are served in.
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
