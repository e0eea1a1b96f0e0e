"""Role x phase x fault: the run goes on, or ends within its deadline with the first cause as its last line. Never a hang."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import threading
import time
from contextlib import closing

import psutil
import pytest
from runs import Run

from tidemill.cli.commands.why import standing
from tidemill.ledger.database import has_ledger
from tidemill.run.storage.run_folder import RunFolder

pytestmark = pytest.mark.runs

GOES_ON = "goes on"  # status 0
DIES = "dies"  # with the controller; else a pattern of the last line
KILLED = r"error: trainer died: killed by SIGKILL"
STOPPED = r"error: trainer was stopped by a signal for 1.5 s and was killed"
RAISED = r"a fault on purpose"
FULL = r"No space left on device"
DEADLINE_S = 60.0

CELLS: dict[str, str] = {
    # an engine that is lost in any way is started again
    "engine:generate:2:kill": GOES_ON,
    "engine:generate:2:stop": GOES_ON,
    "engine:generate:2:raise": GOES_ON,
    "engine:generate:2:slow:2": GOES_ON,
    "engine:generate:0:kill": GOES_ON,
    "engine:stage:0:kill": GOES_ON,
    "engine:stage:0:stop": GOES_ON,
    "engine:stage:2:kill": GOES_ON,
    "engine:stage:2:stop": GOES_ON,
    "engine:stage:2:raise": GOES_ON,
    "engine:commit:2:kill": GOES_ON,
    "engine:commit:2:stop": GOES_ON,
    "engine:commit:2:raise": GOES_ON,
    "engine:stage:8:kill": GOES_ON,  # the last publication, before the last evaluation
    "engine:generate:8:kill": GOES_ON,  # in the last evaluation
    # the trainer has no second: the run ends, and goes on by the same command
    "trainer:train:2:kill": KILLED,
    "trainer:train:2:stop": STOPPED,
    "trainer:train:2:raise": RAISED,
    "trainer:train:2:slow:2": GOES_ON,
    "trainer:apply:2:kill": KILLED,
    "trainer:apply:2:stop": STOPPED,
    "trainer:apply:2:raise": RAISED,
    "trainer:publish:2:kill": KILLED,
    "trainer:publish:2:stop": STOPPED,
    "trainer:publish:2:raise": RAISED,
    "trainer:stream:2:kill": KILLED,
    "trainer:stream:2:stop": STOPPED,
    "trainer:stream:2:raise": RAISED,
    "trainer:snapshot:3:kill": KILLED,
    "trainer:snapshot:3:raise": RAISED,
    "trainer:save:3:kill": KILLED,
    "trainer:save:3:stop": STOPPED,
    "trainer:save:3:raise": RAISED,
    "trainer:save:3:disk-full": FULL,
    "trainer:save:3:slow:2": GOES_ON,
    "trainer:train:7:kill": KILLED,  # the last step
    "trainer:save:8:kill": KILLED,
    "trainer:publish:8:kill": KILLED,
    # the controller
    "controller:admit:5:kill": DIES,
    "controller:admit:5:raise": RAISED,
    "controller:finish:5:kill": DIES,
    "controller:finish:5:raise": RAISED,
    "controller:record:5:disk-full": FULL,
    "controller:record:5:kill": DIES,
    "controller:train:2:kill": DIES,
    "controller:train:2:raise": RAISED,
    "controller:apply:2:kill": DIES,
    "controller:apply:2:raise": RAISED,
    "controller:publish:2:kill": DIES,
    "controller:publish:2:raise": RAISED,
    "controller:checkpoint:3:kill": DIES,
    "controller:manifest:3:torn-write": DIES,
    "controller:manifest:3:disk-full": FULL,
    "controller:rename:3:kill": DIES,
    "controller:train:7:kill": DIES,
    # verifiers and environments: an attempt without a score, never the run's end
    "reward:call:3:kill": GOES_ON,
    "reward:call:3:stop": GOES_ON,
    "reward:call:3:raise": GOES_ON,
    "reward:call:0:kill": GOES_ON,
    "environment:episode:3:kill": GOES_ON,
    "environment:episode:3:stop": GOES_ON,
    "environment:episode:3:raise": GOES_ON,
    "environment:reply:3:kill": GOES_ON,
    "environment:reply:3:stop": GOES_ON,
    "environment:reply:3:raise": GOES_ON,
}
QUICK = ("engine:generate:2:kill",)


def run_of(fault: str, folder) -> Run:
    return Run(folder, env="repeat" if fault.startswith("environment") else "score", eval_every=4)


def meets(fault: str, tmp_path) -> None:
    run = run_of(fault, tmp_path)
    ended = run.train(fault, limit_s=DEADLINE_S)
    assert fault in run.happened(), f"it was never met\n{ended.errors}"
    if CELLS[fault] == DIES:
        assert ended.status == -signal.SIGKILL
    elif CELLS[fault] == GOES_ON:
        assert ended.status == 0, ended.errors
    else:
        assert ended.status == 1, ended.errors
        assert re.search(CELLS[fault], ended.last_line), ended.errors
    run.check(complete=ended.status == 0)
    about = standing(RunFolder.existing(run.folder))
    assert about["state"] == ("killed" if CELLS[fault] == DIES else "complete" if ended.status == 0 else "failed")
    if about["state"] == "failed":
        assert re.search(CELLS[fault].removeprefix("error: "), about["failure"]["message"]), about["failure"]
        assert "Traceback" in about["failure"]["trace"]
    if ended.status != 0:
        again = run.train(limit_s=DEADLINE_S)
        assert again.status == 0, again.errors
        run.check()


@pytest.mark.parametrize("fault", QUICK)
def test_a_fault_is_survived_or_ends_the_run_by_name(fault, tmp_path):
    meets(fault, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in CELLS if fault not in QUICK])
def test_every_cell_of_the_matrix(fault, tmp_path):
    meets(fault, tmp_path)


@pytest.mark.slow
def test_a_run_resumes_by_itself_when_its_trainer_ends(tmp_path):
    run = run_of("", tmp_path)
    faults = "trainer:train:2:kill trainer:stream:5:stop"
    ended = run.train(faults, "supervise.resume=true", limit_s=DEADLINE_S)
    assert ended.status == 0, ended.errors
    assert set(run.happened()) == set(faults.split())
    run.check()
    notes = [line["text"] for line in ended.lines if line["kind"] == "note"]
    assert sum("going on by itself" in note for note in notes) == 2, notes


@pytest.mark.slow
def test_the_fork_servers_death_is_survived_time_and_again(tmp_path):
    """Trainer and engines end at the same instant, in the middle of whatever they were doing."""
    run = Run(tmp_path, steps=120, engines=2, zero_variance="keep")
    process = run.start("", "supervise.resume=true", "supervise.restarts=100")
    said: list[tuple[str, str]] = []
    reading = threading.Thread(target=lambda: said.append(process.communicate()))  # a full pipe would hold the run up
    reading.start()
    try:
        for number in range(1, 7):
            end = time.monotonic() + DEADLINE_S
            while steps_ended(run) < 12 * number:
                assert process.poll() is None and time.monotonic() < end, (
                    f"at step {steps_ended(run)} after {number - 1} deaths: {standing(RunFolder(run.folder))}"
                )
                time.sleep(0.05)
            (server,) = [p for p in psutil.Process(process.pid).children() if "tidemill.run.role_main" in p.cmdline()]
            server.kill()
        reading.join(2 * DEADLINE_S)
    finally:
        for each in run.leftovers():
            each.kill()
        reading.join()
    assert process.returncode == 0, said
    run.check()


@pytest.mark.slow
def test_a_stop_that_was_asked_for_outlives_the_trainer(tmp_path):
    """Ctrl-C while the trainer hangs: it is started again, and the run ends with a checkpoint all the same."""
    run = run_of("", tmp_path)
    process = run.start(fault := "trainer:train:4:stop", "supervise.resume=true")
    end = time.monotonic() + DEADLINE_S
    while fault not in run.happened() and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 3, errors
    assert "going on by itself" in out and steps_ended(run) < run.steps
    run.check(complete=False)
    assert run.train().status == 0
    run.check()


def steps_ended(run: Run) -> int:
    if not has_ledger(run.folder):  # the file is there before its tables are
        return 0
    with closing(sqlite3.connect(run.folder / "ledger.sqlite")) as db:
        return db.execute("SELECT count(*) FROM steps WHERE ended_at IS NOT NULL").fetchone()[0]


@pytest.mark.slow
def test_an_engine_that_dies_again_and_again_ends_the_run(tmp_path):
    """Its budget is spent: a clear stop, which names the first cause."""
    run = run_of("", tmp_path)
    faults = " ".join(f"engine-0:stage:*:kill:{i}" for i in range(4))
    ended = run.train(faults, "supervise.restarts=2", limit_s=DEADLINE_S)
    assert ended.status == 1 and "engine-0" in ended.last_line and "started again 2 times" in ended.last_line, ended.errors
    assert len(run.happened()) == 3
    run.check(complete=False)
    assert run.train().status == 0
    run.check()


@pytest.mark.slow
def test_a_controller_that_was_stopped_goes_on_and_kills_nobody(tmp_path):
    """Ctrl-Z, a debugger, a laptop's lid: longer than any heartbeat may be late."""
    run = run_of("", tmp_path)
    process = run.start()
    status, end = run.folder / "status.json", time.monotonic() + 60
    while not status.exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert standing(RunFolder.existing(run.folder))["state"] == "running"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(8)
    assert standing(RunFolder.existing(run.folder))["state"] == "stuck"
    os.kill(process.pid, signal.SIGCONT)
    out, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    run.check()
    assert not [line for line in map(json.loads, out.splitlines()) if "engine lost" in line.get("text", "")]
