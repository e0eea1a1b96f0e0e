"""`tidemill why`: of a run that goes on, who waits for whom; of one that has ended, how, and no wait as if it went on."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tidemill.cli.commands import run_state as command
from tidemill.core.errors import ConfigError, RunFailed
from tidemill.ledger import SqliteLedger
from tidemill.run.status_file import FAILURE, STATUS, record_failure
from tidemill.run.storage.run_folder import read_json


@pytest.fixture
def waiting(run: Path) -> Path:
    """The run's folder, in which the last that was said is that the controller waits for the trainer."""
    now = time.time()
    wait = {"peer": "trainer", "what": "forward_backward", "count": 1, "since": now - 3, "limit_s": 60.0}
    process = {"name": "trainer", "pid": 1, "alive": True, "heard": 0.1, "busy": []}
    status = {
        "pid": os.getpid(),
        "started": now - 9,
        "at": now,
        "step": 2,
        "steps": 3,
        "waits": [wait],
        "processes": [process],
    }
    (run / STATUS).write_text(json.dumps(status))
    return run


def unfinished(run: Path) -> Path:
    (run / "report.json").unlink()
    return run


def test_a_run_that_goes_on(tidemill, waiting: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "holder", lambda _: os.getpid())  # a lock of one's own cannot be seen
    said = tidemill("why", unfinished(waiting))
    assert said.code == 0 and f"running, process {os.getpid()}" in said.out
    assert "waits " in said.out and "the controller for trainer: forward_backward, since 3.0 s of at most 60 s" in said.out
    assert "processes" in said.out and "at " in said.out


def test_calls_that_are_alike_are_told_of_once(tidemill, waiting: Path):
    """With the longest of them: an engine has a call for each attempt that is under way."""
    status = read_json(waiting / STATUS)
    calls = [["generate", 2.0], ["generate", 1.9], ["update", 0.3], ["generate", 0.1]]
    status["processes"][0]["busy"] = calls
    (waiting / STATUS).write_text(json.dumps(status))
    out = tidemill("why", unfinished(waiting)).out
    assert "heard 0.1 s before, generate × 3 for 2.0 s, update for 0.3 s\n" in out


def test_attempts_and_what_their_parts_counted_are_told(tidemill, waiting: Path):
    status = read_json(waiting / STATUS)
    reasons = {"the agent took longer than 2 s": 3, "the \x1b[31msandbox is gone": 1}
    status["judging"] = {"scored": 1200, "unscorable": 3, "infra_errors": 1, "reasons": reasons}
    status["counts"] = {"tools/calls": 5000, "tools/late": 2, "agent/late": 3, "workers/lost": 1, "gateway/refused": 2}
    status["refused"] = "400 messages: \x1b expected a text"
    (waiting / STATUS).write_text(json.dumps(status))
    said = tidemill("why", unfinished(waiting)).out
    assert "attempts   1,200 scored, 3 unscorable, 1 infra error" in said.replace("attempts       ", "attempts   ")
    assert "the agent took longer than 2 s × 3" in said and "the ␛[31msandbox is gone\n" in said
    assert "2 refused, the commonest reason: 400 messages: ␛ expected a text" in said
    assert "5,000 calls, 2 late" in said and "3 late" in said and "1 lost" in said
    status["judging"] = {"scored": 0, "unscorable": 0, "infra_errors": 0, "reasons": {}}
    (waiting / STATUS).write_text(json.dumps(status))
    said = tidemill("why", waiting).out
    assert "0 scored" not in said and "5,000 calls" in said, "none of training: those of an evaluation are told elsewhere"
    assert "unscorable" not in tidemill("why", waiting_before(waiting)).out


def waiting_before(run: Path) -> Path:
    """The run with a status of an older version."""
    status = read_json(run / STATUS)
    del status["judging"], status["counts"]
    (run / STATUS).write_text(json.dumps(status))
    return run


def test_a_complete_one_waits_for_nobody(tidemill, waiting: Path):
    said = tidemill("why", waiting)
    assert said.code == 0 and "complete: it came to its last step" in said.out and "step 2 of 3" in said.out
    assert "forward_backward" not in said.out and "processes" not in said.out


