"""`tidemill eval`: the run's own figures to the last digit, on any placement; its uncertainty; what it refuses."""

from __future__ import annotations

import json
import logging
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from cli.commands.conftest import ENVIRONMENT, RECIPE
from typer.testing import CliRunner

from tidemill.cli.commands import judging
from tidemill.cli.commands.evaluate import _reasons, interval
from tidemill.cli.main import app
from tidemill.controller.evaluation import Unscored
from tidemill.ledger import SqliteLedger
from tidemill.run.storage.run_folder import read_json

pytestmark = pytest.mark.runs


def test_a_run_gives_the_figures_of_its_report(tidemill, trained: Path):
    """And all the others of the run's own evaluations: the mean reward here changes with any token of any reply."""
    report = read_json(trained / "report.json")
    with SqliteLedger(trained, mode="read") as ledger:
        before, after = (e.metrics for e in ledger.evaluations())
    assert 0 < before["accuracy"] < 1 and before["n"] == report["held_out"] == 40
    for which, recorded, figure in (("initial", before, "accuracy_before"), ("final", after, "accuracy_after")):
        said = json.loads(tidemill("eval", trained, "--which", which, "--json").out)
        assert {name: said[name] for name in recorded} == recorded and said["model"] == str(trained / which)
        assert said["accuracy"] == report[figure] == said["recorded_accuracy"]
    assert json.loads(tidemill("eval", trained, "--json").out)["reward"] == after["reward"]


def test_an_engine_in_its_own_process_gives_the_same(tidemill, trained: Path):
    said = json.loads(tidemill("eval", trained, "placement=local", "--json").out)
    assert said["accuracy"] == said["recorded_accuracy"] == read_json(trained / "report.json")["accuracy_after"]


def test_a_model_folder_needs_to_be_told_its_tasks(tidemill, trained: Path):
    refused = tidemill("eval", trained / "final")
    assert refused.code == 2 and "--recipe" in refused.out and "env=" in refused.out
    recipe, env = trained.parent / "recipe.toml", f"env={trained.parent / 'env.py'}:checksum"
    said = json.loads(tidemill("eval", trained / "final", "--recipe", recipe, env, "--json").out)
    assert said["accuracy"] == read_json(trained / "report.json")["accuracy_after"]
    assert said["recorded_accuracy"] is None


def test_fewer_tasks_and_other_settings(tidemill, trained: Path):
    said = json.loads(tidemill("eval", trained, "--tasks", 7, "rollout.max_tokens=2", "--json").out)
    assert (said["n"], said["length"], said["truncated"], said["recorded_accuracy"]) == (7, 4.0, 1.0, None)


def test_what_a_person_reads(tidemill, trained: Path):
    said = tidemill("eval", trained)
    accuracy = read_json(trained / "report.json")["accuracy_after"]
    low, high = interval(accuracy, 40)
    assert f"{accuracy:.4f} ± " in said.out and f"95 % CI {low:.3f} to {high:.3f}" in said.out
    assert "40 held-out" in said.out and "the run's report says the same" in said.out and "\x1b" not in said.out


@pytest.mark.slow
def test_the_sources_of_a_run_are_found_from_any_folder(tidemill, tmp_path: Path, monkeypatch):
    """A recipe with a relative file, trained from its folder, or from another one."""
    for name, stand in (("there", tmp_path / "project"), ("elsewhere", tmp_path / "away")):
        stand.mkdir()
        project = tmp_path / "project"
        (project / "mine.py").write_text(ENVIRONMENT)
        (project / "recipe.toml").write_text(RECIPE + "env = 'mine.py:checksum'\n")
        monkeypatch.chdir(stand)
        settings = [f"run_dir={tmp_path / name}", "steps=1", "--json"]
        assert tidemill("train", project / "recipe.toml", *settings).code == 0
        monkeypatch.chdir("/")
        said = json.loads(tidemill("eval", tmp_path / name, "--tasks", 4, "--json").out)
        assert said["n"] == 4
        monkeypatch.chdir(project)
        assert tidemill("train", "recipe.toml", f"run_dir={tmp_path / name}", "steps=2", "--json").code == 0, "goes on"


def test_a_report_that_says_something_else_is_noticed(tidemill, run: Path):
    report = read_json(run / "report.json")
    (run / "report.json").write_text(json.dumps(report | {"accuracy_after": 0.125}))
    assert "the run's report says 0.1250" in tidemill("eval", run).out


def test_attempts_without_a_score_are_counted_and_not_solved(tidemill, troubled: Path):
    said = json.loads(tidemill("eval", troubled, "--json").out)
    assert (said["infra_errors"], said["unscorable"], said["n"]) == (4, 0, 40)  # 7, 17, 27, 37
    assert said["accuracy"] == 0.9 and said["reward"] == 1.0
    line = (troubled.parent / "env.py").read_text().split("raise RuntimeError")[0].count("\n") + 1
    assert said["reasons"] == {f"RuntimeError: the \x1b[31msandbox is gone (env.py:{line})": 4}
    shown = tidemill("eval", troubled).out
    assert "4 infrastructure errors, 0 unscorable; these count as not solved" in shown
    assert f"\n            RuntimeError: the ␛[31msandbox is gone (env.py:{line}) × 4\n" in shown


