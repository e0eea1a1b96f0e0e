"""Weights that an engine received, whole and verified against their version's fingerprint."""

from __future__ import annotations

from torch import Tensor

from tidemill.core.errors import PolicyMismatch
from tidemill.core.weight_update import WeightUpdate
from tidemill.models.fingerprint import fingerprint
from tidemill.models.weight_slices import Receiver, Slice, whole_tensors


def received_weights(receiver: Receiver, update: WeightUpdate, engine: str) -> dict[str, Tensor]:
    """Receive an update: copies of its tensors by Hugging Face name. Raises PolicyMismatch for other weights. Blocking."""
    tensors = whole_tensors(receiver.receive(update))
    found = fingerprint(Slice.whole(name, whole) for name, whole in tensors.items())
    if found != update.version.fingerprint:
        raise PolicyMismatch(f"engine {engine} received weights of the fingerprint {found}, not {update.version.exact}")
    return tensors
