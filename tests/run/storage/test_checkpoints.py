"""Checkpoints on a real disk, with a trainer whose state is a few bytes: whole or not there, found again, never lost."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
import shutil
import threading
import tracemalloc
from hashlib import blake2b
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tidemill.core import atomic_files, fault_injection
from tidemill.core.errors import CheckpointError
from tidemill.ledger.ledger import SqliteLedger
from tidemill.run.storage import checkpoint_manifest, checkpoints
from tidemill.run.storage.checkpoint_manifest import MANIFEST, MAX_BYTES, CheckpointManifest, Position, read_manifest, verify
from tidemill.run.storage.checkpoints import MARKER, Checkpoints


class Bytes:
    """A trainer. Its state is a number, which training changes."""

    def __init__(self) -> None:
        self.state, self.copy, self.full = 0, -1, False

    async def snapshot(self) -> None:
        self.copy = self.state

    async def save(self, folder: str) -> None:
        await asyncio.sleep(0)  # others run meanwhile
        Path(folder).mkdir()
        (Path(folder) / "weights").write_text(f"{self.copy}\n" * 100)
        if self.full:
            raise ValueError(f"{folder}: No space left on device")  # a CheckpointError, as it comes out of a process
        (Path(folder) / "optimizer").write_bytes(bytes(2 << 20))


class Place:
    """A run's folder as checkpoints see it."""

    def __init__(self, path: Path) -> None:
        self.folder, self.notes = path / "checkpoints", list[str]()
        self.folder.mkdir(parents=True)
        self.ledger, self.trainer = SqliteLedger(path, durability="process"), Bytes()

    def checkpoints(self, keep: int = 10, keep_every: int = 0, replays: int = 0) -> Checkpoints:
        return Checkpoints(self.folder, self.ledger, self.notes.append, keep, keep_every, replays)

    async def save(self, *steps: int, keep: int = 10, keep_every: int = 0, replays: int = 0) -> None:
        these = self.checkpoints(keep, keep_every, replays)
        for step in steps:
            self.trainer.state = step
            await (await these.begin(self.trainer, Position(step, 0, 4 * step)))  # type: ignore[arg-type]

    async def newest(self) -> tuple[Path, Position] | None:
        return await self.checkpoints().newest()

    def names(self) -> list[str]:
        return sorted(p.name for p in self.folder.iterdir())


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    yield place
    place.ledger.close()


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and not p.is_symlink()}


async def test_what_is_written_is_the_state_at_the_beginning(place):
    these, trainer = place.checkpoints(), place.trainer
    trainer.state = 4
    write = await these.begin(trainer, Position(4, 1, 17))
    assert place.names() == [], "only the copy was waited for"
    trainer.state = 5
    await write
    assert (place.folder / "step-000004" / "trainer" / "weights").read_text().startswith("4\n")
    assert await place.newest() == (place.folder / "step-000004", Position(4, 1, 17))
    named = read_manifest(place.folder / "step-000004").files
    assert set(named) == {MARKER, "trainer/weights", "trainer/optimizer"} and named["trainer/optimizer"].size == 2 << 20
    assert [e.detail for e in place.ledger.events("checkpoint")] == [{"step": 4}]


async def test_everything_is_on_the_medium_before_the_name_and_the_name_before_the_ledger(place, monkeypatch):
    happened: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        happened.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), place.folder))
        real(descriptor)

    def rename(a: Path, b: Path) -> None:
        happened.append(f"rename {b.name}")
        os.replace(a, b)

    monkeypatch.setattr(atomic_files.os, "fsync", fsync)
    monkeypatch.setattr(checkpoints.os, "rename", rename)
    monkeypatch.setattr(place.ledger, "event", lambda kind, detail: happened.append(kind))
    await place.save(1)
    at, inside = happened.index("rename step-000001"), "step-000001.partial"
    expected = {inside, *(f"{inside}/{n}" for n in (MARKER, MANIFEST, "trainer", "trainer/weights", "trainer/optimizer"))}
    assert set(happened[:at]) == expected and happened[at + 1 :] == [".", "checkpoint"]


def flip(path: Path, at: int = 120) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def replace(path: Path, old: bytes, new: bytes) -> None:
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))


def edit(folder: Path, change) -> None:
    tree = json.loads((folder / MANIFEST).read_text())
    change(tree)
    own = blake2b(msgspec.json.encode(tree | {"blake2b": ""}), digest_size=32).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(tree | {"blake2b": own}))


