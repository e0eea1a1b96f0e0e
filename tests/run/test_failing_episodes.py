"""Episodes that fail before their first reply: a run goes on beside them, or ends in one sentence where all of them do."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tidemill
from tidemill.cli.main import app
from tidemill.core.errors import RunFailed
from tidemill.envs.environment import environment
from tidemill.models.new_model import SIZES, fresh_model

pytestmark = pytest.mark.runs

WORDS = [a + b for a in "abcdefgh" for b in "aeiou"]
SOURCE = Path(__file__).read_text().splitlines()
LINE = next(number for number, line in enumerate(SOURCE, 1) if line.startswith("        raise ConnectionError"))
REASON = f"ConnectionError: the sandbox did not start (test_failing_episodes.py:{LINE})"
EVERY = [8]
begun = [0]


def rows(split: str) -> list[dict[str, Any]]:
    return [{"prompt": f"{word}:", "answer": word} for word in (WORDS[4:] if split == "train" else WORDS[:4])]


@environment(tasks=rows)
async def flaky(task: tidemill.Task, chat: tidemill.Chat) -> Any:
    begun[0] += 1
    if begun[0] % EVERY[0] == 0:
        raise ConnectionError("the sandbox did not start")
    return len(await chat.reply(task.prompt)) / 8


def run(folder: Path, steps: int, **other: Any) -> tidemill.run.api.Run:
    settings: dict[str, Any] = {
        "rollout": {"groups": 2, "group_size": 4, "max_tokens": 6},
        "algorithm": {"name": "grpo", "zero_variance": "keep"},
        "eval": {"every": 0, "tasks": 2, "final_tasks": 2},
        "record": {"checkpoint_every": 3, "probe_every": 0},
        "trainer": {"micro_batch_tokens": 32},
        "placement": {"kind": "inline", "stream": True, "environment": {"workers": 0}},
        "scoring": {"max_error_share": 0.9},
        **other,
    }
    model = folder.with_name("model")
    if not model.exists():
        fresh_model(model, alphabet="abcdefghiou:\n", context=32, **SIZES["0.1m"])
    return tidemill.train(flaky, model, run_dir=folder, steps=steps, **{"quiet": True, **settings})


def asked(folder: Path, sql: str) -> list[tuple]:
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        return db.execute(sql).fetchall()


def test_a_run_goes_on_beside_them_and_every_command_reads_it(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(f"{__name__}.begun", [0])
    folder = tmp_path / "run"
    for steps in (4, 8):
        ended = run(folder, steps)
        assert ended.complete and ended.report["steps"] == steps
    failed = "SELECT count(*) FROM trajectories JOIN attempts USING (group_id, sample) WHERE outcome = 'infra_error'"
    ((count,),) = asked(folder, f"{failed} AND tokens = 0 AND sampled = 0")
    assert count == asked(folder, failed)[0][0] > 4
    assert asked(folder, "SELECT count(*) FROM trajectories WHERE (tokens = 0) <> (sampled = 0)") == [(0,)]
    ((admitted, trained, dropped, pending, lost, twice),) = asked(folder, "SELECT * FROM conservation")
    assert (trained, lost, twice) == (16, 0, 0) and admitted == trained + dropped + pending
    written = (folder / "logs" / "warnings.log").read_text()
    assert "ConnectionError: the sandbox did not start" in written and "Traceback" in written
    assert "Traceback" not in "".join(capfd.readouterr())
    for arguments in (["samples", "--tokens"], ["ledger"], ["why"], ["parity"]):
        said = CliRunner().invoke(app, [arguments[0], str(folder), *arguments[1:]])
        assert said.exit_code == 0 and not said.exception, (arguments, said.output)
    assert REASON in " ".join(CliRunner().invoke(app, ["samples", str(folder)]).output.split())


def test_where_every_one_fails_the_run_ends_in_one_sentence_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.EVERY", [1])
    for _ in range(2):
        with pytest.raises(RunFailed, match=rf"could not be scored by flaky; the latest reason: {re.escape(REASON)}"):
            run(tmp_path / "run", 4)
    ((admitted, trained, dropped, pending, lost, twice),) = asked(tmp_path / "run", "SELECT * FROM conservation")
    assert (trained, lost, twice) == (0, 0, 0) and admitted == dropped + pending


def test_a_first_evaluation_in_which_every_one_fails_is_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.EVERY", [1])
    for _ in range(2):
        with pytest.raises(
            RunFailed, match=r"none of the 4 attempts at held-out tasks has a score; .* \(4\): ConnectionError"
        ):
            run(tmp_path / "run", 4, eval={"every": 2, "tasks": 4, "final_tasks": 4})
    assert asked(tmp_path / "run", "SELECT (SELECT count(*) FROM evals), (SELECT count(*) FROM groups)") == [(0, 0)]


def test_so_is_a_first_look_of_a_warm_up(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.EVERY", [1])
    with pytest.raises(
        RunFailed, match=r"none of the first 3\d attempts at the warm-up's training tasks has a score; .*ConnectionE"
    ):
        run(tmp_path / "run", 4, warmup={"accuracy": 0.5, "steps": 20_000})


def test_some_that_fail_are_told_of_and_stand_in_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(f"{__name__}.begun", [0])
    monkeypatch.setattr(f"{__name__}.EVERY", [2])
    reason = REASON
    with pytest.raises(RunFailed, match=r"the warm-up reached accuracy 0\.00"):
        run(tmp_path / "warm", 1, warmup={"accuracy": 0.5, "steps": 1}, quiet=False)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count(f"18 of 36 attempts have no score and count as not solved: {reason}") == 1, "two looks, one reason"
    ended = run(tmp_path / "run", 1, eval={"tasks": 4, "final_tasks": 4}, quiet=False)
    said = " ".join(capsys.readouterr().out.split())
    assert f"0 held-out accuracy 0.000 on 4 tasks; 2 have no score: {reason}" in said
    assert ended.report["held_out_unscored"] == {"attempts": 2, "reason": reason}
    assert f"; 2 have no score: {reason}" in str(ended)
