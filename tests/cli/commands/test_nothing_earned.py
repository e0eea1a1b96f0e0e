"""What is shown of a run that never earned anything: last on the terminal, in its report and by `why`."""

from __future__ import annotations

import json
from pathlib import Path

from tidemill.run.storage.run_folder import read_json

TASK = """
def score(completion, answer):
    return float(completion.strip() == answer)


tasks = [{"prompt": f"{a}{b}", "answer": f"{a} and {b}, which nobody guesses"} for a in "abcdefgh" for b in "0123456789"]
"""


def test_it_is_done_and_says_last_that_nothing_was_earned_and_why(tidemill, trained: Path, tmp_path: Path):
    (tmp_path / "task.py").write_text(TASK)
    given = [f"run_dir={tmp_path / 'run'}", f"env={tmp_path / 'task.py'}:score", "steps=2", "eval.final_tasks=2"]
    recipe = trained.parent / "recipe.toml"
    said = tidemill("train", recipe, *given, "rollout.max_tokens=4")
    last = "  UNEARNED" + " ".join(said.out.split()).partition(" UNEARNED")[2]  # it wraps
    assert said.code == 0 and "done     2 steps" in said.out
    assert last.startswith("  UNEARNED: nothing was earned in 2 steps, for all 12 attempts have the reward 0: "), last
    assert "cut off by rollout.max_tokens = 4, before they ended; raise rollout.max_tokens" in last
    report = read_json(tmp_path / "run" / "report.json")
    assert report["unearned"]["cause"] == "cut" and last.endswith(report["unearned"]["text"])
    told = tidemill("why", tmp_path / "run")
    assert told.code == 0 and "complete" in told.out and "nothing was earned in 2 steps" in " ".join(told.out.split())
    assert json.loads(tidemill("why", tmp_path / "run", "--json").out)["unearned"] == report["unearned"]["text"]
    assert read_json(trained / "report.json")["unearned"] is None
    assert json.loads(tidemill("why", trained, "--json").out)["unearned"] is None
