"""One contract for every transport: what is received is what was sent, or nothing is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from live_cases import SendsWhenRead, received

from tidemill.core.errors import PolicyMismatch
from tidemill.core.types import Version
from tidemill.core.weight_update import WeightUpdate
from tidemill.models.architecture import Architecture
from tidemill.models.decoder import Decoder
from tidemill.models.fingerprint import Fingerprint, fingerprint
from tidemill.models.hf_weights import load_slices, serving_slices
from tidemill.models.weight_slices import LiveSender, Receiver, Sender, Slice
from tidemill.weight_sync.checkpoint_transport import CheckpointSender
from tidemill.weight_sync.collective_transport import CollectiveSender
from tidemill.weight_sync.direct_transport import DirectSender
from tidemill.weight_sync.shared_memory_transport import SharedMemoryReceiver, SharedMemorySender
from tidemill.weight_sync.sync_settings import SyncSettings
from tidemill.weight_sync.transport import make_receiver, make_sender

TRANSPORTS: dict[str, Callable[[Path], Sender]] = {
    "anonymous": SharedMemorySender,
    "named": lambda folder: SharedMemorySender(folder, anonymous=False),
    "checkpoint": CheckpointSender,
    "parts": lambda folder: CheckpointSender(folder, part_bytes=256),  # several files
}
LIVE: dict[str, Callable[[Path], Sender]] = {
    "collective": lambda _: SendsWhenRead(CollectiveSender()),
    "direct": lambda _: SendsWhenRead(DirectSender()),
}


@pytest.fixture(params=TRANSPORTS | LIVE)
def sender(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sender]:
    made = (TRANSPORTS | LIVE)[request.param](tmp_path / "weights")
    yield made
    made.close()


@pytest.fixture(params=TRANSPORTS)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sender]:
    """A sender whose versions lie somewhere, to be read later."""
    made = TRANSPORTS[request.param](tmp_path / "weights")
    yield made
    made.close()


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    fused = torch.randn(12, 8, generator=g)
    return {
        "a.weight": torch.randn(7, 5, generator=g),
        "b.weight": torch.randn(16, 3, generator=g).to(torch.bfloat16),
        "c.weight": torch.randn(9, generator=g).to(torch.float16),
        "d.twin": torch.randn(7, 5, generator=g),
        "q": fused[:4],  # views of one storage, as a fused projection gives them
        "k": fused[4:],
        "transposed": torch.randn(6, 4, generator=g).t(),
        "scalar": torch.tensor(1.5 + seed),
        "empty": torch.empty(0, 3),
        "odd": torch.randint(0, 255, (13,), dtype=torch.uint8, generator=g),
    }


def whole(tensors: dict[str, torch.Tensor]) -> list[Slice]:
    return [Slice.whole(name, tensor) for name, tensor in tensors.items()]


def cut(tensors: dict[str, torch.Tensor]) -> list[Slice]:
    """Rows in two or three blocks, the last one first."""
    pieces = []
    for name, tensor in tensors.items():
        if tensor.ndim == 0 or len(tensor) < 4:
            pieces.append(Slice.whole(name, tensor))
            continue
        for rows in reversed(torch.arange(len(tensor)).split(3)):
            at = (int(rows[0]), *(0,) * (tensor.ndim - 1))
            pieces.append(Slice(name, tuple(tensor.shape), at, tensor[rows]))
    return pieces


def send(sender: Sender, version: Version, slices: Iterable[Slice]) -> WeightUpdate:
    """As a trainer does it: announced with what they come to."""
    pieces = list(slices)
    return sender.send(replace(version, fingerprint=fingerprint(pieces)), iter(pieces))


def receive(published: WeightUpdate, receiver: Receiver | None = None) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors put together, and the fingerprint of what came."""
    receiver = receiver or make_receiver(published.parts[0].transport)
    total, tensors = Fingerprint(), {}
    for piece in received(published, receiver.receive):
        total.add(piece)
        into = tensors.setdefault(piece.name, torch.full(piece.shape, 77).to(piece.tensor.dtype))
        block = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.tensor.shape, strict=True))
        into[block] = piece.tensor
    return tensors, total.hexdigest()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("shape_of", [whole, cut])
def test_round_trip(sender: Sender, shape_of: Callable[..., list[Slice]]) -> None:
    published = send(sender, Version(3, incarnation=1), shape_of(weights()))
    got, digest = receive(published)
    assert same(got, weights())
    assert digest == published.version.fingerprint == fingerprint(whole(weights()))
    assert (published.version.step, published.version.incarnation) == (3, 1)
    assert published.bytes == sum(t.nbytes for t in weights().values())


