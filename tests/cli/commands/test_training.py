"""What `tidemill train` says at its end: that a run unlearned, and what comes next."""

from __future__ import annotations

import asyncio
import re
import sys
from math import sqrt
from pathlib import Path

import pytest

import tidemill as package
from tidemill.cli import main
from tidemill.cli.commands import training
from tidemill.cli.commands.training import show_end
from tidemill.controller.evaluation import errors_apart
from tidemill.core.errors import PeerDied, TrainingDiverged
from tidemill.ledger.records import EvalRecord
from tidemill.run.recipe import load_recipe
from tidemill.run.report import unlearned
from tidemill.run.session import RunEnded
from tidemill.run.storage.run_folder import read_json

FORGETFUL = """
from tidemill.envs.environment import environment
from tidemill.core.types import Score

seen = []


@environment(tasks=lambda split: [{"prompt": f"{split} {i}", "answer": "a"} for i in range(20)])
async def forgetful(task, chat):
    said = await chat.reply(task.prompt)
    if task.prompt.startswith("eval"):
        seen.append(task)
        return Score(float(len(seen) <= 20))  # solved before the first step, never after
    return Score(len(said) / 100)
"""


def evaluation(step: int, accuracy: float | None, n: int | None, **metrics: float) -> EvalRecord:
    return EvalRecord(step, 0.0, n, accuracy, metrics)


def test_a_run_that_unlearns_says_so_and_is_no_failure(tidemill, trained: Path, tmp_path: Path):
    (tmp_path / "env.py").write_text(FORGETFUL)
    given = [f"run_dir={tmp_path / 'run'}", f"env={tmp_path / 'env.py'}:forgetful", "steps=1", "eval.final_tasks=20"]
    recipe = trained.parent / "recipe.toml"
    said = tidemill("train", recipe, *given, "placement.environment.workers=0", "trainer.lr=1e-3", "max_lag=2")
    assert said.code == 0 and "done     1 step in" in said.out
    told = " ".join(said.out.split())
    assert "UNLEARNED: held-out accuracy fell from 1.000 to 0.000 on 20 tasks, by 6.3 standard errors" in told
    assert f"look first at: trainer.lr=0.001 (try a tenth), the reward (`tidemill reward test {recipe}`), max_lag=2" in told
    assert "could not be judged" not in said.out
    found = read_json(tmp_path / "run" / "report.json")["unlearned"]
    assert found == {"before": 1.0, "after": 0.0, "n_before": 20, "n_after": 20, "errors": 6.32, "unjudged": 0}


def test_a_fall_by_chance_is_none():
    assert unlearned([]) is None and unlearned([evaluation(0, 0.9, 500)]) is None
    assert unlearned([evaluation(0, 0.70, 512), evaluation(9, 0.65, 512)]) is None  # 1.7
    fell = unlearned([evaluation(0, 0.70, 512), evaluation(5, 0.9, 128), evaluation(9, 0.64, 512, infra_errors=7)])
    assert fell is not None and fell["errors"] == pytest.approx(2.05, abs=0.01) and fell["unjudged"] == 7
    assert unlearned([evaluation(0, 0.64, 512), evaluation(9, 0.70, 512)]) is None
    assert unlearned([evaluation(0, 1.0, 1), evaluation(9, 0.0, 1)]) is None  # a coin shows that
    assert unlearned([evaluation(0, None, None), evaluation(9, 0.0, 100)]) is None


@pytest.mark.parametrize(("a", "n", "c", "m"), [(350, 512, 300, 512), (60, 80, 30, 40), (5, 5, 0, 7)])
def test_the_errors_are_those_of_pearsons_test(a: int, n: int, c: int, m: int):
    """The square of the distance is the statistic of Pearson's chi-squared test of the two-by-two table."""
    b, d = n - a, m - c
    chi2 = (n + m) * (a * d - b * c) ** 2 / (n * m * (a + c) * (b + d))
    assert abs(errors_apart(a / n, n, c / m, m)) == pytest.approx(sqrt(chi2))
    assert errors_apart(1.0, n, 1.0, m) == errors_apart(0.0, n, 0.0, m) == 0.0


def test_what_could_not_be_judged_is_named_and_what_cannot_be_the_cause_is_not(trained: Path, capsys):
    recipe, report = trained.parent / "recipe.toml", read_json(trained / "report.json")
    fell = {"before": 0.9, "after": 0.5, "n_before": 40, "n_after": 20, "errors": 3.3, "unjudged": 8}
    config = load_recipe([recipe], [f"run_dir={trained}", "env=guess", "max_lag=0"])
    show_end(config, recipe, RunEnded(3, True, report | {"unlearned": fell}), newcomer=False)
    said = capsys.readouterr().out
    assert "from 0.900 to 0.500 on 40 and 20 tasks" in said and "8 of the 20 could not be judged" in said
    assert "look first at" in said and "max_lag" not in said


def said_at_the_end(monkeypatch: pytest.MonkeyPatch, capsys, recipe: Path, error: BaseException) -> tuple[object, str]:
    """The exit status of the command line, and what it says of a run that ends so."""

    async def ends(config: object, display: object) -> None:
        raise error

    monkeypatch.setattr(training, "run", ends)
    monkeypatch.setattr(sys, "argv", ["tidemill", "train", str(recipe), "env=guess"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError("SIGINT again")])
