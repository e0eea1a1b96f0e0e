"""A whole run in which agents, tools, an MCP server, sandboxes and gateways are killed, stopped, slow and lie at random.

It comes to its end, no attempt has a score that is none, what failed stands in the run's records, and nothing is left.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
from faulty_parts import ALPHABET, CELLS
from typer.testing import CliRunner

from tidemill.cli.main import app
from tidemill.core.episode_counts import counts_in
from tidemill.core.types import InfraError, Score, Unscorable
from tidemill.ledger.ledger import SqliteLedger
from tidemill.models.new_model import SIZES, fresh_model

pytest.importorskip("mcp")
pytestmark = pytest.mark.runs

LIMIT_S = 900.0  # of the run: minutes on a machine that does much else
STEPS, GROUPS = 6, 4
RECIPE = f"""
model = "MODEL"
run_dir = "RUN"
env = "{Path(__file__).with_name("faulty_parts.py")}:parts"
steps = {STEPS}
max_lag = 1
algorithm = {{ name = "grpo", zero_variance = "keep" }}
rollout = {{ groups = {GROUPS}, group_size = 4, max_tokens = 3, episode_s = 120 }}
placement = {{ kind = "inline", environment = {{ workers = 3, limit_s = 30 }} }}
scoring.max_error_share = 0.99
supervise = {{ restarts = 1000, backoff_s = 0 }}
eval = {{ every = 0, tasks = 2, final_tasks = 2 }}
record.probe_every = 0
"""


class Descendants(threading.Thread):
    """Notes every process that the run starts, until it ends."""

    def __init__(self, run: psutil.Process) -> None:
        super().__init__(daemon=True)
        self.run_, self.seen, self.over = run, set[psutil.Process](), threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.05):
            with suppress(psutil.NoSuchProcess):
                self.seen.update(self.run_.children(recursive=True))

    def left(self) -> list[psutil.Process]:
        return [each for each in self.seen if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has come to its end."""
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "agents").mkdir()
    fresh_model(folder / "model", alphabet=ALPHABET, context=64, **SIZES["0.1m"])
    (folder / "recipe.toml").write_text(RECIPE.replace("MODEL", str(folder / "model")).replace("RUN", str(folder / "run")))
    with TemporaryDirectory(prefix="t-") as temporary:
        more = {"FAULTY_PARTS": str(folder), "OMP_NUM_THREADS": "1", "TMPDIR": temporary}
        command = [sys.executable, "-m", "tidemill", "train", str(folder / "recipe.toml"), "--json"]
        with open(folder / "out", "wb") as out, open(folder / "errors", "wb") as errors:
            process = subprocess.Popen(command, env=os.environ | more, stdout=out, stderr=errors, start_new_session=True)
        watch = Descendants(psutil.Process(process.pid))
        watch.start()
        try:
            status = process.wait(LIMIT_S)
        finally:
            watch.over.set()
            watch.join()
            process.kill()
            _, alive = psutil.wait_procs(watch.seen, timeout=15)
            left = [each.cmdline() for each in alive if each in watch.left()]
            for each in watch.left():
                each.kill()
        assert status == 0, (folder / "errors").read_text()[-4000:]
        assert watch.seen and not left, left
    return folder


def notes(folder: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (folder / "notes").read_text().splitlines()]


def attempts(folder: Path) -> list[Any]:
    """The last row of each attempt of the run."""
    with closing(sqlite3.connect(folder / "run" / "ledger.sqlite")) as db:
        places = db.execute("SELECT group_id, place FROM trajectories ORDER BY 1, 2").fetchall()
    with SqliteLedger(folder / "run", mode="read") as ledger:
        rows = [ledger.load_trajectory(*place) for place in places]
    return [row for row in rows if row.outcome is not None]


def test_no_attempt_has_a_score_that_is_none(folder: Path) -> None:
    noted = {float(int(name[:12], 16)): value for kind, name, value, *_ in notes(folder) if kind == "score"}
    ends = attempts(folder)
    kinds = Counter(type(end.outcome) for end in ends)
    assert kinds[Score] > 10 and kinds[InfraError] > 5 and kinds[Unscorable] > 0, kinds
    names = [end.outcome.parts["name"] for end in ends if isinstance(end.outcome, Score)]
    assert len(names) == len(set(names)) and all(
        noted.get(end.outcome.parts["name"]) == end.outcome.value for end in ends if isinstance(end.outcome, Score)
    ), "a score that no environment gave"
    begun = Counter((part, fault) for kind, _, part, fault in (each for each in notes(folder) if each[0] == "begun"))
    assert len({part for part, _ in begun} - {""}) == 5 and len(set(begun) & set(CELLS)) > len(CELLS) / 2, begun
    fatal = {("agent", "killed"), ("agent", "frozen"), ("agent", "slow"), ("agent", "half"), ("agent", "wrong type")}
    fatal |= {("sandbox", "killed"), ("mcp", "lying"), ("tool", "killed"), ("tool", "frozen"), ("gateway", "killed")}
    scored = {name for kind, name, *_ in notes(folder) if kind == "score"}
    assert not [each for each in notes(folder) if each[0] == "begun" and (each[2], each[3]) in fatal and each[1] in scored]


def test_the_ledger_is_whole(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "run" / "ledger.sqlite")) as db:
        admitted, trained, dropped, pending, lost, twice = db.execute("SELECT * FROM conservation").fetchone()
    assert trained == STEPS * GROUPS and not lost and not twice and admitted == trained + dropped + pending


def test_counts_stand_in_every_record_and_are_shown(folder: Path) -> None:
    run, ends = folder / "run", attempts(folder)
    rows = Counter[str]()
    for end in ends:
        rows.update(counts_in(end.info))
    for name in ("tools/calls", "gateway/calls", "agent/runs", "sandbox/runs", "workers/lost", "agent/late", "mcp/lost"):
        assert rows[name] > 0, (name, rows)
    steps = Counter[str]()
    for line in (run / "metrics.jsonl").read_text().splitlines():
        steps.update(counts_in(json.loads(line)))
    report = json.loads((run / "report.json").read_text())
    status = json.loads((run / "status.json").read_text())
    assert Counter(report["counts"]) == rows, "the report counts every attempt of the run"
    assert status["counts"] == report["counts"] and status["judging"] == report["judging"]
    assert steps and all(steps[name] <= rows[name] for name in steps), "steps count the attempts that came back before them"
    failed = report["judging"]["infra_errors"] + report["judging"]["unscorable"]
    assert failed == sum(not isinstance(end.outcome, Score) for end in ends)
    said = CliRunner().invoke(app, ["why", str(run)]).output
    assert f"{report['judging']['infra_errors']} infra errors" in said and f"{rows['tools/calls']:,} calls" in said
    said = " ".join(CliRunner().invoke(app, ["samples", str(run), "--best", "3"]).output.split())
    assert "tools" in said and "gateway" in said and " calls" in said
    plain = json.loads(CliRunner().invoke(app, ["samples", str(run), "--best", "1", "--json"]).output)
    assert plain[0]["counts"]["agent/runs"] >= 1
