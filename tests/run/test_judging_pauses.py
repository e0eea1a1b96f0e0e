"""A run whose verifier fails for a while: admission pauses, the user is told, it goes on by itself, all of it on record."""

from __future__ import annotations

import json
from pathlib import Path

from tidemill.cli.commands import training
from tidemill.ledger.ledger import SqliteLedger

REWARD = """
from zlib import crc32

CALLS = "{calls}"

def score(completion):
    with open(CALLS, "a+") as file:
        file.write(".")
    n = len(open(CALLS).read())
    if {first} <= n < {last}:
        raise ConnectionError("the sandbox is down")
    return crc32(completion.encode()) % 100 / 100

tasks = [{{"prompt": str(i)}} for i in range(50)]
"""


def recipe(folder: Path, first: int, last: float) -> Path:
    (folder / "mine.py").write_text(REWARD.format(calls=folder / "calls", first=first, last=last))
    path = folder / "recipe.toml"
    path.write_text(
        f"run_dir = '{folder}/run'\nmodel = 'new:0.1m'\nenv = '{folder}/mine.py:score'\nsteps = 12\nplacement = 'inline'\n"
        "rollout = { groups = 2, group_size = 4, max_tokens = 4 }\neval = { every = 0, tasks = 1, final_tasks = 1 }\n"
        "scoring = { workers = 1, pause_s = 60 }\nrecord.trace = false\n"
    )
    return path


def test_a_pause_and_its_end(tmp_path, capsys):
    assert training.by_recipe(recipe(tmp_path, 30, 36), [], True) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    notes, report = [line["text"] for line in said if line["kind"] == "note"], said[-1]
    assert any("admission pauses" in note and "mine" in note and "the sandbox is down" in note for note in notes)
    assert any("admission goes on: mine judges again" in note for note in notes)
    assert report["judging"]["pauses"] == 1 and report["judging"]["paused_s"] >= 1
    assert report["judging"]["infra_errors"] == 6 and list(report["judging"]["reasons"].values()) == [6]
    assert "the sandbox is down" in next(iter(report["judging"]["reasons"]))
    steps = [line for line in said if line["kind"] == "step"]
    assert sum(step.get("judging/pauses") or 0 for step in steps) == 1 and report["groups"]["trained"] == 24
    with SqliteLedger(tmp_path / "run", mode="read") as ledger:
        (paused,), (resumed,) = ledger.events("judging_paused"), ledger.events("judging_resumed")
        assert paused.detail["verifier"] == "mine" and "the sandbox is down" in paused.detail["reason"]
        assert paused.detail["share"] > 0.05 and resumed.detail["seconds"] >= 1
        assert ledger.counts().conserved
