"""Payload records: checksums, rotation, order of durability, retention."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_cases import assert_same, group, task

from tidemill.core.errors import LedgerError
from tidemill.core.types import Version
from tidemill.ledger import SqliteLedger, segments
from tidemill.ledger.segments import (
    HEADER_BYTES,
    Location,
    SegmentWriter,
    read_record,
    segment_numbers,
    segment_path,
    whole_groups,
)


def writer(folder: Path, limit: int = 1000, sync: bool = False, first: int = 1) -> SegmentWriter:
    return SegmentWriter(folder, limit=limit, sync=sync, first=first)


def test_records_come_back_and_files_rotate(tmp_path: Path) -> None:
    out = writer(tmp_path, limit=100)
    payloads = {g: [bytes([g]) * (20 + g), b"", b"z" * 50] for g in range(6)}
    places = {g: out.append(g, parts) for g, parts in payloads.items()}
    out.close()
    for g, locations in places.items():
        assert [read_record(tmp_path, g, i, at) for i, at in enumerate(locations)] == payloads[g]
        assert len({at.segment for at in locations}) == 1  # a group lies in one file
    assert segment_numbers(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert places[0][1].offset == HEADER_BYTES + 20


def test_a_writer_never_touches_an_older_file(tmp_path: Path) -> None:
    (at,) = writer(tmp_path).append(0, [b"kept"])
    (at2,) = writer(tmp_path, first=2).append(1, [b"new"])
    assert (at.segment, at2.segment) == (1, 2)
    with pytest.raises(FileExistsError):
        writer(tmp_path, first=2).append(2, [b"x"])
    assert read_record(tmp_path, 1, 0, at2) == b"new"


@settings(max_examples=200, derandomize=True)
@given(byte=st.integers(0, 2 * HEADER_BYTES + 19), bit=st.integers(0, 7))
def test_every_flipped_bit_is_noticed(tmp_path_factory: pytest.TempPathFactory, byte: int, bit: int) -> None:
    folder = tmp_path_factory.mktemp("flip", numbered=True)
    first, second = writer(folder).append(4, [b"0123456789", b"abcdefghij"])
    file = segment_path(folder, 1)
    data = bytearray(file.read_bytes())
    data[byte] ^= 1 << bit
    file.write_bytes(data)
    hit, other = (0, 1) if byte < second.offset else (1, 0)
    with pytest.raises(LedgerError, match="is damaged"):
        read_record(folder, 4, hit, (first, second)[hit])
    assert read_record(folder, 4, other, (first, second)[other])


def test_what_is_not_there_is_told_not_guessed(tmp_path: Path) -> None:
    a, b = writer(tmp_path).append(1, [b"first", b"second"])
    with pytest.raises(LedgerError, match="its header is not the one"):
        read_record(tmp_path, 1, 0, b)  # another trajectory's record
    with pytest.raises(LedgerError, match="its header is not the one"):
        read_record(tmp_path, 2, 0, a)  # another group's
    with pytest.raises(LedgerError, match="is cut short"):
        read_record(tmp_path, 1, 1, Location(1, b.offset, 10_000, b.crc))
    os.truncate(segment_path(tmp_path, 1), b.offset + 3)
    with pytest.raises(LedgerError, match="is cut short: 3 of 30 bytes"):
        read_record(tmp_path, 1, 1, b)
    assert read_record(tmp_path, 1, 0, a) == b"first"
    segment_path(tmp_path, 1).unlink()
    with pytest.raises(LedgerError, match=r"seg-000001.bin does not exist"):
        read_record(tmp_path, 1, 0, a)


def test_a_failed_flush_ends_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush that failed once is not trusted again: the next record goes to a new file."""
    out = writer(tmp_path, sync=True)
    (at,) = out.append(0, [b"kept"])
    out.flush()
    (other,) = out.append(1, [b"not sure"])

    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(segments, "sync_file", broken)
        with pytest.raises(OSError, match="Input/output"):
            out.flush()
    (later,) = out.append(2, [b"again"])
    assert (other.segment, later.segment) == (1, 2)
    assert read_record(tmp_path, 0, 0, at) == b"kept" and read_record(tmp_path, 2, 0, later) == b"again"


