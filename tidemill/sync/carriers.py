"""The carriers by name."""

from __future__ import annotations

from pathlib import Path

from tidemill.models.weight_slices import Receiver, Sender
from tidemill.sync.checkpoint import CheckpointReceiver, CheckpointSender
from tidemill.sync.settings import SyncSettings
from tidemill.sync.shared_memory import SharedMemoryReceiver, SharedMemorySender


def make_sender(settings: SyncSettings, folder: Path) -> Sender:
    """`folder` is used by the checkpoint carrier, and by shared memory where the system has no anonymous memory."""
    if settings.carrier == "checkpoint":
        return CheckpointSender(folder, settings.keep)
    return SharedMemorySender(folder)


def make_receiver(carrier: str) -> Receiver:
    """The receiver for `Published.carrier`. Raises ValueError when there is no such carrier."""
    match carrier:
        case "shared_memory":
            return SharedMemoryReceiver()
        case "checkpoint":
            return CheckpointReceiver()
    raise ValueError(f"carrier {carrier!r}: expected 'shared_memory' or 'checkpoint'")