def test_a_killed_one_was_waiting(tidemill, waiting: Path):
    said = tidemill("why", unfinished(waiting))
    assert said.code == 1 and "killed: it ended without a word" in said.out
    assert "was waiting    the controller for trainer: forward_backward" in said.out and "had processes  trainer" in said.out
    assert "waits" not in said.out


def test_one_that_was_complete_and_is_killed_with_more_steps(tidemill, waiting: Path):
    config = read_json(waiting / "config.json")
    (waiting / "config.json").write_text(json.dumps(config | {"steps": config["steps"] + 1}))
    assert "killed: it ended without a word" in tidemill("why", waiting).out


def test_one_that_failed_or_was_stopped_waits_for_nobody(tidemill, waiting: Path):
    record_failure(unfinished(waiting), RuntimeError("the sandbox is gone\nfor good"))
    said = tidemill("why", waiting)
    assert said.code == 1 and "ended by an error 0 s ago" in said.out and "first cause  the sandbox is gone" in said.out
    assert "forward_backward" not in said.out and "processes" not in said.out
    (waiting / FAILURE).unlink()
    (waiting / "interrupted.json").write_text("{}")
    said = tidemill("why", waiting)
    assert said.code == 1 and "stopped when it was asked to" in said.out and "forward_backward" not in said.out


def failed(error: Exception, cause: Exception | None = None) -> Exception:
    """The error as it is after it was raised."""
    with pytest.raises(type(error)) as found:
        raise error from cause
    return found.value


NO_REPLY = ExceptionGroup("tasks", [RuntimeError("no reply")])
ENDS = {
    "a mistake": (ConfigError("unknown key 'x'"), None, False),
    "nothing scored": (RunFailed("3 groups in a row"), NO_REPLY, False),
    "an engine's fault": (RunFailed("engine-0 died"), RuntimeError("out of pages"), True),
    "ours": (AssertionError("never empty"), None, True),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_traceback_is_shown_of_what_is_not_the_users_to_mend(tidemill, waiting: Path, name: str):
    error, cause, shown = ENDS[name]
    record_failure(unfinished(waiting), failed(error, cause))
    said = tidemill("why", waiting).out
    assert f"{error}" in said and ("Traceback" in said) is shown
    assert "Traceback" in read_json(waiting / FAILURE)["trace"], "it is kept in any case"


def test_a_failure_of_an_earlier_version_is_shown_with_its_traceback(tidemill, waiting: Path):
    record_failure(unfinished(waiting), failed(RunFailed("gone")))
    about = read_json(waiting / FAILURE)
    del about["whole"]
    (waiting / FAILURE).write_text(json.dumps(about))
    assert "Traceback" in tidemill("why", waiting).out


def test_an_exception_from_a_users_file_is_told_with_its_line(tidemill, waiting: Path):
    record_failure(unfinished(waiting), failed(KeyError("column")))
    assert "first cause  KeyError: 'column' (test_why.py:" in tidemill("why", waiting).out


def test_what_an_earlier_end_left_is_not_the_next_ones(tidemill, waiting: Path, trained: Path):
    """A start that fails before it says anything is not at the step where the one before it was."""
    (waiting / "interrupted.json").write_text("{}")
    (waiting / FAILURE).write_text("{}")
    (waiting / "initial").unlink()
    env = read_json(waiting / "config.json")["env"]["path"]
    given = [f"run_dir={waiting}", f"env={env}", "steps=4"]
    ended = tidemill("train", trained.parent / "recipe.toml", *given)
    assert ended.code == 2 and "initial" in ended.out
    said = tidemill("why", waiting)
    assert "ended by an error" in said.out and "first cause" in said.out and "step 2 of 3" not in said.out
    assert not (waiting / "interrupted.json").exists()


def test_events_are_in_words(tidemill, run: Path):
    with SqliteLedger(run, mode="open") as writer:
        writer.event("engine_restarted", {"engine": "engine-0", "after_s": 1.0})
        writer.event("payload_lost", {"group": 3, "reason": "\x1b[31mred\nand more"})
    out = tidemill("why", run).out
    assert "ago: engine restarted: engine-0, after 1 s" in out
    assert "payload lost: group 3, ␛[31mred" in out and "and more" not in out
