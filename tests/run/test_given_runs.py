"""Whole runs that learn what tasks give: sft, dpo and kto on tasks of seconds, and what of a run must hold all the same."""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tidemill
from tidemill.core import fault_injection
from tidemill.core.errors import ConfigError
from tidemill.core.fault_injection import Fault, FaultError, Faults
from tidemill.models.new_model import SIZES, fresh_model

pytestmark = pytest.mark.runs

LETTERS = "abcdef"
PAIRS = [a + b for a, b in itertools.product(LETTERS, repeat=2)]
HELD_OUT = [pair for pair in PAIRS if (LETTERS.index(pair[0]) + LETTERS.index(pair[1])) % 4 == 0]
CUT = "controller:train:5:raise"  # in a step that is in no checkpoint, and is recorded as begun
INLINE = {"kind": "inline", "environment": {"workers": 0}}

Row = dict[str, Any]


def wrong(pair: str) -> str:
    """The second letter, or another one where they are the same."""
    return pair[1] if pair[1] != pair[0] else LETTERS[(LETTERS.index(pair[0]) + 1) % 6]


def answers(pair: str) -> list[Row]:
    return [{"prompt": f"{pair}=", "answer": pair[0]}]


def preferences(pair: str) -> list[Row]:
    return [{"prompt": f"{pair}=", "answer": pair[0], "chosen": pair[0], "rejected": wrong(pair)}]


def labels(pair: str) -> list[Row]:
    row = {"prompt": f"{pair}=", "answer": pair[0]}
    return [{**row, "completion": pair[0], "label": True}, {**row, "completion": wrong(pair), "label": False}]