def test_a_kind_that_it_does_not_take_is_refused_by_name(sender: Sender) -> None:
    published, kind = send(sender, Version(1), whole(weights())), "unknown"
    takes = f"the transport '{published.parts[0].transport}' takes .* 'full' or 'delta' or 'adapter', but .* '{kind}'"
    with pytest.raises(ValueError, match=takes):
        receive(replace(published, kind=kind, base=Version(0)))  # type: ignore[arg-type]


def test_an_update_of_another_kind_than_announced_is_refused(sender: Sender) -> None:
    published = send(sender, Version(1), whole(weights()))
    with pytest.raises(PolicyMismatch, match="holds an update of kind 'full', announced was 'adapter' on policy@v0"):
        receive(replace(published, kind="adapter", base=Version(0)))


def test_a_part_of_another_transport_is_refused_by_name(sender: Sender) -> None:
    published = send(sender, Version(1), whole(weights()))
    receiver = make_receiver(published.parts[0].transport)
    with pytest.raises(PolicyMismatch, match="'pigeon'"):
        receive(replace(published, parts=(replace(published.parts[0], transport="pigeon"),)), receiver)


def dealt(pieces: list[Slice], folder: Path, ranks: int, step: int, seed: int) -> tuple[WeightUpdate, list[Sender]]:
    """Slices sent by as many senders, each of which holds some at random."""
    version = Version(step, fingerprint=fingerprint(pieces))
    owner = np.random.default_rng(seed).permutation(np.arange(len(pieces)) % ranks)
    senders: list[Sender] = [SharedMemorySender(folder, partial=True) for _ in range(ranks)]
    held = [[piece for piece, at in zip(pieces, owner, strict=True) if at == rank] for rank in range(ranks)]
    sent = [each.send(version, slices) for each, slices in zip(senders, held, strict=True)]
    return WeightUpdate(version, tuple(part for update in sent for part in update.parts)), senders


@pytest.mark.parametrize(("shape_of", "ranks"), [(whole, 2), (cut, 2), (cut, 5)])
def test_several_parts_are_the_whole_or_refused(tmp_path: Path, shape_of: Callable[..., list[Slice]], ranks: int) -> None:
    receiver, pieces = make_receiver("shared_memory"), shape_of(weights())
    for seed in range(3):
        update, senders = dealt(pieces, tmp_path, ranks, step=seed, seed=seed)
        got, digest = receive(update, receiver)
        assert same(got, weights()) and digest == update.version.fingerprint
        assert update.bytes == sum(t.nbytes for t in weights().values()) and len(update.parts) == ranks
        for rank in range(ranks):
            others = (*update.parts[:rank], *update.parts[rank + 1 :])
            assert not arrives(replace(update, parts=others)), "a part is missing"
            assert not arrives(replace(update, parts=(*others, others[0]))), "a part came twice"
            senders[rank].send(replace(update.version, step=seed + 1), iter(pieces[:1]))
            assert arrives(update), "the part of the version before stays readable"
            stale = senders[rank].send(replace(update.version, step=seed + 2), iter(pieces[:1]))
            assert not arrives(replace(update, parts=(*others, *stale.parts))), "a part is of another version"
            with pytest.raises(PolicyMismatch):
                receive(update, receiver)  # its place was taken
            update, senders = dealt(pieces, tmp_path, ranks, step=seed, seed=seed)
        for each in senders:
            each.close()


def arrives(update: WeightUpdate) -> bool:
    """As an engine decides it."""
    try:
        return receive(update)[1] == update.version.fingerprint
    except PolicyMismatch:
        return False


@pytest.mark.parametrize("transport", ["shared_memory", "checkpoint"])
def test_parts_of_several_senders_are_one_version(tmp_path: Path, transport: str) -> None:
    """What is missing of them, or comes twice, is said; a part alone is no version."""
    whole_version = Version(1, fingerprint=fingerprint(whole(weights())))
    halves = [[s for i, s in enumerate(cut(weights())) if i % 2 == part] for part in range(2)]
    senders = [make_sender(SyncSettings(transport=transport), tmp_path / str(part), partial=True) for part in range(2)]
    updates = [sender.send(whole_version, half) for sender, half in zip(senders, halves, strict=True)]
    together = replace(updates[0], parts=tuple(part for update in updates for part in update.parts))
    got, digest = receive(together)
    assert same(got, weights()) and digest == whole_version.fingerprint
    for parts, told in ((together.parts[:1], "elements were given"), (together.parts * 2, "given twice")):
        with pytest.raises(PolicyMismatch, match=told):
            receive(replace(together, parts=parts))
    for sender in senders:
        sender.close()


