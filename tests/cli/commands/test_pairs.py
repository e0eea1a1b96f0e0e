"""`tidemill pairs`: what a verifier preferred becomes what DPO learns."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import tidemill as package
from tidemill.envs.environment import environment
from tidemill.models.new_model import SIZES, fresh_model

LETTERS = "abcd"
CONVERSATION = [{"role": "system", "content": "say it"}, {"role": "user", "content": "a"}]
SETTINGS: dict[str, Any] = {
    "placement": {"kind": "inline", "environment": {"workers": 0}},
    "trainer": {"lr": 3e-3},
    "eval": {"every": 0, "tasks": 8, "final_tasks": 8},
    "record": {"checkpoint_every": 0, "trace": False, "probe_every": 0},
}


def rows(split: str) -> list[dict[str, Any]]:
    if split == "eval":
        return [{"prompt": f"{c}:", "answer": c} for c in LETTERS]
    return [{"prompt": f"{c}{x}", "answer": c} for c in LETTERS for x in "=+"]


@environment(tasks=rows)
async def letter(task: package.Task, chat: package.Chat) -> package.Score:
    reply = await chat.reply(task.prompt)
    return package.Score(0.5 * reply.startswith(task.data["answer"]) + 0.5 * (reply == task.data["answer"]))


@environment(tasks=[{"prompt": CONVERSATION, "answer": "a"}, *({"prompt": c, "answer": c} for c in "bcdefghijklm")])
async def talk(task: package.Task, chat: package.Chat) -> float:
    """Any reward that differs: by the length."""
    return min(len(await chat.reply(task.prompt)) / 8, 1.0)


@environment(tasks=rows)
async def otherwise(task: package.Task, chat: package.Chat) -> float:
    return min(len(await chat.reply(f"{task.prompt}{task.prompt}")) / 8, 1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    fresh_model(folder, alphabet="abcdefghijklm=+:sytn o\n", context=64, **SIZES["0.1m"])
    return folder


def sampled(env: Any, model: Path, folder: Path, **changes: Any) -> Path:
    given = {"steps": 6, "rollout": {"groups": 4, "group_size": 8, "max_tokens": 6}}
    package.train(env, model, run_dir=folder, quiet=True, **{**given, **SETTINGS, **changes})
    return folder


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_verifiers_pairs_teach_dpo(tidemill, tmp_path: Path) -> None:
    fresh_model(tmp_path / "m", alphabet=LETTERS + "=+:\n", context=64, **SIZES["0.1m"])
    rollout = {"groups": 8, "group_size": 8, "max_tokens": 6}
    run, out = sampled(letter, tmp_path / "m", tmp_path / "run", steps=20, rollout=rollout), tmp_path / "pairs.jsonl"
    said = tidemill("pairs", run, out, "--json")
    assert said.code == 0, said.out
    told, found = json.loads(said.out), read(out)
    assert told["pairs"] == len(found) > 20 and told["pairs"] + told["alike"] == told["groups"] == 160

    def worth(row: dict[str, Any], reply: str) -> float:
        return 0.5 * reply.startswith(row["answer"]) + 0.5 * (reply == row["answer"])

    assert all(worth(row, row["chosen"]) > worth(row, row["rejected"]) for row in found), "the verifier's own order"
    (tmp_path / "reward.py").write_text("def begins(completion, answer):\n    return float(completion.startswith(answer))\n")
    held_out = [{**row, "chosen": row["answer"], "rejected": "+"} for row in rows("eval")]
    (tmp_path / "eval.jsonl").write_text("\n".join(map(json.dumps, held_out)))
    env = {
        "kind": "rows",
        "data": str(out),
        "eval_data": str(tmp_path / "eval.jsonl"),
        "reward": f"{tmp_path}/reward.py:begins",
    }
    settings = {
        **SETTINGS,
        "rollout": {"groups": 8, "max_tokens": 3},
        "trainer": {"lr": 1e-3},
        "scoring": {"accept": ["garbage"]},
    }
    learnt = package.train(env, run / "initial", run_dir=tmp_path / "dpo", quiet=True, algorithm="dpo", steps=60, **settings)
    steps = [json.loads(line) for line in (learnt.folder / "metrics.jsonl").read_text().splitlines()]
    told_apart = [step["train/preference_accuracy"] for step in steps if "train/preference_accuracy" in step]
    assert sum(told_apart[-5:]) / 5 > 0.8 > 0.2 > told_apart[0], told_apart
    assert learnt.report["accuracy_after"] >= learnt.report["accuracy_before"], learnt.report


def test_a_prompt_of_several_messages_stays_what_it_is(tidemill, model: Path, tmp_path: Path) -> None:
    run, out = sampled(talk, model, tmp_path / "run"), tmp_path / "pairs.jsonl"
    assert tidemill("pairs", run, out).code == 0
    prompts = [row["prompt"] for row in read(out)]
    assert CONVERSATION in prompts and any(isinstance(prompt, str) for prompt in prompts)


def test_an_attempt_that_was_asked_something_else_is_no_answer_to_the_prompt(tidemill, model: Path, tmp_path: Path) -> None:
    run = sampled(otherwise, model, tmp_path / "run", steps=2)
    said = tidemill("pairs", run, tmp_path / "pairs.jsonl")
    assert said.code == 2 and "not asked by the prompt" in said.out and not (tmp_path / "pairs.jsonl").exists()


def test_what_makes_no_pair_is_counted(tidemill, run: Path, tmp_path: Path) -> None:
    """The shared run has two turns an episode."""
    with sqlite3.connect(run / "ledger.sqlite") as db:
        db.execute("UPDATE trajectories SET finish = 'env_done'")
    said = tidemill("pairs", run, tmp_path / "pairs.jsonl")
    assert said.code == 2 and "of several turns" in said.out and "0 of several turns" not in said.out


def test_attempts_that_were_cut_off_are_not_taken(tidemill, model: Path, tmp_path: Path) -> None:
    run, out = sampled(talk, model, tmp_path / "run", steps=3), tmp_path / "pairs.jsonl"
    assert tidemill("pairs", run, out).code == 0
    with sqlite3.connect(run / "ledger.sqlite") as db:
        db.execute("UPDATE trajectories SET finish = 'length'")
    said = tidemill("pairs", run, tmp_path / "none.jsonl")
    assert said.code == 2 and "12 alike" in said.out


def test_files_are_not_overwritten_and_have_to_be_rows(tidemill, run: Path, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("mine")
    assert "exists" in tidemill("pairs", run, tmp_path / "there.jsonl").out
    assert (tmp_path / "there.jsonl").read_text() == "mine"
    assert "does not end in .jsonl" in tidemill("pairs", run, tmp_path / "pairs.csv").out
    assert "is not a run" in tidemill("pairs", tmp_path, tmp_path / "pairs.jsonl").out
