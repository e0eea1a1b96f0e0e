"""`tidemill drill` does what it says: faults happen, the run goes on, and the losses are counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import psutil
import pytest
from runs import Run
from typer.testing import CliRunner

from tidemill.cli import chaos_test as module
from tidemill.cli.chaos_test import Drill, unnamed
from tidemill.cli.main import app
from tidemill.cli.process_lives import Life, Look, RunSize
from tidemill.run.recipe import RunConfig
from tidemill.runtime.local import MODULE

KNOWN = {"controller", "forkserver", "engine", "trainer", "environment", "starting"}


@pytest.mark.slow
def test_a_drill_of_a_minute(tmp_path):
    run = Run(tmp_path, env="repeat", engines=2, zero_variance="keep")
    command = [sys.executable, "-m", "tidemill", "drill", str(run.recipe), "--minutes", "1.2", "--every", "10", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["ok"] and len(outcome["faults"]) >= 2 and outcome["left"] == []
    assert outcome["groups"]["trained"] > 0 and outcome["groups"]["lost"] == outcome["groups"]["trained_twice"] == 0
    assert outcome["calm_rate"] > 0 and outcome["rate"] > 0
    roles = Counter(life["name"].partition("-")[0] for life in outcome["lives"])
    assert roles["controller"] == outcome["starts"]
    assert roles["forkserver"] <= outcome["starts"] + sum("forkserver" in fault["whom"] for fault in outcome["faults"])
    assert roles["engine"] >= 2 and roles["trainer"] and roles["environment"] and set(roles) <= KNOWN
    again = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert again.returncode == 2 and "a drill begins a run of its own" in again.stderr


def test_each_phase_is_told_of_when_it_begins(tmp_path, monkeypatch):
    """In virtual time: a start, an undisturbed while, one with faults, the end, the count."""
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0]))
    monkeypatch.setattr(module, "_steps", lambda _: int(now[0] > 0))
    monkeypatch.setattr(module, "_trained", lambda _: 0)
    for name, does in {"_start": lambda _: None, "_fault": lambda *_: None, "_look": lambda _: None}.items():
        monkeypatch.setattr(Drill, name, does)
    monkeypatch.setattr(Drill, "_tick", lambda _: now.__setitem__(0, now[0] + 10))
    notes = list[str]()
    config = RunConfig.model_validate({"env": "guess", "model": "m", "run_dir": str(tmp_path / "run")})
    drill = Drill(config, [], seconds=300.0, calm_s=60.0, every_s=20.0, seed=0, note=notes.append)
    drill._loop(0.0)
    assert [note.strip() for note in notes] == [
        f"the run starts in {tmp_path / 'run'}, and its first step is awaited; its output: {tmp_path / 'run.log'}",
        "10 s  the next 60 s are undisturbed, to compare with",
        "70 s  the next 230 s are with a fault every 20 s on average",
    ]


def test_the_first_line_says_how_long_it_takes(tmp_path):
    """Before anything is looked at: here the recipe does not exist."""
    said = CliRunner().invoke(app, ["drill", str(tmp_path / "none.toml"), "--minutes", "7"])
    assert said.stdout.splitlines()[0].strip().startswith(f"starting a drill of {tmp_path / 'none.toml'}: about 7 min")


def test_growth_is_between_the_medians_of_two_windows():
    def looks(minutes: float) -> list[Look]:
        ages = [2.0 * i for i in range(int(30 * minutes) + 1)]
        sizes = [RunSize(100 + age / 60 + 50 * (i % 3 == 0), 10 + (age > 200)) for i, age in enumerate(ages)]
        return [Look("trainer", age, size) for age, size in zip(ages, sizes, strict=True)]

    grown = Life.of([*looks(10), Look("trainer", 601.0, RunSize(3.0, 0))])  # it was ending when it was seen last
    assert grown.early is not None and grown.early.resident_mb == pytest.approx(102.25, abs=0.2) and grown.early.files == 10
    assert grown.late.resident_mb == pytest.approx(109.75, abs=0.2) and grown.late.files == 11
    assert grown.growth == (pytest.approx(100 * 7.5 / 102.25, abs=0.3), 1)
    short = Life.of(looks(2.6))  # its windows are shorter, and have nothing in common
    assert short.early is not None and short.early.resident_mb == pytest.approx(102.15, abs=0.2)
    assert short.late.resident_mb == pytest.approx(102.45, abs=0.2)
    young = Life.of(looks(2.4))
    assert young.early is None and young.growth is None
    assert young.late.resident_mb == pytest.approx(102.15, abs=0.2)
    assert Life.of([Look("engine-0", 0.0, RunSize(5.0, 3))]).late == RunSize(5.0, 3)


def test_a_process_has_the_name_that_it_told_last():
    sizes = [RunSize(5.0, 3)] * 4
    names = ["starting-7", "engine-0", "engine-0", "starting-7"]  # the last: its controller has begun anew
    looks = [Look(name, 2.0 * i, size) for i, (name, size) in enumerate(zip(names, sizes, strict=True))]
    assert Life.of(looks).name == "engine-0"
    assert Life.of(looks[:1]).name == "starting-7"


def test_a_fork_server_is_told_from_what_it_forks():
    code = "import os, sys; pid = os.fork(); pid and print(pid, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code, MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin and server.stdout
        child = int(server.stdout.readline())
        assert unnamed(psutil.Process(server.pid), os.getpid()) == f"forkserver-{server.pid}"
        assert unnamed(psutil.Process(child), os.getpid()) == f"starting-{child}"
        assert unnamed(psutil.Process(), os.getpid()) == ""
        server.stdin.close()  # both end