def test_a_failed_write_ends_its_file_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = writer(tmp_path)
    (at,) = out.append(0, [b"kept"])

    def full(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[:7])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(segments, "_write_all", full)
        with pytest.raises(OSError, match="No space"):
            out.append(1, [b"lost"])
    (later,) = out.append(1, [b"again"])
    assert later.segment == 2 and segment_path(tmp_path, 1).stat().st_size == HEADER_BYTES + 4
    assert read_record(tmp_path, 0, 0, at) == b"kept" and read_record(tmp_path, 1, 0, later) == b"again"


def test_what_is_appended_is_flushed_once_and_before_its_file_is_left(tmp_path: Path, monkeypatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(segments, "sync_file", lambda fd: flushed.append(os.fstat(fd).st_size))
    out = writer(tmp_path, sync=True, limit=40)
    out.append(0, [b"a"])
    out.flush()
    out.flush()
    out.append(1, [b"b" * 30])
    out.append(2, [b"c"])  # a new file
    out.close()
    assert flushed == [HEADER_BYTES + 1, 2 * HEADER_BYTES + 31, HEADER_BYTES + 1]


def test_nothing_is_trained_on_that_is_not_on_the_medium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that begins flushes the payloads, then commits with a flush of the log, which holds all before it."""
    log: list[str] = []
    real = segments.sync_file
    monkeypatch.setattr(segments, "sync_file", lambda fd: (log.append(f"flushed {os.fstat(fd).st_size > 0}"), real(fd))[1])
    folders: list[Path] = []
    monkeypatch.setattr(segments, "flush", folders.append)
    with SqliteLedger(tmp_path) as ledger:
        ledger.admit(0, task(0))
        ledger._db.set_trace_callback(lambda sql: log.append(sql if sql.startswith("PRAGMA sync") else sql.split()[0]))
        ledger.finish(group(0, samples=1))
        assert (log[0], log[-1]) == ("BEGIN", "COMMIT") and not any("flushed" in line or "FULL" in line for line in log)
        log.clear()
        ledger.begin_step(0, 0, [0])
        ledger._db.set_trace_callback(None)
    assert log[:2] == ["flushed True", "PRAGMA synchronous = FULL"]
    assert log.index("BEGIN") < log.index("COMMIT") < log.index("PRAGMA synchronous = NORMAL")
    assert folders == [tmp_path / "trajectories"]  # the new file's name is durable too


@pytest.mark.parametrize(("durability", "flushes"), [("power", True), ("process", False)])
def test_durability_is_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability, flushes) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(segments, "sync_file", flushed.append)
    levels: list[str] = []
    with SqliteLedger(tmp_path, durability=durability) as ledger:
        assert ledger._db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        ledger.admit(0, task(0))
        ledger.finish(group(0))
        assert not flushed
        ledger._db.set_trace_callback(lambda sql: levels.append(sql) if sql.startswith("PRAGMA sync") else None)
        ledger.begin_step(0, 0, [0])
        ledger._db.set_trace_callback(None)
        assert ledger._db.execute("PRAGMA synchronous").fetchone()[0] == 1
    assert bool(flushed) == flushes and ("PRAGMA synchronous = FULL" in levels) == flushes


CALLS: dict[str, Callable[[SqliteLedger], object]] = {
    "begin_step": lambda ledger: ledger.begin_step(1, 0, [1]),
    "end_step": lambda ledger: ledger.end_step(0, 0, {}),
    "publish": lambda ledger: ledger.publish(Version(1, fingerprint="a" * 32)),
    "evaluation": lambda ledger: ledger.evaluation(0, {"accuracy": 0.5, "n": 2}),
    "event": lambda ledger: ledger.event("checkpoint", {"step": 1}),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_is_not_about_a_single_group_waits_for_the_medium(tmp_path: Path, monkeypatch, call: str) -> None:
    """With all that was recorded before it."""
    flushed: list[int] = []
    with SqliteLedger(tmp_path) as ledger:
        assert ledger._db.execute("PRAGMA fullfsync").fetchone()[0] == 1  # where a plain flush stops at the drive's cache
        for i in (0, 1):
            ledger.admit(i, task(i))
            ledger.finish(group(i))
        ledger.begin_step(0, 0, [0])
        ledger.admit(2, task(2))
        ledger.finish(group(2))
        monkeypatch.setattr(segments, "sync_file", flushed.append)
        levels: list[str] = []
        ledger._db.set_trace_callback(lambda sql: levels.append(sql) if sql.startswith(("PRAGMA sync", "COMMIT")) else None)
        CALLS[call](ledger)
        ledger._db.set_trace_callback(None)
    assert levels == ["PRAGMA synchronous = FULL", "COMMIT", "PRAGMA synchronous = NORMAL"] and flushed


@pytest.mark.parametrize("taken", ["all of it", "its end", "the file"])
def test_a_payload_that_a_power_cut_took_is_sampled_again(tmp_path: Path, taken: str) -> None:
    with SqliteLedger(tmp_path, segment_bytes=1) as ledger:  # a file for each group
        for i in range(3):
            ledger.admit(i, task(i))
            ledger.finish(group(i))
        ledger.begin_step(0, 0, [0])
    path = segment_path(tmp_path / "trajectories", 2)
    if taken == "the file":
        path.unlink()
    else:
        os.truncate(path, 0 if taken == "all of it" else path.stat().st_size - 1)
    with SqliteLedger(tmp_path, mode="open") as ledger:
        assert [(p.id, p.finished) for p in ledger.pending()] == [(1, False), (2, True)]
        (event,) = ledger.events("payload_lost")
        assert event.detail["group"] == 1
        assert ledger.verify() == [] and ledger.counts().lost == 0
        ledger.finish(group(1))
        ledger.begin_step(1, 0, [1, 2])
        assert ledger.load(1).id == 1


def killed(run: Path, copy: Path) -> Path:
    """What a run's folder holds when its process is killed now."""
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("*.lock", "*-shm"))
    return copy