def environment(folder: Path, rows: Callable[[str], list[Row]], reward: str = "") -> dict[str, Any]:
    """Say the first of two letters; a quarter of the pairs is held out."""
    for name, held_out in (("train", False), ("eval", True)):
        lines = [json.dumps(row) for pair in PAIRS if (pair in HELD_OUT) == held_out for row in rows(pair)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    data = {"data": str(folder / "train.jsonl"), "eval_data": str(folder / "eval.jsonl")}
    return {"kind": "rows", **data, "reward": reward}


def learn(folder: Path, env: Any, algorithm: Any, model: Path | None = None, **settings: Any) -> tidemill.Run:
    if model is None:
        model = folder / "model"
        fresh_model(model, alphabet=LETTERS + "=\n", context=32, **SIZES["0.1m"])
    tables: dict[str, Any] = {
        "placement": INLINE,
        "trainer": {"lr": 3e-3},
        "rollout": {"groups": 8, "max_tokens": 3},
        "eval": {"every": 0, "tasks": 32, "final_tasks": 32},
        "record": {"checkpoint_every": 0, "trace": False, "probe_every": 4},
        "run_dir": folder / "run",
    }
    return tidemill.train(env, model, quiet=True, algorithm=algorithm, **tables | settings)


def steps_of(run: tidemill.Run) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/tokens" in line]


def conservation(folder: Path) -> dict[str, int]:
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db:
        db.row_factory = sqlite3.Row
        return dict(db.execute("SELECT * FROM conservation").fetchone())


def test_sft_learns_the_answers_and_says_what_it_did(tmp_path: Path) -> None:
    run = learn(tmp_path, environment(tmp_path, answers, "exact"), "sft", steps=60)
    report, steps = run.report, steps_of(run)
    before, after = report["held_out_given"]["before"], report["held_out_given"]["after"]
    assert report["accuracy_after"] > 0.8 > 0.4 > report["accuracy_before"], report
    assert after["loss"] < 0.3 < 1.5 < before["loss"], (before, after)
    assert steps[0]["train/loss"] > 1.5 and steps[-1]["train/loss"] < 0.3
    assert conservation(run.folder) == {
        **{"admitted": 480, "trained": 480, "dropped": 0, "pending": 0, "lost": 0, "trained_twice": 0}
    }
    with closing(sqlite3.connect(run.folder / "ledger.sqlite")) as db:
        found = db.execute(
            "SELECT DISTINCT finish, sampled, oldest, mean_logprob, reward FROM trajectories "
            "JOIN attempts USING (group_id, sample)"
        ).fetchall()
    assert found == [("given", 0, None, None, 1.0)]
    for step in steps:  # nothing is told of what was not there
        assert not [name for name in step if name.startswith(("reward/", "lag/", "mismatch/"))], step
        assert step["length/mean"] == 2 and step["throughput/tokens_per_s"] > 0 and np.isfinite(step["train/grad_norm"])
    assert report["tokens_sampled"] == report["max_lag_seen"] == report["mismatch_lag0"]["tokens"] == 0
    assert report["warnings"] == {} and report["judging"]["scored"] == 480


def test_dpo_learns_which_reply_is_better_without_a_reward(tmp_path: Path) -> None:
    run = learn(tmp_path, environment(tmp_path, preferences), "dpo", steps=40, trainer={"lr": 1e-3})
    before, after = run.report["held_out_given"]["before"], run.report["held_out_given"]["after"]
    assert before["preference_loss"] == pytest.approx(np.log(2), abs=1e-6), "at its reference every margin is 0"
    assert after["preference_loss"] < 0.66 and after["preference_accuracy"] > 0.7 > 0 == before["preference_accuracy"], after
    assert after["margin"] > 0.05 and run.report["accuracy_after"] is None and conservation(run.folder)["trained"] == 320
    assert steps_of(run)[-1]["eval/preference_accuracy"] == before["preference_accuracy"], "of the latest evaluation by then"


@pytest.mark.slow
def test_kto_learns_from_replies_that_are_good_or_bad(tmp_path: Path) -> None:
    algorithm, rollout = {"name": "kto", "beta": 0.5}, {"groups": 16, "max_tokens": 3}
    run = learn(tmp_path, environment(tmp_path, labels), algorithm, steps=60, rollout=rollout, trainer={"lr": 1e-3})
    before, after = run.report["held_out_given"]["before"], run.report["held_out_given"]["after"]
    assert before["preference_loss"] == pytest.approx(0.5, abs=1e-6) and before["margin"] == pytest.approx(0, abs=1e-6)
    assert after["preference_loss"] < 0.4 and after["margin"] > 1 and after["preference_accuracy"] > 0.7, after
    assert {step["train/pairs"] for step in steps_of(run) if "train/pairs" in step} == set(), "kto knows no pairs"


def many(pair: str) -> list[Row]:
    """The right letter against all that a policy which knows nothing may say."""
    bad = {wrong(pair), pair, "", pair[1] + pair[0], pair[0] * 2, pair[0] + "=", "="} - {pair[0]}
    return [{"prompt": f"{pair}=", "chosen": pair[0], "rejected": each} for each in sorted(bad)]


@pytest.mark.slow
def test_a_reward_model_learns_from_pairs_and_a_policy_from_it(tmp_path: Path) -> None:
    """As usual: sft, a reward model that begins there, a policy that nothing else judges."""
    told = learn(tmp_path, environment(tmp_path, answers), "sft", steps=50)
    table = {"steps": 40, "trainer": {"lr": 1e-3}, "rollout": {"groups": 16, "max_tokens": 3}}
    judge = learn(tmp_path, environment(tmp_path, many), "reward_model", told.final, run_dir=tmp_path / "judge", **table)
    before, after = judge.report["held_out_given"]["before"], judge.report["held_out_given"]["after"]
    assert before["preference_loss"] == pytest.approx(np.log(2), abs=1e-6), "a head of zeros knows nothing"
    assert after["preference_accuracy"] > 0.65, after  # rounding decides where between 0.72 and 1.0 it ends: 36 seeds
    config = json.loads((judge.final / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"] and len(config["id2label"]) == 1
    judged = {**environment(tmp_path, answers), "reward": "model", "reward_options": {"folder": str(judge.final)}}
    scoring = {"workers": 1, "limit_s": 60, "accept": ["garbage"]}
    policy = learn(tmp_path, judged, "grpo", tmp_path / "model", steps=30, run_dir=tmp_path / "policy", scoring=scoring)
    rewards = [step["reward/mean"] for step in steps_of(policy)]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.5, rewards


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"name": "reward_model", "critic": "initial"}, "needs critic = 'policy', a head on the model that is trained"),
        ({"name": "reward_model", "critic": {"model": "policy", "clip": 0.2}}, "takes nothing else of it but lr"),
        ({"name": "reward_model", "loss": "reinforce"}, "is trained with bradley_terry, the loss 'score'"),
        ({"name": "reward_model", "given": ""}, "is of replies that the tasks give: set given = 'pairs' too"),
        ({"name": "dpo", "loss": "score"}, "is trained with bradley_terry, the loss 'score'"),
    ],
)
def test_what_is_no_reward_model_is_refused(algorithm: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        learn(tmp_path, environment(tmp_path, preferences), algorithm, steps=2)


def weights(run: tidemill.Run) -> bytes:
    return (run.folder / "final" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["sft", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpo", "kto"))])
def test_a_deterministic_run_that_was_stopped_ends_with_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = environment(tmp_path, {"sft": answers, "dpo": preferences, "kto": labels}[name])
    fresh_model(tmp_path / "model", alphabet=LETTERS + "=\n", context=32, **SIZES["0.1m"])
    settings: dict[str, Any] = {"deterministic": True, "model": tmp_path / "model", "record": {"checkpoint_every": 3}}
    whole = learn(tmp_path, env, name, steps=7, run_dir=tmp_path / "whole", **settings)

    monkeypatch.setattr(fault_injection, "_armed", Faults([Fault.parse(CUT)], tmp_path / "log", 0))
    with pytest.raises(FaultError):
        learn(tmp_path, env, name, steps=7, run_dir=tmp_path / "cut", **settings)
    assert conservation(tmp_path / "cut")["trained"] >= 5 * 8
    again = learn(tmp_path, env, name, steps=7, run_dir=tmp_path / "cut", **settings)
    assert weights(again) == weights(whole)
    assert conservation(tmp_path / "cut") == conservation(tmp_path / "whole")
    with closing(sqlite3.connect(tmp_path / "cut" / "ledger.sqlite")) as db:
        assert db.execute("SELECT max(runs) FROM steps").fetchone() == (2,), "it was to do recorded steps again"


def test_any_run_that_was_cut_off_trains_recorded_steps_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = environment(tmp_path, preferences)
    fresh_model(tmp_path / "model", alphabet=LETTERS + "=\n", context=32, **SIZES["0.1m"])
    settings: dict[str, Any] = {"model": tmp_path / "model", "record": {"checkpoint_every": 3}, "max_lag": 2}

    monkeypatch.setattr(fault_injection, "_armed", Faults([Fault.parse(CUT)], tmp_path / "log", 0))
    with pytest.raises(FaultError):
        learn(tmp_path, env, "dpo", steps=7, **settings)
    run = learn(tmp_path, env, "dpo", steps=7, **settings)
    counts = conservation(run.folder)
    assert run.complete and (counts["trained"], counts["pending"]) == (7 * 8, 0)
    assert counts["lost"] == counts["trained_twice"] == 0
    with closing(sqlite3.connect(run.folder / "ledger.sqlite")) as db:
        assert db.execute("SELECT max(incarnation) FROM steps").fetchone() == (1,)


def test_what_is_learnt_has_to_be_there_before_anything_is_started(tmp_path: Path) -> None:
    env = environment(tmp_path, answers)
    with pytest.raises(ConfigError, match=r"task .* has the columns answer: expected a column `chosen` with a text"):
        learn(tmp_path, env, "dpo", steps=1)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"env\.reward is empty"):
        learn(tmp_path, env, "grpo", steps=1, model=tmp_path / "model", run_dir=tmp_path / "other")


@pytest.mark.slow
def test_a_file_of_conversations_is_learnt_turn_by_turn(tmp_path: Path) -> None:
    def talk(pair: str) -> list[Row]:
        said = [(role, text) for letter in pair for role, text in (("user", f"{letter}="), ("assistant", letter))]
        return [{"messages": [{"role": role, "content": text} for role, text in said]}]

    env = environment(tmp_path, talk) | {"prompt_column": "messages"}
    run = learn(tmp_path, env, "sft", steps=30)
    with closing(sqlite3.connect(run.folder / "ledger.sqlite")) as db:
        assert db.execute("SELECT DISTINCT turns, sampled FROM trajectories").fetchall() == [(2, 0)]
    assert {step["length/mean"] for step in steps_of(run)} == {4}, "two letters, each with its end token"
    assert run.report["held_out_given"]["after"]["loss"] < 0.5 * run.report["held_out_given"]["before"]["loss"]


def test_an_environment_with_a_reward_of_its_own_may_give_answers_too(tmp_path: Path) -> None:
    """The tasks' `answer` column, whatever the kind of the environment."""
    from tidemill.envs.environment import environment as made

    @made(tasks=[row for pair in PAIRS for row in answers(pair)])
    async def first(task: tidemill.Task, chat: tidemill.Chat) -> float:
        return float(await chat.reply(task.prompt) == task.data["answer"])

    run = learn(tmp_path, first, "sft", steps=2)
    assert run.report["accuracy_after"] is not None and "loss" in run.report["held_out_given"]["after"]
