"""SIGKILL at random instants: what was acknowledged is there, what is indexed is readable, every group has one fate."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from ledger_cases import assert_same, group

from tidemill.ledger import SqliteLedger

WRITER = Path(__file__).with_name("ledger_writer.py")


def run_and_kill(folder: Path, seed: int, lines: int, delay: float) -> list[list[str]]:
    """Start the writer, kill it `delay` seconds after its n-th line, and return all it printed."""
    process = subprocess.Popen([sys.executable, str(WRITER), str(folder), str(seed)], stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(20, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(lines)]
        time.sleep(delay)
        process.kill()
        said += process.stdout.readlines()
    finally:
        watchdog.cancel()
        process.kill()
        assert process.wait(10) == -9  # it was killed: it neither ended nor failed
    return [line.split() for line in said if line.endswith("\n")]


@pytest.mark.runs
def test_a_killed_writer_leaves_a_whole_ledger(tmp_path: Path) -> None:
    rng = random.Random(7)
    interrupted: Counter[str] = Counter()
    written: dict[str, set[int]] = {what: set() for what in ("admit", "finish", "drop", "begin", "end")}
    found = 0
    for life in range(8):
        said = run_and_kill(tmp_path, life, lines=rng.randint(1, 60), delay=rng.random() * 0.002)
        admitted: set[int] = set()  # since the last call about something else, with which they are recorded
        for state, what, number in said:
            if state == "done":
                (admitted if what == "admit" else written[what]).add(int(number))
                if what == "finish":
                    written["admit"].add(int(number))
                elif what != "admit":
                    written["admit"] |= admitted
                    admitted.clear()
        if said[-1][0] == "doing":
            interrupted[said[-1][1]] += 1
        with SqliteLedger(tmp_path, mode="open") as ledger:
            check(ledger, written)
            found += len(ledger.events("rollouts_found"))
            ledger.event("resumed", {"life": life})
    assert interrupted, "no kill hit a call"
    assert found, "no kill took rows that waited"
    assert len(written["begin"]) >= 5 and len(written["drop"]) >= 2 and max(written["admit"]) >= 20


def check(ledger: SqliteLedger, written: dict[str, set[int]]) -> None:
    counts = ledger.counts()
    assert counts.conserved, counts
    assert written["admit"] <= set(range(counts.admitted))
    fates = {r["id"]: (r["fate"], r["finished_at"]) for r in ledger._rows("SELECT * FROM groups")}
    assert all(fates[g][1] is not None for g in written["finish"])
    assert all(fates[g][0] == "dropped" for g in written["drop"])
    steps = {s.step: s for s in ledger.steps()}
    assert written["begin"] <= set(steps) and all(steps[s].ended_at is not None for s in written["end"])
    assert all(len(ledger.groups_of(s)) == 3 for s in steps)
    assert ledger.verify() == []
    for group_id, (_, finished) in fates.items():
        if finished is not None:
            assert_same(ledger.load(group_id), group(group_id, samples=4, length=40))
