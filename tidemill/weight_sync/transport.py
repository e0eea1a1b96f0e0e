"""Both ends of a transport by its name: the trainer's sender and an engine's receiver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.models.weight_slices import Receiver, Sender
from tidemill.weight_sync.checkpoint_transport import CheckpointReceiver, CheckpointSender
from tidemill.weight_sync.shared_memory_transport import SharedMemoryReceiver, SharedMemorySender
from tidemill.weight_sync.sync_settings import TRANSPORTS, BaseSyncSettings


@dataclass(frozen=True, slots=True)
class Transport:
    """Both ends of one transport, returned by its builder."""

    sender: Callable[[Any, Path], Sender]  # called with the transport's settings and a folder of its own
    receiver: Callable[[], Receiver]


def shared_memory() -> Transport:
    """Builder of the shared-memory transport; files in the folder replace missing anonymous memory."""
    return Transport(lambda settings, folder: SharedMemorySender(folder), SharedMemoryReceiver)


def checkpoint() -> Transport:
    """Builder of the checkpoint transport, whose versions are files in the folder."""
    return Transport(lambda settings, folder: CheckpointSender(folder, settings.keep), CheckpointReceiver)


def make_sender(settings: BaseSyncSettings, folder: Path) -> Sender:
    """The trainer's end of a transport. folder: where the transport may keep files."""
    return TRANSPORTS.builder_of(settings.kind_name)().sender(settings, folder)


def make_receiver(transport: str) -> Receiver:
    """An engine's end of a transport. Raises ConfigError when there is no such transport."""
    return TRANSPORTS.builder_of(transport)().receiver()
