"""Weights that an engine received, whole and verified against their version's fingerprint."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tidemill.core.errors import PolicyMismatch
from tidemill.core.weight_update import WeightUpdate
from tidemill.models.adapted_base import AdaptedBase
from tidemill.models.adapter_update import received_adapter
from tidemill.models.fingerprint import fingerprint
from tidemill.models.weight_slices import Receiver, Slice, whole_tensors


@dataclass(frozen=True, slots=True)
class ReceivedWeights:
    """All weights that a version is served by."""

    tensors: dict[str, Tensor]  # whole, by Hugging Face name
    fingerprint: str  # of the tensors: the version's own, unless the version is an adapter


def received_weights(
    receiver: Receiver, update: WeightUpdate, engine: str, base: AdaptedBase | None = None
) -> ReceivedWeights:
    """Receive an update, as new tensors. Raises PolicyMismatch for other weights than were published. Blocking.

    base: the frozen weights that each version is added to; None: versions are whole weights.
    """
    if base is not None:
        adapter = received_adapter(receiver.receive(update), update, f"engine {engine}")
        base.expect(update, f"engine {engine}")  # only now: a trainer that sends live must not wait in vain
        tensors, total = base.whole(adapter)
        return ReceivedWeights(tensors, total.hexdigest())
    tensors = whole_tensors(receiver.receive(update))
    found = fingerprint(Slice.whole(name, whole) for name, whole in tensors.items())
    if found != update.version.fingerprint:
        raise PolicyMismatch(f"engine {engine} received weights of the fingerprint {found}, not {update.version.exact}")
    return ReceivedWeights(tensors, found)