def test_only_the_commonest_reasons_are_shown_one_by_one():
    rows = _reasons(Unscored(99, Counter({"late": 40, **{f"no gold for {i}": 10 - i for i in range(6)}})))
    assert [said for _, said in rows] == [
        "late × 40",
        *(f"no gold for {i} × {10 - i}" for i in range(4)),
        "other reasons × 11",
    ]
    assert _reasons(Unscored(99)) == []


@pytest.mark.parametrize("which", ["run", "a run that cannot be written", "model"])
def test_what_an_environment_raised_goes_to_a_log(troubled: Path, tmp_path: Path, monkeypatch, which: str):
    """One sentence on the screen, the tracebacks in the run's logs, or beside the temporary files."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # the test's own: without them Python prints warnings itself
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    args, place = [troubled], troubled / "logs"
    if which != "run":
        place = tmp_path
        monkeypatch.setattr(judging, "_writable", lambda _: False)
    if which == "model":
        args = [troubled / "final", "--recipe", troubled.parent / "recipe.toml", f"env={troubled.parent / 'env.py'}:broken"]
    said = CliRunner().invoke(app, ["eval", *map(str, args)], catch_exceptions=False)
    (log,) = place.rglob("eval-warnings.log")
    assert said.exit_code == 0 and said.stderr.splitlines() == [
        f"an attempt failed in its environment's code: the tracebacks go to {log}"
    ]
    text = log.read_text()
    assert "Traceback (most recent call last)" in text and "sandbox is gone" in text
    log.unlink()


def test_an_evaluation_without_trouble_leaves_no_log(tidemill, trained: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(judging, "_writable", lambda _: False)
    assert tidemill("eval", trained, "--tasks", 2).code == 0 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--tasks", "0"], "--tasks 0"),
        (["--recipe", "x.toml"], "its own recipe"),
        (["evl.tasks=3"], "did you mean 'eval'"),
        (["model=elsewhere"], "changes nothing in an evaluation"),
        (["trainer.lr=1"], "changes nothing in an evaluation"),
    ],
)
def test_what_is_refused(tidemill, trained: Path, args: list[str], says: str):
    said = tidemill("eval", trained, *args)
    assert said.code == 2 and says in said.out and "\n" not in said.out


def test_what_is_not_there(tidemill, run: Path, tmp_path: Path):
    assert "does not exist" in tidemill("eval", tmp_path / "nothing").out
    assert "neither a run nor a model" in tidemill("eval", tmp_path).out
    assert "is a model" in tidemill("eval", run / "final", "--which", "final", "env=guess").out
    (run / "final").rename(run / "gone")
    said = tidemill("eval", run)
    assert said.code == 2 and "it was removed since" in said.out and "--which initial" in said.out


def test_a_run_on_a_python_object_says_what_to_give(tidemill, run: Path):
    config = read_json(run / "config.json")
    config["env"]["path"] = "checksum:checksum"  # what `tidemill.train(env=object)` records
    (run / "config.json").write_text(json.dumps(config))
    assert "env=FILE.py:NAME" in tidemill("eval", run).out


def test_an_environment_of_a_notebook_is_read_from_the_folder_of_its_run(tidemill, run: Path, monkeypatch):
    config = read_json(run / "config.json")
    config["env"]["path"] = "checksum:checksum"
    (run / "config.json").write_text(json.dumps(config))
    (run / "source").mkdir()
    (run / "source" / "environment_checksum.py").write_text(ENVIRONMENT)  # where `tidemill.train` writes it
    monkeypatch.chdir("/")
    said = json.loads(tidemill("eval", run, "--json").out)
    assert said["accuracy"] == said["recorded_accuracy"] == read_json(run / "report.json")["accuracy_after"]


def test_a_reward_of_a_notebook_lacks_only_its_tasks(tidemill, run: Path):
    config = read_json(run / "config.json")
    config["env"]["path"] = "checksum:checksum"
    (run / "config.json").write_text(json.dumps(config))
    (run / "source").mkdir()
    (run / "source" / "reward_checksum.py").write_text("def checksum(completion):\n    return 1.0\n")
    said = tidemill("eval", run)
    assert said.code == 2 and f'path = ["{run / "source" / "reward_checksum.py"}:checksum"]' in said.out
    (run / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"eval {i}"}) + "\n" for i in range(3)))
    (run / "train.jsonl").write_text(json.dumps({"prompt": "train 1"}) + "\n")
    env = said.out.partition("give env='")[2].rstrip("'")
    env = env.replace("HELD_OUT.jsonl", str(run / "rows.jsonl")).replace("ROWS.jsonl", str(run / "train.jsonl"))
    assert json.loads(tidemill("eval", run, f"env={env}", "--json").out)["accuracy"] == 1.0


@pytest.mark.parametrize(
    ("solved", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_interval_is_wilsons(solved: int, n: int, low: float, high: float):
    """Newcombe 1998, doi:10.1002/(SICI)1097-0258(19980430)17:8<857::AID-SIM777>3.0.CO;2-E, table I, method 3."""
    assert interval(solved / n, n) == pytest.approx((low, high), abs=5e-5)