def as_pipe(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)


def as_link(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent.parent / "elsewhere")
    (folder / name).symlink_to(folder.parent.parent / "elsewhere")


W = "trainer/weights"
DAMAGE = {
    "a bit of a file": (lambda f: flip(f / "trainer" / "optimizer", 1 << 20), "optimizer is damaged"),
    "torn file": (lambda f: os.truncate(f / W, 50), "weights holds 50 bytes, its manifest says 200"),
    "empty file": (lambda f: os.truncate(f / W, 0), "weights holds 0 bytes"),
    "missing file": (lambda f: (f / W).unlink(), f"1 files are missing, among them '{W}'"),
    "missing trainer": (lambda f: shutil.rmtree(f / "trainer"), "2 files are missing"),
    "missing marker": (lambda f: (f / MARKER).unlink(), f"missing, among them '{MARKER}'"),
    "another file": (lambda f: (f / "trainer" / "weights.index").write_text("x"), "weights.index does not belong there"),
    "another link": (lambda f: (f / "trainer" / "x").symlink_to("weights"), "x does not belong there"),
    "file as link": (lambda f: as_link(f, W), "missing"),
    "folder as link": (lambda f: as_link(f, "trainer"), "missing"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "manifest.json is not readable"),
    "torn manifest": (lambda f: os.truncate(f / MANIFEST, 100), "manifest.json is not readable"),
    "empty manifest": (lambda f: os.truncate(f / MANIFEST, 0), "manifest.json is not readable"),
    "zeroed manifest": (lambda f: (f / MANIFEST).write_bytes(bytes(500)), "manifest.json is not readable"),
    "manifest as link": (lambda f: as_link(f, MANIFEST), "manifest.json is not readable"),
    "manifest as pipe": (as_pipe, "manifest.json is not readable"),
    "long manifest": (lambda f: (f / MANIFEST).write_bytes(b" " * (MAX_BYTES + 1)), "longer than"),
    "deep manifest": (lambda f: (f / MANIFEST).write_bytes(b"[" * MAX_BYTES), "not readable"),
    "a digit of the manifest": (
        lambda f: replace(f / MANIFEST, b'"next_id": 8', b'"next_id": 9'),
        "manifest.json is damaged",
    ),
    "other step": (lambda f: edit(f, lambda t: t.update(step=7)), "is that of step 7"),
    "other format": (lambda f: edit(f, lambda t: t.update(format=1)), r"\$.format"),
    "other field": (lambda f: edit(f, lambda t: t.update(more=1)), "unknown field"),
    "negative": (lambda f: edit(f, lambda t: t.update(next_id=-1)), "next_id"),
    "no files": (lambda f: edit(f, lambda t: t.update(files={})), "files"),
    "other hash": (lambda f: edit(f, lambda t: t["files"][W].update(blake2b="0" * 64)), "weights is damaged"),
    "no hash": (lambda f: edit(f, lambda t: t["files"][W].update(blake2b="")), "blake2b"),
    "absolute path": (lambda f: edit(f, lambda t: t["files"].update({"/etc/passwd": t["files"][W]})), "'/etc/passwd'"),
    "path upwards": (lambda f: edit(f, lambda t: t["files"].update({"../../x": t["files"][W]})), "'../../x'"),
    "path with NUL": (lambda f: edit(f, lambda t: t["files"].update({"a\0b": t["files"][W]})), "missing"),
    "long path": (lambda f: edit(f, lambda t: t["files"].update({"x/" * 9000: t["files"][W]})), "missing"),
    "many files": (lambda f: edit(f, lambda t: t["files"].update({str(i): t["files"][W] for i in range(10001)})), "files"),
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_damaged_one_is_told_of_set_aside_and_the_older_one_is_used(place, damage):
    change, message = DAMAGE[damage]
    await place.save(1, 2)
    folder = place.folder / "step-000002"
    change(folder)
    before = files(folder) if damage != "manifest as pipe" else None
    with pytest.raises(CheckpointError, match=message):
        verify(folder)
    assert await place.newest() == (place.folder / "step-000001", Position(1, 0, 4))
    assert place.names() == ["step-000001", "step-000002.damaged"]
    assert before is None or files(place.folder / "step-000002.damaged") == before, "a damaged one is kept as it is"
    (event,) = place.ledger.events("checkpoint_invalid")
    assert event.detail["folder"] == "step-000002" and event.detail["reason"] in place.notes[0]
    assert any("older checkpoint step-000001" in note for note in place.notes)
    await place.save(2)  # its place is free again
    assert (await place.newest())[1].step == 2


async def test_the_newest_is_by_number_and_damaged_ones_keep_their_names(place):
    await place.save(999_999, 1_000_000)
    assert (await place.newest())[1].step == 1_000_000
    for _ in range(2):
        flip(place.folder / "step-1000000" / W)
        assert (await place.newest())[1].step == 999_999
        await place.save(1_000_000)
    assert [n for n in place.names() if "damaged" in n] == ["step-1000000.damaged", "step-1000000.damaged-2"]


async def test_without_a_whole_one_the_run_is_refused_and_nothing_is_touched(place):
    await place.save(1, 2)
    for step in (1, 2):
        flip(place.folder / f"step-00000{step}" / W)
    before = files(place.folder)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"none of them is usable.*weights.*weights.*another run_dir"):
            await place.newest()
        assert files(place.folder) == before
    shutil.rmtree(place.folder)  # the ledger knows
    with pytest.raises(CheckpointError, match="none of them is usable"):
        await place.newest()