def test_two_receivers_and_many_versions(sender: Sender) -> None:
    receivers = None
    digests = set()
    for step in range(5):
        published = send(sender, Version(step), (s for s in cut(weights(step))))
        receivers = receivers or [make_receiver(published.parts[0].transport) for _ in range(2)]
        for receiver in receivers:
            got, digest = receive(published, receiver)
            assert same(got, weights(step))
            assert digest == published.version.fingerprint
        digests.add(digest)
    assert len(digests) == 5
    for receiver in receivers or ():
        receiver.close()


def test_sizes_may_change_between_versions(sender: Sender) -> None:
    receiver = None  # one for all, so that what it keeps of a slot meets the slot's next size
    for step, rows in enumerate((3, 40, 4000, 2, 9000, 20, 7)):
        tensors = {"w": torch.arange(rows * 3.0).view(rows, 3) + step, "v": torch.ones(step + 1)}
        published = send(sender, Version(step), whole(tensors))
        receiver = receiver or make_receiver(published.parts[0].transport)
        assert same(receive(published, receiver)[0], tensors)


def test_names_shapes_and_dtypes_may_change_in_the_same_bytes(sender: Sender) -> None:
    """What a receiver remembers of a slot is of one layout."""
    receiver, numbers = None, torch.arange(48.0)
    for step in range(8):
        tensors = {"a": numbers[:24].view(4, 6) + step, "b": numbers[24:] - step}
        if step >= 2:
            tensors = {"a": tensors["a"].view(6, 4), "b": tensors["b"]}
        if step >= 4:
            tensors = {"a": tensors["b"], "b": tensors["a"].to(torch.int32)}
        if step >= 6:
            tensors = {"a": tensors["a"], "c": tensors["b"]}
        published = send(sender, Version(step), whole(tensors))
        receiver = receiver or make_receiver(published.parts[0].transport)
        assert same(receive(published, receiver)[0], tensors), step


def test_a_longer_manifest_does_not_cost_a_mapping(tmp_path: Path) -> None:
    """The number of version 10 takes a byte more than that of 8, which the same slot held."""
    sender, receiver = SharedMemorySender(tmp_path), SharedMemoryReceiver()
    sizes, mappings = [], []
    for step in range(7, 11):
        tensors = weights(step)
        published = send(sender, Version(step), whole(tensors))
        for piece in receiver.receive(published):
            assert torch.equal(piece.tensor, tensors[piece.name])
        sizes.append(os.stat(published.parts[0].location).st_size)
        mappings.append(list(receiver._mappings.values())[-1])
    assert sizes[3] > sizes[1], "no slot has grown"
    assert mappings[0] is mappings[2] and mappings[1] is mappings[3] and mappings[0] is not mappings[1]
    receiver.close()
    sender.close()


def test_the_version_before_stays_readable(stored: Sender) -> None:
    first = send(stored, Version(0), whole(weights(0)))
    second = send(stored, Version(1), whole(weights(1)))
    assert same(receive(first)[0], weights(0))
    assert same(receive(second)[0], weights(1))


def test_an_old_version_is_not_taken_for_a_new_one(sender: Sender) -> None:
    published = [send(sender, Version(step), whole(weights(step))) for step in range(3)]
    with pytest.raises(PolicyMismatch):
        receive(published[0])  # its place has been taken, or it is gone
    for wrong in (
        replace(published[2].version, step=1),
        replace(published[2].version, incarnation=1),
        replace(published[2].version, policy="teacher"),
        replace(published[2].version, fingerprint="0" * 32),
        replace(published[2].version, fingerprint=""),
    ):
        with pytest.raises(PolicyMismatch, match="announced"):
            receive(replace(published[2], version=wrong))
    if not published[2].live:  # whose place is the sender's store, for every version
        with pytest.raises(PolicyMismatch):
            receive(replace(published[2], parts=published[1].parts))


def test_the_same_version_may_be_sent_again(sender: Sender) -> None:
    send(sender, Version(4), whole(weights(0)))
    again = send(sender, Version(4), whole(weights(1)))
    assert same(receive(again)[0], weights(1))


def test_failed_send_is_never_visible(stored: Sender) -> None:
    good = send(stored, Version(0), whole(weights(0)))
    send(stored, Version(1), whole(weights(1)))
    kept = send(stored, Version(2), whole(weights(2)))

    def failing() -> Iterable[Slice]:
        yield from whole(weights(3))[:3]
        raise MemoryError("half-way")

    for _ in range(3):
        with pytest.raises(MemoryError):
            stored.send(Version(3, fingerprint="f"), failing())
        assert same(receive(kept)[0], weights(2))
        for parts in (good.parts, kept.parts):
            with pytest.raises(PolicyMismatch):
                receive(replace(kept, version=replace(kept.version, step=3), parts=parts))
    assert same(receive(send(stored, Version(3), whole(weights(3))))[0], weights(3))


