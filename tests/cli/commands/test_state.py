"""What a run has not written: the sentence tells whether it runs, was stopped, failed or was killed, and what to do."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from pathlib import Path

import pytest

from tidemill.cli.commands import run_state
from tidemill.run.status_file import STATUS, record_failure

AGAIN = "give the command that began it once more"
STATES = {
    "running": ("it is running (process 4242), so wait", None),
    "stuck": ("kill -CONT 4242", None),
    "stopped": (f"it was stopped before its last step; {AGAIN}", asyncio.CancelledError()),
    "failed": (f"once that is mended, {AGAIN}", RuntimeError("the disk is full")),
    "killed": (f"it was killed and does not run any more; {AGAIN}", None),
}


@pytest.mark.parametrize("name", STATES)
def test_what_is_missing_is_told_with_the_state_of_the_run(tidemill, run: Path, monkeypatch, name: str):
    said, ended = STATES[name]
    (run / "report.json").unlink()
    shutil.rmtree(run / "final")
    if name in ("running", "stuck"):
        monkeypatch.setattr(run_state, "holder", lambda _: 4242)
        monkeypatch.setattr(run_state, "_stopped", lambda _: name == "stuck")
        old = time.time() - (60 if name == "stuck" else 0)
        status = {"pid": 4242, "started": old, "at": old, "step": 1, "steps": 3, "waits": [], "processes": []}
        (run / STATUS).write_text(json.dumps(status))
    if ended is not None:
        record_failure(run, ended)
    for args in (["eval", run], ["serve", run], ["samples", run, "--step", 9]):
        told = tidemill(*args)
        assert told.code == 2 and said in told.out and "\n" not in told.out, (args, told.out)
        assert ("yet:" not in told.out and "wait" not in told.out) or name == "running"
