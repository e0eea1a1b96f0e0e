"""Senders of changes and an engine that is all receiving, in one process, over any transport."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from live_cases import SendsWhenRead, received

from tidemill.core.errors import BaseMissing, PolicyMismatch
from tidemill.core.types import Version
from tidemill.core.weight_update import AddedTo, UpdateSupport, WeightUpdate
from tidemill.models.fingerprint import fingerprint
from tidemill.models.weight_slices import LiveSender, Slice, whole_tensors
from tidemill.weight_sync.sync_settings import SyncSettings
from tidemill.weight_sync.transport import make_receiver, make_sender

TRANSPORTS = ("shared_memory", "checkpoint", "collective", "direct")
Tensors = dict[str, torch.Tensor]


def weights(seed: int = 0) -> Tensors:
    g = torch.Generator().manual_seed(seed)
    return {
        "wide": torch.randn(40, 700, generator=g).bfloat16(),
        "tall": torch.randn(300, 5, generator=g).bfloat16(),
        "twin": torch.randn(300, 5, generator=g).bfloat16(),
        "norm": torch.randn(64, generator=g),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "still": torch.randn(8, 8, generator=g),
    }


def moved(tensors: Tensors, step: int, share: float = 0.02) -> Tensors:
    """The same tensors with a share of their elements changed, some of them to values that no comparison of floats tells."""
    g, found = torch.Generator().manual_seed(1000 + step), dict(tensors)
    for name in set(tensors) - {"still", "empty"}:
        old = tensors[name]
        touched = torch.rand(old.shape, generator=g) < (share if old.ndim else 1.0)
        new = torch.where(touched, (old.double() * 1.01 + 1e-3).to(old.dtype), old)
        if old.ndim:
            new.view(-1)[step % 7] = (0.0, -0.0, float("nan"), float("-inf"), 1e-40)[step % 5]
        found[name] = new
    return found


def held_by(tensors: Tensors, ranks: int) -> list[list[Slice]]:
    """The slices that each rank holds: some rows of each tensor."""
    if ranks == 1:
        return [[Slice.whole(name, tensor) for name, tensor in tensors.items()]]
    held: list[list[Slice]] = [[] for _ in range(ranks)]
    for name, tensor in tensors.items():
        at = 0
        for rank, rows in enumerate(tensor.tensor_split(ranks) if tensor.ndim else [tensor]):
            offset = (at, *(0,) * (tensor.ndim - 1)) if tensor.ndim else ()
            if rows.numel() or not rank:
                held[rank].append(Slice(name, tuple(tensor.shape), offset, rows))
            at += len(rows) if tensor.ndim else 0
    return held


def bits(tensors: Tensors) -> dict[str, bytes]:
    """Every bit: NaN equals itself, and -0.0 is not 0.0."""
    return {name: bytes(each.contiguous().view(-1).view(torch.uint8).numpy()) for name, each in tensors.items()}


class Scene:
    """One policy's senders, a rank each, and one engine."""

    def __init__(self, transport: str, folder: Path, ranks: int = 1, full_every: int = 4) -> None:
        settings = SyncSettings(transport=transport, full_every=full_every)  # type: ignore[arg-type]
        made = [make_sender(settings, folder / f"rank-{rank}", partial=ranks > 1) for rank in range(ranks)]
        self.senders: list[Any] = [SendsWhenRead(each) if isinstance(each, LiveSender) else each for each in made]
        self.receiver, self.transport = make_receiver(transport), transport
        self.version, self.tensors = Version(-1), Tensors()
        self.noticed = 0  # updates whose base was not served

    @property
    def inner(self) -> list[Any]:
        """The transport's own senders."""
        return [(each.sender if isinstance(each, SendsWhenRead) else each)._sender for each in self.senders]

    def publish(self, step: int, tensors: Tensors) -> WeightUpdate:
        held = held_by(tensors, len(self.senders))
        version = Version(step, fingerprint=fingerprint(Slice.whole(*each) for each in tensors.items()))
        return joined([sender.send(version, pieces) for sender, pieces in zip(self.senders, held, strict=True)])

    def whole(self, update: WeightUpdate) -> WeightUpdate:
        return joined([sender.send_whole(update.version) for sender in self.senders])

    def update(self, update: WeightUpdate) -> None:
        """As an engine does it. Nothing that is served changes before everything is verified."""
        UpdateSupport(("full", "delta"), True).check(update, "the engine", self.version)
        staged = whole_tensors(received(update, self.receiver.receive))
        if fingerprint(Slice.whole(*each) for each in staged.items()) != update.version.fingerprint:
            raise PolicyMismatch("another fingerprint")
        self.version, self.tensors = update.version, staged

    def bring(self, update: WeightUpdate) -> None:
        """As the pool does it."""
        try:
            self.update(update)
        except BaseMissing:
            self.noticed += 1
            self.update(self.whole(update))

    def close(self) -> None:
        for each in (*self.senders, self.receiver):
            each.close()


def joined(updates: list[WeightUpdate]) -> WeightUpdate:
    """One update of all ranks' parts."""
    assert len({(each.version, each.kind, each.base) for each in updates}) == 1
    return replace(updates[0], parts=tuple(part for each in updates for part in each.parts))


def sent_otherwise(sender: Any, change: Callable[[list[Slice], AddedTo | None], tuple[list[Slice], AddedTo | None]]) -> None:
    """Have a transport's own sender carry something else than it is given, until `undo` is called on the attribute."""
    name = "offer" if isinstance(sender, LiveSender) else "send"
    carry = getattr(sender, name)

    def offered(version: Version, forms: Iterable[Slice], stream: Any, onto: AddedTo | None = None) -> WeightUpdate:
        pieces, other = change(list(stream()), onto)
        return carry(version, [replace(p, tensor=p.tensor.to("meta")) for p in pieces], lambda: pieces, other)

    def sent(version: Version, slices: Iterable[Slice], onto: AddedTo | None = None) -> WeightUpdate:
        pieces, other = change(list(slices), onto)
        return carry(version, pieces, other)

    setattr(sender, name, offered if name == "offer" else sent)