async def test_what_was_set_aside_counts_as_one_there_has_been(place):
    (place.folder / "step-000002.damaged").mkdir()
    with pytest.raises(CheckpointError, match="none of them is usable"):
        await place.newest()


async def test_a_run_that_never_had_one_begins_at_its_beginning(place):
    assert await place.newest() is None and place.notes == []


@pytest.mark.parametrize(
    ("keep", "every", "replays", "kept", "bound"),
    [
        (1, 0, 0, [8], 8),
        (3, 0, 0, [6, 7, 8], 6),
        (2, 3, 0, [3, 6, 7, 8], 7),
        (9, 0, 0, [*range(1, 9)], 1),
        (3, 0, 4, [6, 7, 8], 2),
        (1, 0, 99, [8], 0),
    ],
)
async def test_retention(place, monkeypatch, keep, every, replays, kept, bound):
    """Trajectories are kept from the oldest checkpoint on that a resume would fall back on, and those that a step may train
    once more."""
    bounds = []
    monkeypatch.setattr(place.ledger, "retain", lambda checkpoint: bounds.append(checkpoint))
    await place.save(*range(1, 9), keep=keep, keep_every=every, replays=replays)
    assert place.names() == [f"step-{step:06d}" for step in kept] and bounds[-1] == bound


async def test_a_damaged_one_does_not_count_among_those_that_are_kept(place):
    await place.save(1, 2)
    (place.folder / "step-000002" / MANIFEST).unlink()
    await place.save(3, keep=2)
    assert place.names() == ["step-000001", "step-000002", "step-000003"]


async def test_nothing_that_is_not_ours_is_touched(place, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / MARKER).write_text("years of work")
    foreign = {
        "notes/a.txt": "a",
        "step-000001/mine.txt": "no marker, no manifest",
        "step-000002.partial/mine.txt": "no marker",
        "step-000003": "a file",
        "step-000009.partial": "a file",
        "step-xyz.partial/" + "a": "b",
        "step-5/" + MARKER: "not our way to write numbers",
        "other.partial/" + MARKER: "not our name",
    }
    for name, text in foreign.items():
        (place.folder / name).parent.mkdir(exist_ok=True)
        (place.folder / name).write_text(text)
    (place.folder / "step-000008.partial").symlink_to(tmp_path / "thesis")
    before = files(tmp_path / "thesis")
    await place.save(10, 11)
    (place.folder / "step-000011" / "notes.txt").write_text("the good one")
    assert (await place.newest())[1].step == 11, "a note at the top does no harm"
    await place.save(12, 13, keep=1)
    assert files(tmp_path / "thesis") == before
    for name, text in foreign.items():
        assert (place.folder / name).read_text() == text
    assert {n for n in place.names() if n.startswith("step-00001")} == {"step-000011", "step-000013"}
    for name in ("step-000001", "step-000002.partial", "step-000008.partial", "step-000009.partial", "notes.txt"):
        assert sum(name in note for note in place.notes) >= 1, f"{name} was not named"
    with pytest.raises(CheckpointError, match=r"step-000001 could not be written: it exists already"):
        await place.save(1)


