"""Faults on purpose happen where they were asked for, once, and leave their trace."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.core.fault_injection import LOG_VARIABLE, VARIABLE, Fault, FaultError, Faults

SCRIPT = """
import sys
from pathlib import Path
from tidemill.core.fault_injection import reach
for step in range(3):
    reach("engine-1", "generate", step, Path(sys.argv[1]))
    print(step, flush=True)
"""


def run(tmp_path: Path, faults: str) -> tuple[int, list[str], str]:
    """Exit status, the steps that were passed, and what was noted."""
    log, file = tmp_path / "faults.log", tmp_path / "file"
    file.write_bytes(b"12345678")
    environment = {VARIABLE: faults, LOG_VARIABLE: str(log)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(file)], env=environment, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout.split(), log.read_text() if log.exists() else ""


@pytest.mark.parametrize("role", ["engine", "engine-1"])
def test_a_fault_happens_where_it_was_asked_for_and_only_once(tmp_path, role):
    fault = f"{role}:generate:1:kill"
    assert run(tmp_path, fault) == (-9, ["0"], f"{fault}\n")
    assert run(tmp_path, fault) == (0, ["0", "1", "2"], f"{fault}\n")


@pytest.mark.parametrize("fault", ["trainer:generate:1:kill", "engine-0:generate:1:kill", "engine:commit:1:kill", ""])
def test_what_is_not_meant_is_left_alone(tmp_path, fault):
    assert run(tmp_path, fault) == (0, ["0", "1", "2"], "")


def test_a_torn_write_leaves_half_the_file(tmp_path):
    assert run(tmp_path, "engine:generate:0:torn-write")[0] == -9
    assert (tmp_path / "file").read_bytes() == b"1234"


def test_what_raises(tmp_path):
    faults = Faults([Fault.parse("a:b:*:raise"), Fault.parse("a:c:2:disk-full")], tmp_path / "log", controller=0)
    with pytest.raises(FaultError, match="a:b:\\*:raise"):
        faults.reach("a", "b", 7, None)
    faults.reach("a", "b", 7, None)  # it is over
    with pytest.raises(OSError) as failed:
        faults.reach("a", "c", 2, None)
    assert failed.value.errno == errno.ENOSPC


@pytest.mark.parametrize("text", ["x", "a:b:1", "a:b:c:kill", "a:b:1:burn", "a:b:1:slow:1:2", ":b:1:kill"])
def test_what_is_no_fault(text):
    with pytest.raises(ValueError, match="expected role:phase:step:kind"):
        Fault.parse(text)


def test_faults_without_a_log_are_refused():
    with pytest.raises(ValueError, match=LOG_VARIABLE):
        Faults.from_environment({VARIABLE: "a:b:1:kill"})
