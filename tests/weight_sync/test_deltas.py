"""Changes instead of whole weights: over every transport they come to the same bits, or are noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from delta_cases import TRANSPORTS, Scene, bits, joined, moved, sent_otherwise, weights
from live_cases import received

from tidemill.core.errors import BaseMissing, PolicyMismatch, WeightsMoved
from tidemill.core.types import Version
from tidemill.core.weight_update import AddedTo
from tidemill.models.weight_slices import Slice
from tidemill.weight_sync.manifest import PackedSlice


@pytest.fixture(params=TRANSPORTS)
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    made = Scene(request.param, tmp_path)
    yield made
    made.close()


SEVERAL = [pytest.param(3, marks=pytest.mark.slow), 2, 1]


@pytest.mark.parametrize("ranks", SEVERAL)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_changes_come_to_the_same_bits_whatever_the_ranks(tmp_path: Path, transport: str, ranks: int) -> None:
    scene, tensors, kinds = Scene(transport, tmp_path, ranks), weights(), []
    try:
        for step in range(9):
            update = scene.publish(step, tensors)
            scene.update(update)
            assert bits(scene.tensors) == bits(tensors), step
            assert update.whole == sum(t.nbytes for t in tensors.values())
            assert update.kind == "full" or update.bytes < 0.1 * update.whole
            kinds.append(update.kind)
            tensors = moved(tensors, step)
        assert kinds == ["full", "delta", "delta", "delta"] * 2 + ["full"]
    finally:
        scene.close()


def test_what_changes_everywhere_travels_whole(scene: Scene) -> None:
    scene.update(scene.publish(0, weights()))
    other = weights(1)
    update = scene.publish(1, other)
    scene.update(update)
    assert update.kind == "delta" and update.bytes <= update.whole
    assert bits(scene.tensors) == bits(other)


def test_what_does_not_change_takes_no_bytes(scene: Scene) -> None:
    scene.update(scene.publish(0, weights()))
    update = scene.publish(1, weights())
    scene.update(update)
    assert update.bytes == 0 and bits(scene.tensors) == bits(weights())


@pytest.mark.parametrize("fault", ["dropped", "repeated", "reordered", "another engine", "cut off"])
def test_a_missed_base_is_noticed_and_a_full_version_follows(scene: Scene, fault: str) -> None:
    versions = [weights()]
    for step in range(5):
        versions.append(moved(versions[-1], step))
    scene.update(scene.publish(0, versions[0]))
    first, before = scene.publish(1, versions[1]), bits(scene.tensors)
    if fault == "cut off":  # the receiver's copies are a mixture then, and no base
        pieces = received(first, scene.receiver.receive)
        assert [next(pieces).name for _ in range(2)]
        pieces.close()
        with pytest.raises(BaseMissing, match="held here is no base"):
            scene.update(first)
        assert bits(scene.tensors) == before
    elif fault == "repeated":
        scene.update(first)
        scene.bring(first)
        assert scene.noticed == 1 and bits(scene.tensors) == bits(versions[1])
    elif fault == "another engine":
        scene.update(first)
        scene.receiver.close()
        fresh = Scene(scene.transport, Path("unused"))
        scene.receiver, scene.version = fresh.receiver, Version(-1)
    second = scene.publish(2, versions[2])
    if fault == "repeated":
        scene.update(second)
    else:
        served = scene.version
        with pytest.raises(BaseMissing):
            scene.update(second)
        assert scene.version == served
        scene.bring(second)
        assert scene.noticed == 1
    assert bits(scene.tensors) == bits(versions[2])
    if fault == "reordered":
        with pytest.raises(BaseMissing):
            scene.update(first)
        with pytest.raises(WeightsMoved):
            scene.whole(first)
        assert bits(scene.tensors) == bits(versions[2])
    third = scene.publish(3, versions[3])
    scene.update(third)
    assert third.kind == "delta" and bits(scene.tensors) == bits(versions[3])


def test_a_receiver_notices_a_missing_base_itself(scene: Scene) -> None:
    """An engine's label is not asked: what counts is what this process received last."""
    versions = [weights(), moved(weights(), 0)]
    scene.update(scene.publish(0, versions[0]))
    list_of = scene.receiver.receive
    update = scene.publish(1, versions[1])
    assert update.base is not None
    for other in (replace(update.base, step=7), replace(update.base, fingerprint="0" * 32), Version(0)):
        with pytest.raises(BaseMissing, match="held here is"):
            next(iter(list_of(replace(update, base=other))))
    scene.update(update)
    assert bits(scene.tensors) == bits(versions[1])


def test_a_sender_that_failed_half_way_sends_all_weights_next(scene: Scene) -> None:
    versions = [weights(), moved(weights(), 0), moved(weights(), 1)]
    scene.update(scene.publish(0, versions[0]))
    (inner,) = scene.inner

    def fails(pieces: list[Slice], base: Any) -> Any:
        raise MemoryError("half-way")

    with pytest.MonkeyPatch.context():
        sent_otherwise(inner, fails)
        with pytest.raises(MemoryError):
            scene.publish(1, versions[1])
        del inner.__dict__["offer" if "offer" in inner.__dict__ else "send"]
    with pytest.raises(WeightsMoved):
        joined([each.send_whole(Version(0)) for each in scene.senders])
    update = scene.publish(2, versions[2])
    assert update.kind == "full"
    scene.update(update)
    assert bits(scene.tensors) == bits(versions[2])