@pytest.mark.parametrize("case", ["gap", "twice", "nothing", "outside", "complex"])
def test_only_whole_tensors_can_be_sent(sender: Sender, case: str) -> None:
    w = torch.arange(12.0).view(4, 3)
    slices = {
        "gap": [Slice("w", (4, 3), (0, 0), w[:2])],
        "twice": [Slice("w", (4, 3), (0, 0), w[:3]), Slice("w", (4, 3), (2, 0), w[2:3])],
        "nothing": [],
        "outside": [Slice("w", (4, 3), (2, 0), w)],
        "complex": [Slice.whole("w", w.to(torch.complex64))],
    }[case]
    with pytest.raises(ValueError):
        sender.send(Version(0, fingerprint="f"), slices)


@pytest.mark.runs
def test_receiver_in_another_process(stored: Sender) -> None:
    script = (
        "import sys, msgspec; from tidemill.core.weight_update import WeightUpdate\n"
        "from tidemill.weight_sync.transport import make_receiver\n"
        "from tidemill.models.fingerprint import fingerprint\n"
        "p = msgspec.json.decode(sys.argv[1], type=WeightUpdate)\n"
        "print(fingerprint(make_receiver(p.parts[0].transport).receive(p)))"
    )
    published = send(stored, Version(1), cut(weights()))
    argument = msgspec.json.encode(published).decode()
    done = subprocess.run([sys.executable, "-c", script, argument], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == published.version.fingerprint, done.stderr
    assert done.stderr == ""  # no warning of read-only memory, no tracker complaining


def test_close_leaves_nothing(stored: Sender, tmp_path: Path) -> None:
    published = send(stored, Version(0), whole(weights()))
    receive(published)
    stored.close()
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
    assert not os.path.exists(published.parts[0].location)
    with pytest.raises(PolicyMismatch):
        receive(published)


def test_an_abandoned_receive_leaves_no_descriptor(stored: Sender) -> None:
    published = send(stored, Version(0), whole(weights()))
    receiver = make_receiver(published.parts[0].transport)
    list(receiver.receive(published))
    before = len(os.listdir("/dev/fd"))
    for _ in range(5):
        iterator = iter(receiver.receive(published))
        next(iterator)
        del iterator
    assert len(os.listdir("/dev/fd")) <= before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_arrives_as_it_was_served(sender: Sender, dtype: torch.dtype) -> None:
    raw = {"model_type": "qwen3", "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 12}
    arch = Architecture.from_dict(raw | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4})
    trained, serving = Decoder(arch), Decoder(arch).to(dtype)
    trained.initialise(torch.Generator().manual_seed(1))
    published = send(sender, Version(1), serving_slices(trained, dtype))
    load_slices(serving, received(published, make_receiver(published.parts[0].transport).receive))
    assert fingerprint(serving_slices(serving, dtype)) == published.version.fingerprint
    assert same(serving.state_dict(), trained.to(dtype).state_dict())


def test_factories_follow_the_settings(tmp_path: Path) -> None:
    for transport in ("shared_memory", "checkpoint", "collective", "direct"):
        settings = SyncSettings(transport=transport)
        made = make_sender(settings, tmp_path / transport)
        assert settings.live == isinstance(made, LiveSender)
        assert settings.same_host == (transport != "checkpoint")
        made = SendsWhenRead(made) if isinstance(made, LiveSender) else made
        published = send(made, Version(0), whole(weights()))
        assert published.parts[0].transport == transport
        assert same(receive(published)[0], weights())
        made.close()
    with pytest.raises(ValueError, match="transport"):
        make_receiver("pigeon")
    with pytest.raises(ValueError):
        SyncSettings(transport="pigeon")


def test_settings_load_without_torch() -> None:
    code = "import sys, tidemill.weight_sync.sync_settings; print(json.dumps('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", f"import json; {code}"], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) is False


@pytest.mark.gpu
def test_from_a_device_through_memory_that_it_writes_to_itself(tmp_path: Path) -> None:
    sender, receiver = SharedMemorySender(tmp_path), make_receiver("shared_memory")
    for step in range(6):  # the first send of each slot makes its memory
        tensors = {name: tensor.cuda() for name, tensor in weights(step).items()}
        published = sender.send(Version(step, fingerprint=fingerprint(whole(tensors))), whole(tensors))
        for item in receiver.receive(published):
            assert torch.equal(item.tensor, tensors[item.name].cpu()), item.name
    held = [slot._pinned for slot in sender._slots]
    assert all(each is not None and each.held for each in held)
    sender.close()
    receiver.close()
    assert not any(each.held for each in held if each is not None)
