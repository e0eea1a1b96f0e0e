"""Both ends of a transport by its name: the trainer's sender and an engine's receiver.

An engine in a foreign process, such as a plug-in of another server, takes `make_receiver(NAME)` and gives each of its
processes the update `for_process(its number)`. See docs/weight_sync.md for what it must do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.models.weight_slices import LiveReceiver, LiveSender, Receiver, Sender
from tidemill.weight_sync.checkpoint_transport import CheckpointReceiver, CheckpointSender
from tidemill.weight_sync.collective_transport import CollectiveReceiver, CollectiveSender
from tidemill.weight_sync.delta_receiver import DeltaReceiver, LiveDeltaReceiver
from tidemill.weight_sync.delta_sender import DeltaSender, LiveDeltaSender
from tidemill.weight_sync.direct_transport import DirectReceiver, DirectSender
from tidemill.weight_sync.shared_memory_transport import SharedMemoryReceiver, SharedMemorySender
from tidemill.weight_sync.sync_settings import TRANSPORTS, BaseSyncSettings


@dataclass(frozen=True, slots=True)
class Transport:
    """Both ends of one transport, returned by its builder."""

    sender: Callable[
        [Any, Path, bool], Sender | LiveSender
    ]  # of its settings, a folder of its own, and `partial`: see `make_sender`
    receiver: Callable[[], Receiver]


def shared_memory() -> Transport:
    """Builder of the shared-memory transport; files in the folder replace missing anonymous memory."""
    return Transport(lambda settings, folder, partial: SharedMemorySender(folder, partial=partial), SharedMemoryReceiver)


def checkpoint() -> Transport:
    """Builder of the checkpoint transport, whose versions are files in the folder."""
    return Transport(
        lambda settings, folder, partial: CheckpointSender(folder, settings.keep, partial=partial), CheckpointReceiver
    )


def collective() -> Transport:
    """Builder of the collective transport, whose trainer sends while engines receive."""
    return Transport(lambda settings, folder, partial: CollectiveSender(partial), CollectiveReceiver)


def direct() -> Transport:
    """Builder of the direct transport, which sends each engine process what it needs."""
    return Transport(lambda settings, folder, partial: DirectSender(partial), DirectReceiver)


def make_sender(settings: BaseSyncSettings, folder: Path, partial: bool = False) -> Sender | LiveSender:
    """The trainer's end of a transport, or that of one of its ranks.

    folder: where the transport may keep files. partial: it sends one part of each version, and others the rest.
    """
    sender: Any = TRANSPORTS.builder_of(settings.kind_name)().sender(settings, folder, partial)
    if settings.every_full == 1:
        return sender
    filtered: Any = LiveDeltaSender if isinstance(sender, LiveSender) else DeltaSender
    return filtered(sender, settings.every_full)


def make_receiver(transport: str) -> Receiver:
    """An engine's end of a transport. Raises ConfigError when there is no such transport."""
    receiver = TRANSPORTS.builder_of(transport)().receiver()
    if "delta" not in receiver.takes.kinds:
        return receiver
    return LiveDeltaReceiver(receiver) if isinstance(receiver, LiveReceiver) else DeltaReceiver(receiver)
