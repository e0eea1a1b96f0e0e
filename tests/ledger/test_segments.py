"""Payload records: checksums, rotation, order of durability, retention."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_cases import group, task

from tidemill.ledger import LedgerError, SqliteLedger, segments
from tidemill.ledger.segments import HEADER_BYTES, Location, SegmentWriter, read_record, segment_numbers, segment_path


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


@settings(max_examples=200, deadline=None, derandomize=True)
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


def test_a_failed_append_ends_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush that failed once is not trusted again: the next record goes to a new file."""
    out = writer(tmp_path, sync=True)
    (at,) = out.append(0, [b"kept"])

    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(segments, "sync_file", broken)
        with pytest.raises(OSError, match="Input/output"):
            out.append(1, [b"lost"])
    (later,) = out.append(1, [b"again"])
    assert later.segment == 2 and segment_path(tmp_path, 1).stat().st_size == HEADER_BYTES + 4
    assert read_record(tmp_path, 0, 0, at) == b"kept" and read_record(tmp_path, 1, 0, later) == b"again"


def test_the_payload_is_durable_before_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    real = segments.sync_file
    monkeypatch.setattr(segments, "sync_file", lambda fd: (log.append(f"flushed {os.fstat(fd).st_size > 0}"), real(fd))[1])
    folders: list[Path] = []
    monkeypatch.setattr(segments, "flush", folders.append)
    with SqliteLedger(tmp_path) as ledger:
        ledger.admit(0, task(0))
        ledger._db.set_trace_callback(lambda sql: log.append(sql.split()[0] + " " + sql.split()[-1][:6]))
        ledger.finish(group(0, samples=1))
        ledger._db.set_trace_callback(None)
    words = [line.split()[0] for line in log]
    assert log[words.index("flushed")] == "flushed True"
    assert folders == [tmp_path / "trajectories"]  # the new file's name is durable too
    assert words.index("flushed") < words.index("BEGIN") < words.index("INSERT") < words.index("COMMIT")


@pytest.mark.parametrize(("durability", "level", "flushes"), [("power", 2, True), ("process", 1, False)])
def test_durability_is_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability, level, flushes) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(segments, "sync_file", flushed.append)
    with SqliteLedger(tmp_path, durability=durability) as ledger:
        assert ledger._db.execute("PRAGMA synchronous").fetchone()[0] == level
        assert ledger._db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        ledger.admit(0, task(0))
        ledger.finish(group(0))
    assert bool(flushed) == flushes


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