def test_an_interrupted_run_says_how_it_goes_on(trained: Path, monkeypatch, capsys, error: BaseException):
    status, said = said_at_the_end(monkeypatch, capsys, trained.parent / "recipe.toml", error)
    assert status == 130 and said == "interrupted; the same command goes on from what is recorded\n"


def test_so_does_one_whose_trainer_was_killed(trained: Path, monkeypatch, capsys):
    error = PeerDied("trainer", "died: killed by SIGKILL")
    status, said = said_at_the_end(monkeypatch, capsys, trained.parent / "recipe.toml", error)
    assert status == 1
    assert said == "the same command goes on from what is recorded\nerror: trainer died: killed by SIGKILL\n"


def test_a_run_that_diverged_is_a_sentence(trained: Path, monkeypatch, capsys):
    error = TrainingDiverged("the gradient norm is nan")
    error.add_note("--- traceback in trainer ---")
    status, said = said_at_the_end(monkeypatch, capsys, trained.parent / "recipe.toml", error)
    assert (status, said) == (1, "error: the gradient norm is nan\n")


def test_the_version_is_that_of_the_package(tidemill):
    assert tidemill("--version").out == f"tidemill {package.__version__}\n"


def test_figures_of_two_numbers_of_tasks_say_so(trained: Path, capsys):
    recipe, report = trained.parent / "recipe.toml", read_json(trained / "report.json")
    config = load_recipe([recipe], [f"run_dir={trained}", "env=guess"])
    figures = {"accuracy_before": 0.5, "accuracy_after": 0.75, "held_out": 8}
    for before, said in ((8, "0.500 → 0.750 on 8 tasks"), (1024, "0.500 on 1,024 tasks → 0.750 on 8 tasks")):
        show_end(config, recipe, RunEnded(3, True, report | figures | {"held_out_before": before}), newcomer=False)
        assert f"held-out accuracy {said}" in capsys.readouterr().out
    unscored = {"held_out_before": 8, "held_out_unscored": {"attempts": 8, "reason": "the agent is late"}}
    show_end(config, recipe, RunEnded(3, True, report | figures | unscored), newcomer=False)
    assert "0.500 → 0.750 on 8 tasks; 8 have no score: the agent is late" in capsys.readouterr().out


def again(tidemill, run: Path, trained: Path) -> str:
    """What the same command says of a run that is complete."""
    env = read_json(run / "config.json")["env"]["path"]
    said = tidemill("train", trained.parent / "recipe.toml", f"run_dir={run}", f"env={env}")
    assert said.code == 0 and "is complete" in said.out
    return said.out


def following(said: str) -> list[str]:
    """The commands that are advised."""
    rows = said[said.index("  next ") :].split("\n\n")[0].splitlines()
    return [row[11:] for row in rows]


def test_what_comes_next(tidemill, run: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    recipe, report = trained.parent / "recipe.toml", read_json(run / "report.json")
    said = again(tidemill, run, trained)
    assert "UNLEARNED" not in said
    samples = f"tidemill samples {run} --worst 3 --tokens"
    assert following(said) == [samples, f"tidemill eval {run}", f"tidemill serve {run}"]
    config = load_recipe([recipe], [f"run_dir={run}", "env=guess"])
    show_end(config, recipe, RunEnded(2, False, report), newcomer=False)
    assert following(capsys.readouterr().out) == [samples]  # there is no model yet
    monkeypatch.setattr(training, "DEMO", recipe)
    assert following(again(tidemill, run, trained))[-1] == "tidemill new mytask"


def test_the_result_stands_last_and_is_highlighted(trained: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    recipe, report = trained.parent / "recipe.toml", read_json(trained / "report.json")
    config = load_recipe([recipe], [f"run_dir={trained}", "env=guess"])
    report |= {"accuracy_before": 0.5, "accuracy_after": 0.75, "held_out": 40, "held_out_before": 40}
    show_end(config, recipe, RunEnded(3, True, report), newcomer=False)
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[-3:]] == ["done", "model", "result"]
    assert said[-1] == "  result   held-out accuracy 0.500 → 0.750 on 40 tasks"
    assert sum("%" in line for line in said) <= 4  # no wall of percentages
    assert max(len(line) for line in said if str(trained) not in line) <= 120
    fell = {"before": 0.5, "after": 0.1, "n_before": 40, "n_after": 40, "errors": 4.0, "unjudged": 0}
    nothing = {"text": "nothing was earned", "cause": "cut"}
    for complete, colour, more in (
        (True, 32, {}),
        (False, 33, {}),
        (True, 31, {"unlearned": fell}),
        (True, 31, {"unearned": nothing}),
    ):
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
        show_end(
            config, recipe, RunEnded(2, complete, report | {"unlearned": None, "unearned": None} | more), newcomer=False
        )
        assert f"\x1b[1;{colour}mheld-out accuracy" in capsys.readouterr().out


def test_the_time_of_a_run_that_went_on_is_that_of_its_last_process(tidemill, run: Path, trained: Path):
    """No other is recorded: those before may have been killed."""
    assert read_json(run / "report.json")["steps_before"] == 0 and "done     3 steps in " in again(tidemill, run, trained)
    env = read_json(run / "config.json")["env"]["path"]
    said = tidemill("train", trained.parent / "recipe.toml", f"run_dir={run}", f"env={env}", "steps=5")
    assert said.code == 0 and re.search(r"done     5 steps, \d+s since it went on after step 3\n", said.out)
    report = read_json(run / "report.json")
    assert f"held-out accuracy {report['accuracy_before']:.3f} → {report['accuracy_after']:.3f} on " in said.out