def test_what_has_finished_outlives_its_writer_before_its_rows_are_written(tmp_path: Path) -> None:
    with SqliteLedger(tmp_path / "run", segment_bytes=2000) as ledger:  # which ends files in between
        for i in range(4):
            ledger.admit(i, task(i))
        for i in range(3):
            ledger.finish(group(i))
        with sqlite3.connect(tmp_path / "run" / "ledger.sqlite") as db:
            assert db.execute("SELECT count(*), count(finished_at) FROM groups").fetchone() == (4, 0)
            assert db.execute("SELECT count(*) FROM trajectories").fetchone() == (0,)
        copy = killed(tmp_path / "run", tmp_path / "copy")
    with SqliteLedger(copy, mode="open") as ledger:
        assert [(p.id, p.finished) for p in ledger.pending()] == [(0, True), (1, True), (2, True), (3, False)]
        assert ledger.events("rollouts_found")[0].detail == {"groups": [0, 1, 2]}
        for i in range(3):
            assert_same(ledger.load(i), group(i))
        with pytest.raises(LedgerError, match="cannot finish group 1: it has finished and is pending"):
            ledger.finish(group(1))
        ledger.finish(group(3))
        ledger.begin_step(0, 0, [0, 1, 2, 3])
        assert ledger.verify() == [] and ledger.counts().conserved
    with SqliteLedger(copy, mode="open") as ledger:
        assert len(ledger.events("rollouts_found")) == 1  # they are found once


def test_payloads_of_groups_that_nobody_knows_are_left_alone(tmp_path: Path) -> None:
    """A power cut may take transactions and leave payloads."""
    with SqliteLedger(tmp_path / "run") as ledger:
        copy = killed(tmp_path / "run", tmp_path / "copy")
        ledger.admit(0, task(0))
        ledger.finish(group(0))
        shutil.copytree(tmp_path / "run" / "trajectories", copy / "trajectories", dirs_exist_ok=True)
    with SqliteLedger(copy, mode="open") as ledger:
        assert ledger.counts().admitted == 0
        ledger.admit(0, task(0))
        ledger.finish(group(0))
        assert_same(ledger.load(0), group(0))


@pytest.mark.runs
def test_a_torn_tail_is_sampled_again_wherever_it_was_torn(tmp_path: Path) -> None:
    """At every byte, and with every byte of the last record wrong: whole groups are found, and no other."""
    with SqliteLedger(tmp_path / "run") as ledger:
        ledger.admit(0, task(0))
        ledger.admit(1, task(1))
        ledger.finish(group(0, length=5))
        ledger.finish(group(1, length=5))
        copy = killed(tmp_path / "run", tmp_path / "copy")
    path = segment_path(copy / "trajectories", 1)
    whole, database = path.read_bytes(), (copy / "ledger.sqlite").read_bytes()
    log = (copy / "ledger.sqlite-wal").read_bytes()
    ((_, _, places),) = [each for each in whole_groups(copy / "trajectories", 1, 0) if each[0] == 0]
    second = places[-1].offset + HEADER_BYTES + places[-1].length
    torn = [whole[:end] for end in range(0, len(whole), 23)]
    wrong = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(second, len(whole), 23)]
    for contents in (*torn, *wrong, whole + b"TM", whole + whole[second:]):
        path.write_bytes(contents)
        (copy / "ledger.sqlite").write_bytes(database)
        (copy / "ledger.sqlite-wal").write_bytes(log)
        expected = [contents[:second] == whole[:second], contents[: len(whole)] == whole]
        with SqliteLedger(copy, mode="open", durability="process") as ledger:
            assert [p.finished for p in ledger.pending()] == expected
            assert ledger.verify() == [] and ledger.events("payload_lost") == []


