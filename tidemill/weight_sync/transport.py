"""Factories of senders and receivers by the name of their transport."""

from __future__ import annotations

from pathlib import Path

from tidemill.models.weight_slices import Receiver, Sender
from tidemill.weight_sync.checkpoint_transport import CheckpointReceiver, CheckpointSender
from tidemill.weight_sync.shared_memory_transport import SharedMemoryReceiver, SharedMemorySender
from tidemill.weight_sync.sync_settings import SyncSettings


def make_sender(settings: SyncSettings, folder: Path) -> Sender:
    """The sender for `settings`. folder: for checkpoints, and for shared memory that cannot be anonymous."""
    if settings.carrier == "checkpoint":
        return CheckpointSender(folder, settings.keep)
    return SharedMemorySender(folder)


def make_receiver(carrier: str) -> Receiver:
    """The receiver for `Published.carrier`. Raises ValueError when there is no such transport."""
    match carrier:
        case "shared_memory":
            return SharedMemoryReceiver()
        case "checkpoint":
            return CheckpointReceiver()
    raise ValueError(f"carrier {carrier!r}: expected 'shared_memory' or 'checkpoint'")