async def test_what_a_kill_cut_off_is_cleared_away(place):
    await place.save(1)
    for name in ("step-000002.partial", "step-000001.partial"):
        shutil.copytree(place.folder / "step-000001", place.folder / name)
    (place.folder / "step-000003.partial").mkdir()  # before its marker
    assert (await place.newest())[1].step == 1
    assert place.names() == ["step-000001"]


@pytest.mark.parametrize("phase", ["trainer", "manifest", "rename"])
async def test_a_full_disk_says_where_and_leaves_the_older_one(place, monkeypatch, phase):
    def full(role: str, reached: str, step: int = 0, path: Path | None = None) -> None:
        if reached == phase:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    await place.save(1)
    whole = files(place.folder)
    with monkeypatch.context() as patch:
        patch.setattr(fault_injection, "reach", full)
        place.trainer.full = phase == "trainer"
        with pytest.raises(CheckpointError, match=r"step-000002 could not be written: .*No space left.* Nothing is lost"):
            await place.save(2)
        place.trainer.full = False
    assert {n: raw for n, raw in files(place.folder).items() if n.startswith("step-000001/")} == whole
    assert [e.detail["step"] for e in place.ledger.events("checkpoint")] == [1]
    assert (await place.newest())[1].step == 1 and place.names() == ["step-000001"]
    await place.save(2)
    assert (await place.newest())[1].step == 2


async def test_a_trainer_that_died_is_not_called_a_full_disk(place):
    async def died(folder: str) -> None:
        raise ConnectionError("trainer died")

    place.trainer.save = died
    with pytest.raises(ConnectionError, match=r"^trainer died$"):
        await place.save(1)


async def test_a_cancelled_write_has_ended_when_it_is_left_and_publishes_nothing(place, monkeypatch):
    started, real, reads = asyncio.Event(), checkpoint_manifest._digest, []
    loop = asyncio.get_running_loop()

    def slow(path, stop):
        loop.call_soon_threadsafe(started.set)
        assert stop.wait(20), "it was told to stop"
        reads.append(path)
        return real(path, stop)

    monkeypatch.setattr(checkpoint_manifest, "_digest", slow)
    writing = asyncio.ensure_future(await place.checkpoints().begin(place.trainer, Position(1, 0, 0)))
    await asyncio.wait_for(started.wait(), 20)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert len(reads) == 1 and place.names() == ["step-000001.partial"] and not place.ledger.events("checkpoint")


async def test_after_a_cancelled_write_the_next_one_is_whole(place, monkeypatch):
    """As when a trainer was lost, and another one goes on."""
    these, started = place.checkpoints(), asyncio.Event()
    loop, real = asyncio.get_running_loop(), checkpoints.seal

    def slow(folder, position, stop):
        loop.call_soon_threadsafe(started.set)
        assert stop.wait(20)
        return real(folder, position, stop)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "seal", slow)
        writing = asyncio.ensure_future(await these.begin(place.trainer, Position(1, 0, 0)))
        await asyncio.wait_for(started.wait(), 20)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
    await (await these.begin(place.trainer, Position(1, 1, 4)))
    assert place.names() == ["step-000001"] and (await these.newest())[1] == Position(1, 1, 4)


@pytest.mark.parametrize("cores", [1, 2, 9])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 20_000])
def test_a_hash_is_of_every_byte_of_every_part_in_order(tmp_path, monkeypatch, cores, size):
    monkeypatch.setattr(checkpoint_manifest, "_PART", 4096)
    monkeypatch.setattr(checkpoint_manifest, "_CHUNK", 1000)
    monkeypatch.setattr(checkpoint_manifest, "usable_cores", lambda: cores)
    file, contents = tmp_path / "file", random.Random(0).randbytes(size)
    file.write_bytes(contents)
    parts = [contents[i : i + 4096] for i in range(0, size, 4096)]
    each = [blake2b(part, digest_size=32).digest() for part in parts]
    assert checkpoint_manifest._digest(file) == blake2b(b"".join(each), digest_size=32).hexdigest()


def test_a_hash_of_many_parts_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_manifest, "_PART", 4096)
    (tmp_path / "file").write_bytes(bytes(20_000))
    stop = threading.Event()
    stop.set()
    with pytest.raises(InterruptedError, match="stopped"):
        checkpoint_manifest._digest(tmp_path / "file", stop)


