"""A reward that changes between two starts of a run: the run says so, and goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.core.config import build
from tidemill.ledger.ledger import SqliteLedger
from tidemill.run.preflight.start_checks import judging_code, note_changed_code
from tidemill.run.recipe import RunConfig


@pytest.mark.parametrize("kind", ["rows", "python", "several"])
def test_a_changed_file_is_told_of_once(kind: str, tmp_path: Path) -> None:
    files = [tmp_path / "mine.py", tmp_path / "theirs.py"]
    for file in files:
        file.write_text("def score(completion):\n    return 1.0\n")
    mine, theirs = (f"{file}:score" for file in files)
    env = {
        "rows": {"kind": "rows", "data": "rows.jsonl", "reward": [mine, "exact"]},
        "python": mine,
        "several": [
            {"kind": "python", "path": mine, "name": "a"},
            {"kind": "rows", "data": "rows.jsonl", "reward": theirs, "name": "b"},
        ],
    }[kind]
    config = build(RunConfig, {"run_dir": str(tmp_path / "run"), "model": "new:0.1m", "env": env})
    said: list[str] = []
    (tmp_path / "run").mkdir()
    ledger = SqliteLedger(tmp_path / "run")
    try:
        note_changed_code(config.env, ledger, said.append)
        note_changed_code(config.env, ledger, said.append)
        assert not said and str(files[0]) in judging_code(config.env)
        files[0].write_text("def score(completion):\n    return 0.0\n")
        for _ in range(2):
            note_changed_code(config.env, ledger, said.append)
        assert len(said) == 1 and str(files[0]) in said[0] and str(files[1]) not in said[0]
        (event,) = ledger.events("judging_code_changed")
        assert event.detail == {"files": [str(files[0])]}
    finally:
        ledger.close()
