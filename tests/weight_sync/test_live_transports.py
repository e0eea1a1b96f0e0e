"""Live transports: several senders and receivers, bytes on the wire, and peers that fail at any point."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from live_cases import LIMIT_S, at_once, meeting, offered

from tidemill.core.errors import PolicyMismatch, TransferFailed
from tidemill.core.types import Version
from tidemill.core.weight_update import WeightUpdate
from tidemill.models.fingerprint import fingerprint
from tidemill.models.weight_slices import Slice
from tidemill.weight_sync import collective_transport, direct_transport
from tidemill.weight_sync.collective_transport import CollectiveReceiver, CollectiveSender
from tidemill.weight_sync.direct_transport import DirectReceiver, DirectSender
from tidemill.weight_sync.live_ends import LiveEnd, LiveReceivingEnd, header_of, manifest_of
from tidemill.weight_sync.manifest import Block, WeightManifest
from tidemill.weight_sync.process_groups import Link, Lobby, Watch, connected, store_at

KINDS: dict[str, tuple[Callable[[bool], LiveEnd], Callable[[], LiveReceivingEnd]]] = {
    "collective": (CollectiveSender, CollectiveReceiver),
    "direct": (DirectSender, DirectReceiver),
}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(37, 8, generator=g),
        "norm": torch.randn(8, generator=g).bfloat16(),
        "tall": torch.randn(301, 3, generator=g).bfloat16(),
        "one": torch.tensor(2.5 + seed),
    }


def shares(seed: int = 0, ranks: int = 2) -> list[list[Slice]]:
    """The slices that each rank holds: some rows of each tensor."""
    held: list[list[Slice]] = [[] for _ in range(ranks)]
    for name, tensor in tensors(seed).items():
        if not tensor.ndim:
            held[0].append(Slice.whole(name, tensor))
            continue
        at = 0
        for rank, rows in enumerate(tensor.tensor_split(ranks)):
            held[rank].append(Slice(name, tuple(tensor.shape), (at, *(0,) * (tensor.ndim - 1)), rows))
            at += len(rows)
    return held


class Both:
    """Both ends of a live transport, and one transfer after another between them."""

    def __init__(self, kind: str, ranks: int = 2, engines: int = 2) -> None:
        sender, receiver = KINDS[kind]
        self.senders = [sender(ranks > 1) for _ in range(ranks)]
        self.receivers = [receiver() for _ in range(engines)]

    def publish(self, step: int) -> WeightUpdate:
        return offered(self.senders, Version(step), shares(step, len(self.senders)))

    def transfer(self, update: WeightUpdate, group: str = "", limit_s: float = LIMIT_S, **receive: Any) -> list[Any]:
        """What each sender, then each receiver comes to: None, and the fingerprint received; or an error."""
        told = meeting(update, len(self.receivers), group, limit_s)
        sends = [partial(each.send_offered, told[0], threading.Event()) for each in self.senders]
        receives = [receive.get(f"at_{i}", each.receive) for i, each in enumerate(self.receivers)]
        return at_once(
            *sends, *(partial(lambda go, its: fingerprint(go(its)), *x) for x in zip(receives, told, strict=True))
        )

    def close(self) -> None:
        for each in (*self.senders, *self.receivers):
            each.close()


@pytest.fixture(params=KINDS)
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    made = Both(request.param)
    yield made
    made.close()


def right(update: WeightUpdate, both: Both) -> list[Any]:
    return [None] * len(both.senders) + [update.version.fingerprint] * len(both.receivers)


def test_two_ranks_send_to_two_engines_and_keep_their_groups(both: Both) -> None:
    links = []
    for step in range(3):
        update = both.publish(step)
        assert len(update.parts) == 2 and update.bytes == sum(t.nbytes for t in tensors().values())
        assert both.transfer(update, "same") == right(update, both)
        links.append([each._link for each in both.senders])
    assert links[0] == links[1] == links[2], "a group is made once"
    update = both.publish(3)
    assert both.transfer(update, "another") == right(update, both)
    assert both.senders[0]._link != links[0][0] and links[0][0][1].broken, "an old group is let go"


@pytest.mark.parametrize("bucket", [64, 1000, 1 << 20])
def test_tensors_are_filled_in_place_whatever_the_buckets(both: Both, bucket: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(collective_transport, "BUCKET", bucket)
    monkeypatch.setattr(direct_transport, "MESSAGE", bucket)
    update, into = both.publish(0), {name: torch.zeros_like(t) for name, t in tensors().items()}
    others = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in tensors().items()}  # do not fit
    first, second = (
        lambda its, at=at, r=r: r.receive_into(its, at, threading.Event())
        for r, at in zip(both.receivers, (into, others), strict=True)
    )
    assert both.transfer(update, at_0=first, at_1=second) == right(update, both)
    assert all(torch.equal(into[name], tensor) for name, tensor in tensors().items())
    assert not any(tensor.any() for tensor in others.values())


def test_bytes_on_the_wire_are_those_of_the_weights(both: Both, monkeypatch: Any) -> None:
    """A broadcast reaches each receiver once. Counted at the group, and compared with what must travel."""
    sent = {"broadcast": 0, "send": 0}
    for name in sent:
        inner = getattr(Link, name)

        def counted(link: Link, tensor: torch.Tensor, *rest: Any, name: str = name, inner: Any = inner) -> None:
            with lock:
                sent[name] += tensor.nbytes
            inner(link, tensor, *rest)

        monkeypatch.setattr(Link, name, counted)
    lock, update = threading.Lock(), both.publish(0)
    assert both.transfer(update) == right(update, both)
    weights, engines = sum(t.nbytes for t in tensors().values()), len(both.receivers)
    manifests = sum(24 + len(each._offered[0].encode()) for each in both.senders)
    if isinstance(both.senders[0], CollectiveSender):  # each rank's broadcast is called by itself and by each engine
        assert sent == {"broadcast": (1 + engines) * (weights + manifests), "send": 0}
        return
    needs = len(both.senders) * engines * (8 + len(b"null"))  # from each engine to each rank
    assert sent == {"broadcast": 0, "send": engines * (weights + manifests) + needs}
    sent["send"], again = 0, both.publish(0)
    assert both.transfer(again, both.receivers[0]._group) == right(again, both)
    assert sent["send"] == engines * (weights + manifests), "needs are told once"


def give_up(both: Both) -> dict[str, Any]:
    def some(its: WeightUpdate) -> list[Slice]:
        iterator = both.receivers[0].receive(its)
        return [next(iterator)]  # the iterator is closed here

    return {"at_0": some}


def wrong_form(both: Both) -> dict[str, Any]:
    def refuse(its: WeightUpdate) -> list[Slice]:
        for _ in both.receivers[0].receive(its):
            raise ValueError("unexpected tensor")
        return []

    return {"at_0": refuse}


def sender_fails(both: Both) -> dict[str, Any]:
    manifest, stream = both.senders[1]._offered  # type: ignore[misc]

    def failing() -> Iterator[Slice]:
        yield from list(stream())[:2]
        raise MemoryError("half-way")

    both.senders[1]._offered = manifest, failing
    return {}


def never_comes(both: Both) -> dict[str, Any]:
    def absent(its: WeightUpdate) -> list[Slice]:
        raise ValueError("is lost before it meets the others")

    return {"at_0": absent}


@pytest.mark.parametrize("fault", [give_up, wrong_form, sender_fails, never_comes])
def test_one_that_fails_ends_the_transfer_for_all_and_the_next_one_is_whole(both: Both, fault: Any) -> None:
    before = both.publish(0)
    both.transfer(before, "first")
    update, begin = both.publish(1), time.monotonic()
    limit_s = 2.0 if fault is never_comes else LIMIT_S
    found = both.transfer(update, "first" if fault is not never_comes else "second", limit_s, **fault(both))
    assert time.monotonic() - begin < 15, "it waited for its limit"
    others = [each for each in found if isinstance(each, TransferFailed) or each in right(update, both)]
    assert len(found) - len(others) <= 1 and any(isinstance(each, Exception) for each in found)
    assert before.version.fingerprint not in found
    after = both.publish(2)
    assert both.transfer(after, "third") == right(after, both)


def test_a_group_that_broke_is_never_used_again(both: Both) -> None:
    both.transfer(both.publish(0), "first")
    both.transfer(both.publish(1), "first", **give_up(both))
    update = both.publish(2)
    assert all(isinstance(each, TransferFailed) for each in both.transfer(update, "first", limit_s=2.0)[:2])


def test_a_transfer_ends_when_it_is_told_to(both: Both) -> None:
    """As an engine does whose update is cancelled: it waits for a sender that never comes."""
    stop = threading.Event()
    its = meeting(both.publish(0), 2)[0]
    waiting = lambda: list(both.receivers[0].receive_into(its, {}, stop))  # noqa: E731
    found = at_once(waiting, lambda: stop.set())
    assert isinstance(found[0], TransferFailed) and "ended from here" in str(found[0])


@pytest.mark.parametrize("place", ["tcp://example.org:80/x", "tcp://127.0.0.1:http/x", "memory", ""])
def test_only_a_sender_on_this_machine_is_met(both: Both, place: str) -> None:
    update = both.publish(0)
    its = meeting(replace(update, parts=(replace(update.parts[0], location=place),)))[0]
    with pytest.raises(ValueError, match="expected tcp://127"):
        list(both.receivers[0].receive(its))


def test_a_stranger_without_the_secret_meets_nobody() -> None:
    lobby, stop = Lobby(), threading.Event()
    told = meeting(WeightUpdate(Version(0), Both("collective", 1).publish(0).parts), limit_s=1.0)[0].rendezvous
    assert told is not None
    stranger = f"{lobby.location.rpartition('/')[0]}/guessed"

    def meet(store: Any, location: str, rank: int) -> Link:
        return connected(store, location, told, rank, Watch.over(told, stop))

    found = at_once(
        lambda: meet(lobby.store, lobby.location, 0),
        lambda: meet(store_at(stranger, Watch.over(told, stop)), stranger, 1),
    )
    assert all(isinstance(each, TransferFailed) for each in found)


def test_a_manifest_that_does_not_fit_the_slices_is_never_sent(both: Both) -> None:
    """The trainer's stream is held against what was offered, slice by slice."""
    for change in (
        lambda p: p[:-1],
        lambda p: [*p, p[0]],
        lambda p: p[::-1],
        lambda p: [replace(p[0], tensor=p[0].tensor.double()), *p[1:]],
    ):
        update = both.publish(0)
        manifest, stream = both.senders[0]._offered  # type: ignore[misc]
        pieces = list(stream())
        both.senders[0]._offered = manifest, lambda change=change, pieces=pieces: change(pieces)
        found = both.transfer(update)
        assert isinstance(found[0], PolicyMismatch)
        assert all(isinstance(each, TransferFailed) or each in right(update, both) for each in found[1:])