# --- any manifest whatever ------------------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("../../etc/passwd")
VALUES = SCALARS | st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
EDITS = st.tuples(st.integers(0, 2000), st.integers(0, 40), st.binary(max_size=12))  # at, bytes taken out, bytes put in


@pytest.fixture(scope="module")
def sealed(tmp_path_factory) -> Path:
    async def make(path: Path) -> Path:
        place = Place(path)
        await place.save(1)
        place.ledger.close()
        return place.folder / "step-000001"

    return asyncio.run(make(tmp_path_factory.mktemp("sealed")))


def accepted(sealed: Path, raw: bytes) -> CheckpointManifest | None:
    """What the manifest `raw` was taken for: what it says, to the letter; None when it was refused."""
    manifest = sealed / MANIFEST
    true = manifest.read_bytes()
    manifest.write_bytes(raw)
    tracemalloc.start()
    try:
        verify(sealed)
        found = read_manifest(sealed)
        assert msgspec.to_builtins(found) == json.loads(raw)
        return found
    except CheckpointError as error:
        assert len(str(error)) < 1500
        return None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        manifest.write_bytes(true)
        assert peak < 64 << 20


def fuzz(sealed: Path, inputs: int) -> dict[str, int]:
    """How many were refused, how many were still the true manifest, and how many a true one of another position."""
    counted = {"refused": 0, "same": 0, "sound": 0}
    true, there = (sealed / MANIFEST).read_bytes(), read_manifest(sealed)
    quiet = settings(max_examples=inputs // 3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

    def try_it(raw: bytes, signed: bool = False) -> None:
        found = accepted(sealed, raw)
        counted["refused" if found is None else "same" if found == there else "sound"] += 1
        assert signed or found in (None, there), "what its own digest does not vouch for was believed"

    @quiet
    @given(st.lists(EDITS, min_size=1, max_size=4))
    @example([(0, 2000, b"")])
    def edited(edits):
        raw = true
        for at, out, put in edits:
            raw = raw[: at % len(true)] + put + raw[at % len(true) + out :]
        try_it(raw)

    @quiet
    @given(VALUES, st.sampled_from(["step", "format", "incarnation", "next_id", "files", "more", W]))
    def replaced(value, key):
        tree = json.loads(true)
        (tree["files"] if key == W else tree)[key] = value
        with contextlib.suppress(ValueError, OverflowError):  # its own digest is right, where it can have one
            tree["blake2b"] = blake2b(msgspec.json.encode(tree | {"blake2b": ""}), digest_size=32).hexdigest()
        try_it(json.dumps(tree).encode(errors="surrogatepass"), signed=True)

    @quiet
    @given(st.binary(max_size=300) | VALUES.map(lambda v: json.dumps(v).encode()))
    def anything(raw):
        try_it(raw)

    for each in (edited, replaced, anything):
        each()
    return counted


def test_no_manifest_crashes_the_reader_or_makes_it_believe_what_is_not_so(sealed):
    counted = fuzz(sealed, 600)
    assert counted["refused"] > 450 and counted["same"] > 0 and counted["sound"] > 0, counted


@pytest.mark.slow
def test_no_manifest_of_many_crashes_the_reader(sealed):
    counted = fuzz(sealed, 30_000)
    print(counted)
    assert sum(counted.values()) > 25_000


@pytest.mark.parametrize("what", ["the oldest", "what was cut off"])
async def test_a_removal_that_is_cut_off_anywhere_is_ended_by_the_next_run(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 0

    def counted(real):
        def removes(*given, **named):
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt  # nothing that is caught on the way
            left -= 1
            return real(*given, **named)

        return removes

    for number in range(20):
        place = Place(tmp_path / str(number))
        await place.save(1, 2)
        if what == "what was cut off":
            os.rename(place.folder / "step-000001", place.folder / "step-000001.partial")
        left = number
        with monkeypatch.context() as patched:
            for name in ("unlink", "rmdir", "remove"):
                patched.setattr(os, name, counted(getattr(os, name)))
            with contextlib.suppress(KeyboardInterrupt):
                these = place.checkpoints(keep=1)
                these._retire() if what == "the oldest" else these._clean()
        over = left > 0
        await place.checkpoints(keep=1).newest()
        assert not list(place.folder.glob("*.partial")) and not [note for note in place.notes if "left alone" in note], (
            number
        )
        if over:
            break
    assert number > 5 and over