def test_rows_that_wait_are_written_after_a_second_or_before_files_are_removed(tmp_path: Path, monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr("tidemill.ledger.ledger.time.time", lambda: now)
    with SqliteLedger(tmp_path, segment_bytes=1, durability="process") as ledger:
        outside = sqlite3.connect(tmp_path / "ledger.sqlite")
        for i in range(4):
            ledger.admit(i, task(i))
        ledger.finish(group(0))
        assert outside.execute("SELECT count(finished_at) FROM groups").fetchone() == (0,)
        now += 1.5
        ledger.finish(group(1))  # the first one has waited for long
        assert outside.execute("SELECT count(finished_at) FROM groups").fetchone() == (1,)
        ledger.begin_step(0, 0, [0])
        ledger.finish(group(2))
        ledger.finish(group(3))
        assert ledger.retain(checkpoint=1, max_bytes=0).removed == [1]
        assert ledger.verify() == [] and ledger.load(2).id == 2


def test_retention_spares_what_may_be_needed(tmp_path: Path) -> None:
    with SqliteLedger(tmp_path, segment_bytes=1) as ledger:  # a file for each group
        for i in range(6):
            ledger.admit(i, task(i))
            ledger.finish(group(i))
        ledger.drop(0, "stale")
        ledger.begin_step(0, 0, [1])
        ledger.begin_step(1, 0, [2])
        ledger.begin_step(2, 0, [3])
        folder = tmp_path / "trajectories"
        assert ledger.retain(checkpoint=3).removed == []  # all of it is below the default budget
        assert ledger.retain(checkpoint=0, max_bytes=0).removed == [1]  # only the dropped one: no step is in a checkpoint
        assert ledger.retain(checkpoint=3, steps=2, max_bytes=0).removed == [2]
        size = segment_path(folder, 3).stat().st_size
        total = sum(segment_path(folder, n).stat().st_size for n in segment_numbers(folder))
        kept = ledger.retain(checkpoint=3, max_bytes=total - 1)
        assert (kept.removed, kept.freed_bytes, kept.kept_bytes) == ([3], size, total - size)  # oldest first, no more
        assert ledger.retain(checkpoint=2, max_bytes=0).removed == []  # step 2 is not in it; 4 and 5 are pending
        assert segment_numbers(folder) == [4, 5, 6]
        with pytest.raises(LedgerError, match="trajectory 0 of group 2 was removed by retention; its row remains"):
            ledger.load(2)
        assert ledger.verify() == [] and ledger.counts().conserved
        assert [s.gone for s in ledger.samples(step=0, order="recent")] == [True, True]


def test_retention_removes_what_no_row_names(tmp_path: Path) -> None:
    with SqliteLedger(tmp_path) as ledger:
        ledger.admit(0, task(0))
        ledger.finish(group(0))
    stray = segment_path(tmp_path / "trajectories", 2)
    stray.write_bytes(b"a tail that was torn before its row")
    with SqliteLedger(tmp_path, mode="open") as ledger:
        ledger.admit(1, task(1))
        ledger.finish(group(1))  # into file 3: 2 is somebody else's
        assert ledger.retain(checkpoint=0).removed == [2]
        assert ledger.load(0).id == 0 and ledger.load(1).id == 1


def test_damage_is_found(tmp_path: Path) -> None:
    with SqliteLedger(tmp_path) as ledger:
        for i in range(3):
            ledger.admit(i, task(i))
            ledger.finish(group(i))
        file = segment_path(tmp_path / "trajectories", 1)
        data = bytearray(file.read_bytes())
        data[HEADER_BYTES + 5] ^= 1
        file.write_bytes(data)
        (damage,) = ledger.verify()
        assert (damage.group_id, damage.place) == (0, 0) and "checksum" in damage.problem
        with pytest.raises(LedgerError, match="checksum"):
            ledger.load(0)
        assert ledger.load(1).id == 1