def test_a_manifest_of_another_base_than_announced_is_refused(scene: Scene) -> None:
    scene.update(scene.publish(0, weights()))
    (inner,), served = scene.inner, scene.version
    sent_otherwise(inner, lambda pieces, onto: (pieces, AddedTo(replace(served, step=7), "delta")))
    with pytest.raises(PolicyMismatch, match="of kind 'delta' on policy@v7"):
        scene.update(replace(scene.publish(1, moved(weights(), 1)), base=served))
    assert bits(scene.tensors) == bits(weights())


# --- changes that are not what they claim to be --------------------------------------------------------------------------

Mutation = Callable[[list[Slice], AddedTo | None, list[Slice]], tuple[list[Slice], AddedTo | None]]


def one(name: str, change: Callable[[Any, list[Slice]], Slice]) -> Mutation:
    return lambda now, onto, old: ([change(s, old) if s.name == name else s for s in now], onto)


def packed(data: torch.Tensor) -> Callable[[Any, list[Slice]], Slice]:
    return lambda piece, old: replace(piece, tensor=data)


def named(pieces: list[Slice], name: str) -> Slice:
    return next(each for each in pieces if each.name == name)


def swapped(now: list[Slice], onto: AddedTo | None, old: list[Slice]) -> tuple[list[Slice], AddedTo | None]:
    tall, twin = named(now, "tall").tensor, named(now, "twin").tensor
    other = {"tall": twin, "twin": tall}
    return [replace(each, tensor=other.get(each.name, each.tensor)) for each in now], onto


MUTATIONS: dict[str, Mutation] = {
    "dropped": lambda now, onto, old: ([each for each in now if each.name != "tall"], onto),
    "swapped": swapped,
    "stale": one("tall", lambda piece, old: replace(piece, tensor=named(old, "tall").tensor)),
    "all stale": lambda now, onto, old: (old, onto),
    "left out": one("tall", packed(torch.empty(0, dtype=torch.uint8))),
    "half-written": one(
        "wide", lambda p, _: replace(p, tensor=p.tensor * (torch.arange(len(p.tensor)) < len(p.tensor) // 2))
    ),
    "cut short": one("wide", lambda p, _: replace(p, tensor=p.tensor[: len(p.tensor) // 2].clone())),
    "one bit": one("wide", lambda p, _: replace(p, tensor=flipped(p.tensor, -9))),
    "another dtype": one("tall", lambda p, _: replace(p, dtype=torch.float16)),
    "another tensor's rows": one("tall", lambda p, _: replace(p, size=(5, 300), shape=(5, 300))),
    "whole and old": one("tall", lambda p, _: Slice(p.name, p.shape, p.offset, weights()["tall"], p.total)),
    "another base": lambda now, onto, old: (now, rebased(onto, step=0)),
    "another base of the same name": lambda now, onto, old: (now, rebased(onto, fingerprint="0" * 32)),
    "no base": lambda now, onto, old: (now, None),
}


def rebased(onto: AddedTo | None, **changes: Any) -> AddedTo | None:
    return onto and replace(onto, base=replace(onto.base, **changes))


def flipped(data: torch.Tensor, at: int) -> torch.Tensor:
    found = data.clone()
    found[at] ^= 16
    return found


def across(names: Iterable[str]) -> list[Any]:
    """Every name with every transport, of which each name's first is in the fast suite."""
    return [
        pytest.param(transport, name, marks=[] if (i + j) % len(TRANSPORTS) == 0 else pytest.mark.slow)
        for i, name in enumerate(names)
        for j, transport in enumerate(TRANSPORTS)
    ]


@pytest.mark.parametrize(("scene", "name"), across(MUTATIONS), indirect=["scene"])
def test_changes_that_are_something_else_are_never_served(scene: Scene, name: str) -> None:
    """The sender, the receiver or the fingerprint of what came notices it, and the next version is whole."""
    versions, old = [weights()], list[Slice]()
    for step in range(4):
        versions.append(moved(versions[-1], step))
    (inner,), sick = scene.inner, False

    def change(pieces: list[Slice], onto: AddedTo | None) -> tuple[list[Slice], AddedTo | None]:
        if sick:
            return MUTATIONS[name](pieces, onto, old)
        old[:] = [replace(each, tensor=each.tensor.clone()) for each in pieces]
        return pieces, onto

    sent_otherwise(inner, change)
    for step in range(2):
        scene.update(scene.publish(step, versions[step]))
    assert all(isinstance(each, PackedSlice) for each in old if each.name in ("tall", "wide"))
    served, sick = scene.version, True
    with pytest.raises((PolicyMismatch, ValueError)) as raised:
        scene.update(scene.publish(2, versions[2]))
    assert not isinstance(raised.value, BaseMissing) or "another base" in name, raised.value
    assert scene.version == served and bits(scene.tensors) == bits(versions[1])
    sick = False
    for step in (3, 4):
        scene.bring(scene.publish(step, versions[step]))
        assert bits(scene.tensors) == bits(versions[step])
