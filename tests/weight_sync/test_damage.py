"""Weights that are not what they claim to be are noticed: by the receiver, or by the fingerprint of what came (I1)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tidemill.core.errors import PolicyMismatch
from tidemill.core.types import Version
from tidemill.core.weight_update import WeightPart, WeightUpdate
from tidemill.models.fingerprint import fingerprint, word_sum
from tidemill.models.weight_slices import Slice
from tidemill.weight_sync.checkpoint_transport import CheckpointReceiver, CheckpointSender
from tidemill.weight_sync.manifest import Block, WeightManifest, expect_whole
from tidemill.weight_sync.shared_memory_transport import SharedMemoryReceiver, SharedMemorySender

TENSORS = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(12.0, 24.0).view(3, 4), "n": torch.arange(5.0).half()}


def slices() -> list[Slice]:
    return [Slice.whole(name, tensor) for name, tensor in TENSORS.items()]


PRINT = fingerprint(slices())


def version(step: int, **more) -> Version:
    return Version(step, fingerprint=PRINT, **more)


def detected(published: WeightUpdate) -> bool:
    """As an engine does it."""
    receiver = SharedMemoryReceiver() if published.parts[0].transport == "shared_memory" else CheckpointReceiver()
    try:
        return fingerprint(receiver.receive(published)) != published.version.fingerprint
    except (PolicyMismatch, ValueError):
        return True


# --- shared memory: any byte of the slot ---------------------------------------------------------------------------------


def blocks_of(published: WeightUpdate) -> dict[str, Block]:
    raw = Path(published.parts[0].location).read_bytes()
    start, length = np.frombuffer(raw[24:40], "<u8").tolist()
    return {b.name: b for b in WeightManifest.decode(raw[start : start + length]).blocks}


def patch(published: WeightUpdate, at: int, data: bytes) -> None:
    with open(published.parts[0].location, "r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.fixture
def shared(tmp_path: Path):
    sender = SharedMemorySender(tmp_path, anonymous=False)
    published = sender.send(version(0), slices())
    assert not detected(published)
    yield sender, published
    sender.close()


@pytest.mark.parametrize("damage", [lambda raw: bytes([raw[0] ^ 1]) + raw[1:], lambda raw: raw[8:] + raw[:8]])
def test_a_changed_bit_and_swapped_elements_are_for_the_fingerprint_to_tell(shared, damage) -> None:
    _, published = shared
    block = blocks_of(published)["a"]
    patch(published, block.start, damage(Path(published.parts[0].location).read_bytes()[block.start : block.start + 16]))
    assert len(list(SharedMemoryReceiver().receive(published))) == 3
    assert detected(published)


def test_swapped_and_transposed_tensors(shared) -> None:
    _, published = shared
    blocks, raw = blocks_of(published), Path(published.parts[0].location).read_bytes()
    a, b = (raw[blocks[n].start : blocks[n].start + 48] for n in "ab")
    patch(published, blocks["a"].start, b)
    patch(published, blocks["b"].start, a)
    assert detected(published)
    patch(published, blocks["a"].start, TENSORS["a"].t().contiguous().numpy().tobytes())
    patch(published, blocks["b"].start, b)
    assert detected(published)


@pytest.mark.parametrize("size", [0, 10, 100, 4096, 4200])
def test_truncated(shared, size: int) -> None:
    _, published = shared
    os.truncate(published.parts[0].location, size)
    with pytest.raises(PolicyMismatch):
        list(SharedMemoryReceiver().receive(published))


def test_any_changed_byte_of_header_or_manifest(shared) -> None:
    _, published = shared
    raw = Path(published.parts[0].location).read_bytes()
    start, length = np.frombuffer(raw[24:40], "<u8").tolist()
    rng = np.random.default_rng(0)
    spots = [
        *range(8),
        *range(24, 72),
        *rng.integers(start, start + length, 40).tolist(),
    ]  # the nonce is free to be anything
    for at in spots:
        patch(published, at, bytes([raw[at] ^ 0x5A]))
        assert detected(published), at
        patch(published, at, raw[at : at + 1])
    assert not detected(published)


def test_slot_overwritten_under_a_reader(shared) -> None:
    sender, published = shared
    iterator = iter(SharedMemoryReceiver().receive(published))
    next(iterator)
    sender.send(version(1), slices())
    next(iterator)  # the other slot: no harm
    sender.send(version(2), slices())  # the same values, even so: nobody may count on that
    with pytest.raises(PolicyMismatch, match="overwritten"):
        list(iterator)


def test_overwritten_after_the_last_block(shared) -> None:
    sender, published = shared
    iterator = iter(SharedMemoryReceiver().receive(published))
    for _ in TENSORS:
        next(iterator)
    sender.send(version(1), slices())
    sender.send(version(2), slices())
    with pytest.raises(PolicyMismatch, match="overwritten"):
        next(iterator)


def test_half_written_slot_under_a_reader(shared) -> None:
    sender, published = shared
    sender.send(version(1), slices())
    iterator = iter(SharedMemoryReceiver().receive(published))
    next(iterator)

    def stuck():
        yield slices()[0]
        with pytest.raises(PolicyMismatch, match="overwritten"):
            next(iterator)
        yield from slices()[1:]

    sender.send(version(2), stuck())


def test_files_of_dead_senders_are_removed_and_others_left(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from tidemill.weight_sync.shared_memory_transport import SharedMemorySender\n"
        "s = SharedMemorySender(Path(sys.argv[1]), anonymous=False); os.kill(os.getpid(), signal.SIGKILL)"
    )
    (tmp_path / "mine.slot").write_text("a user's file")
    alive = SharedMemorySender(tmp_path, anonymous=False)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 5
    after = SharedMemorySender(tmp_path, anonymous=False)
    assert len(list(tmp_path.iterdir())) == 5  # two of `alive`, two of `after`, the user's
    assert not detected(alive.send(version(0), slices()))
    alive.close()
    after.close()
    assert [p.name for p in tmp_path.iterdir()] == ["mine.slot"]


# --- checkpoint ----------------------------------------------------------------------------------------------------------


def corrupt(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)


def rewrite(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(file: Path) -> None:
        tensors = {k: v.clone() for k, v in load_file(file).items()}
        change(tensors)
        save_file(tensors, file)

    return apply


DAMAGE: dict[str, Callable[[Path], object]] = {
    "corrupted": corrupt,
    "truncated": lambda f: os.truncate(f, f.stat().st_size - 8),
    "emptied": lambda f: os.truncate(f, 0),
    "missing": Path.unlink,
    "dropped": rewrite(lambda t: t.pop("a")),
    "extra": rewrite(lambda t: t.update(z=torch.ones(2))),
    "swapped": rewrite(lambda t: t.update(a=t["b"], b=t["a"])),
    "transposed": rewrite(lambda t: t.update(a=t["a"].t().contiguous())),
    "reshaped": rewrite(lambda t: t.update(a=t["a"].view(4, 3))),
    "recast": rewrite(lambda t: t.update(n=t["n"].bfloat16())),
    "reordered": rewrite(lambda t: t.update(a=t["a"].flatten().flip(0).view(3, 4))),
    "manifest": lambda f: (f.parent / "manifest.json").write_bytes(b"{}"),
    "no manifest": lambda f: (f.parent / "manifest.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint(tmp_path: Path, damage: str) -> None:
    published = CheckpointSender(tmp_path).send(version(0), slices())
    assert not detected(published)
    DAMAGE[damage](Path(published.parts[0].location) / "part-0000.safetensors")
    assert detected(published)


def test_manifest_of_another_version(tmp_path: Path) -> None:
    sender = CheckpointSender(tmp_path)
    first, second = (sender.send(version(v), slices()) for v in range(2))
    manifests = [Path(p.parts[0].location) / "manifest.json" for p in (first, second)]
    manifests[1].write_bytes(manifests[0].read_bytes())
    with pytest.raises(PolicyMismatch, match="announced"):
        list(CheckpointReceiver().receive(second))


def test_retention_spares_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "v000000.0").mkdir()
    (tmp_path / "v000000.0" / "manifest.json").write_text("a user's own")
    (tmp_path / "notes").mkdir()
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".tidemill-weights").touch()
    (tmp_path / "v000001.0").symlink_to(elsewhere)
    sender = CheckpointSender(tmp_path, keep=2)
    for step in range(2, 7):
        sender.send(version(step), slices())
    sender.send(version(1, incarnation=1), slices())
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"v000000.0", "v000001.0", "notes", "v000006.0", "v000001.1"}
    with pytest.raises(FileExistsError):
        sender.send(version(0), slices())
    sender.close()
    assert {p.name for p in tmp_path.iterdir()} == {"v000000.0", "v000001.0", "notes"}
    assert (elsewhere / ".tidemill-weights").exists()


def test_what_a_killed_sender_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".sending-dead").mkdir()
    (tmp_path / ".sending-dead" / ".tidemill-weights").touch()
    (tmp_path / ".sending-user").mkdir()
    (tmp_path / ".sending-user" / "notes").touch()
    CheckpointSender(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [".sending-user"]


def test_a_version_whose_removal_was_cut_off_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = CheckpointSender(tmp_path)
    sender.send(version(0), slices())

    def cut(_: Path) -> None:
        raise OSError("cut off")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", cut)
        with pytest.raises(OSError, match="cut off"):
            sender.close()
    (left,) = tmp_path.iterdir()
    assert not list(left.iterdir()), "all else was removed"
    CheckpointSender(tmp_path).send(version(0), slices())
    assert [p.name for p in tmp_path.iterdir()] == ["v000000.0"]


def test_one_folder_one_policy(tmp_path: Path) -> None:
    sender = CheckpointSender(tmp_path)
    sender.send(version(0), slices())
    with pytest.raises(ValueError, match="folder of its own"):
        sender.send(version(0, policy="teacher"), slices())


# --- manifests from elsewhere --------------------------------------------------------------------------------------------

GOOD = WeightManifest(Version(0, fingerprint="f"), [Block.of(s) for s in slices()])


@given(st.binary(max_size=200))
def test_random_bytes_are_no_manifest(raw: bytes) -> None:
    with pytest.raises(PolicyMismatch):
        WeightManifest.decode(raw)


@given(st.data())
def test_changed_manifests_are_refused_or_sound(data: st.DataObject) -> None:
    raw = bytearray(GOOD.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        manifest = WeightManifest.decode(bytes(raw))
    except PolicyMismatch:
        return
    manifest.check()


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "object"},
        {"size": (2, 4)},
        {"offset": (1, 0)},
        {"offset": (0,)},
        {"shape": (1 << 60, 1 << 60), "size": (1 << 60, 1 << 60)},
        {"shape": (3, 4, 1)},
        {"name": "b"},
    ],
)
def test_unsound_manifests_are_refused(change: dict) -> None:
    blocks = [msgspec.structs.replace(GOOD.blocks[0], **change), *GOOD.blocks[1:]]
    with pytest.raises(PolicyMismatch):
        WeightManifest.decode(msgspec.structs.replace(GOOD, blocks=blocks).encode())


@pytest.mark.parametrize("change", [{"format": "tidemill-weights-0"}, {"blocks": []}, {"blocks": [GOOD.blocks[0]] * 2000}])
def test_unsound_lists_are_refused(change: dict) -> None:
    with pytest.raises(PolicyMismatch):
        WeightManifest.decode(msgspec.structs.replace(GOOD, **change).encode())


def test_blocks_that_follow_one_another_hide_no_overlap() -> None:
    rows = [Block("w", (8, 3), (at, 0), (2, 3), "float32", None) for at in (0, 2, 4, 6)]
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0)):
        WeightManifest(Version(0, fingerprint="f"), [rows[i] for i in order]).check()
    with pytest.raises(ValueError, match="given twice"):
        WeightManifest(Version(0, fingerprint="f"), [rows[0], rows[2], rows[2], rows[3]]).check()
    for offset, size in (((1, 0), (1, 3)), ((3, 2), (2, 1)), ((7, 0), (1, 1))):
        with pytest.raises(ValueError, match="given twice"):
            WeightManifest(Version(0, fingerprint="f"), [*rows, Block("w", (8, 3), offset, size, "float32", None)]).check()
    columns = [Block("w", (8, 3), (at, column), (4, 1), "float32", None) for column in range(3) for at in (4, 0)]
    WeightManifest(Version(0, fingerprint="f"), columns).check()
    with pytest.raises(ValueError, match="20 of its 24"):
        WeightManifest(Version(0, fingerprint="f"), columns[1:]).check()


def test_a_version_without_a_fingerprint_is_no_version() -> None:
    with pytest.raises(PolicyMismatch, match="none"):
        expect_whole([WeightManifest(Version(0), GOOD.blocks)], WeightUpdate(Version(0), (WeightPart("checkpoint", "x"),)))


@given(st.binary(max_size=40))
def test_word_sum(raw: bytes) -> None:
    padded = raw + bytes(-len(raw) % 4)
    expected = sum(int.from_bytes(padded[i : i + 4], "little") for i in range(0, len(padded), 4)) % 2**64
    assert word_sum(torch.tensor(list(raw), dtype=torch.uint8)) == expected