def test_a_manifest_of_another_layout_than_its_sender_sends_by_is_refused_before_the_first_tensor() -> None:
    """Gloo would end the process that receives another number of bytes."""
    version = Version(1, fingerprint="f")
    sent = WeightManifest(version, [Block.of(piece) for part in shares() for piece in part])
    last = msgspec.structs.replace(sent.blocks[-1], name="another")
    for other in (WeightManifest(version, sent.blocks[:-1]), WeightManifest(version, [*sent.blocks[:-1], last])):
        encoded = other.encode()
        header = header_of(sent, encoded)
        with pytest.raises(PolicyMismatch, match="not the one by which its sender sends"):
            manifest_of(header, torch.frombuffer(bytearray(encoded), dtype=torch.uint8), True)
    encoded = sent.encode()
    assert manifest_of(header_of(sent, encoded), torch.frombuffer(bytearray(encoded), dtype=torch.uint8), True) == sent


def test_an_update_without_a_rendezvous_is_refused(both: Both) -> None:
    with pytest.raises(PolicyMismatch, match="no rendezvous"):
        list(both.receivers[0].receive(both.publish(0)))


def test_tensor_parallel_ranks_receive_what_they_need_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns for one, rows for another: each region comes from whichever ranks hold it."""
    whole = tensors()
    needs: list[dict[str, list[Any]]] = [
        {"embed": [((0, 0), (37, 4))], "tall": [((0, 0), (301, 1)), ((0, 2), (301, 1))], "one": [((), ())]},
        {"embed": [((0, 4), (37, 4))], "tall": [((100, 0), (150, 3))], "norm": [((2,), (3,))]},
    ]
    both = Both("direct")
    both.receivers = [DirectReceiver(each) for each in needs]
    try:
        told = meeting(both.publish(0), 2)
        sends = [partial(each.send_offered, told[0], threading.Event()) for each in both.senders]
        found = at_once(
            *sends, *(partial(lambda r, its: list(r.receive(its)), *x) for x in zip(both.receivers, told, strict=True))
        )
        for regions, pieces in zip(needs, found[2:], strict=True):
            given = {name: torch.zeros(t.shape) for name, t in whole.items()}
            for piece in pieces:
                at = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.tensor.shape, strict=True))
                assert torch.equal(piece.tensor, whole[piece.name][at])
                given[piece.name][at] += 1
            for name, counts in given.items():
                wanted = torch.zeros_like(counts)
                for offset, size in regions.get(name, []):
                    wanted[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))] += 1
                assert torch.equal(counts, wanted), name
    finally:
        both.close()
