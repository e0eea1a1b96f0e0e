"""`tidemill reward test`, and the same check at the start of a run: gold must pass, garbage must not, and it says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tidemill.core.config import build
from tidemill.core.types import Score, Task
from tidemill.envs.build_environment import make_environment
from tidemill.envs.environment import environment
from tidemill.envs.environment_settings import GuessSettings
from tidemill.envs.guess import guess_game
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.ledger.ledger import SqliteLedger
from tidemill.run.preflight.reward_audit import HOPELESS, Own, check
from tidemill.run.recipe import RunConfig

pytestmark = pytest.mark.runs

REWARDS = """
tasks = [{"prompt": f"{i} + 1 =", "answer": str(i + 1), "tens": str((i + 1) // 10)} for i in range(60)]

def right(completion, answer):
    return float(completion.strip() == answer)

def takes_all(completion, answer):
    return 1.0

def takes_none(completion, answer):
    return 0.5 * (completion.strip() == answer)

def contains(completion, answer):
    return float(answer in completion or completion == "")

def raises(completion, answer):
    return float(int(completion) == int(answer))

def length(completion):
    return min(1.0, len(completion) / 20)

def ranks(completions, answer):
    right = [c.strip() == a for c, a in zip(completions, answer)]
    assert len(completions) > 1, "there is nothing to rank"
    return [float(r and not all(right)) for r in right]

def crashes_the_group(completions, answer):
    return [float(int(c) == int(a)) for c, a in zip(completions, answer)]

def dies(completion, answer):
    import os
    os._exit(0)
"""

TAGGED = """
import re

tasks = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(60)]

def gold(answer):
    return f"so <answer>{answer}</answer>"

def score(completion, answer):
    found = re.findall(r"<answer>(.*?)</answer>", completion)
    return float(bool(found) and found[-1] == answer)

def score_any(completion, answer):
    return float("<answer>" in completion)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "tagged.py").write_text(TAGGED)
    path = tmp_path / "recipe.toml"
    path.write_text(
        f"run_dir = '{tmp_path}/run'\nmodel = 'new:0.1m'\nenv = '{tmp_path}/mine.py:right'\nsteps = 1\n"
        "placement = 'inline'\n"
        "rollout = { groups = 1, group_size = 2, max_tokens = 2 }\neval = { tasks = 1, final_tasks = 1 }\n"
        "algorithm = { name = 'grpo', zero_variance = 'keep' }\nscoring = { workers = 1, limit_s = 5 }\n"
    )
    return path


def lines(tidemill, recipe: Path, reward: str, *more: str, code: int) -> dict[str, dict]:
    said = tidemill("reward", "test", str(recipe), f"env={recipe.parent}/{reward}", "--json", *more)
    assert said.code == code, said.out
    return {line["kind"]: line for line in json.loads(said.out)["lines"]}


def test_a_sound_reward(tidemill, recipe):
    found = lines(tidemill, recipe, "mine.py:right", code=0)
    assert list(found) == ["gold", "empty", "letters", "digits", "echo", "refusal", "long"]
    assert {line["verdict"] for line in found.values()} == {"ok"}
    assert found["gold"]["n"] == found["gold"]["passed"] == found["empty"]["n"] == 32
    assert found["gold"]["mean"] == 1.0 and found["long"]["mean"] == 0.0
    assert 0 < found["gold"]["slowest_s"] < 60


@pytest.mark.parametrize(
    ("reward", "verdicts"),
    [
        ("mine.py:takes_all", {"gold": "ok", "empty": "passes", "letters": "passes", "long": "passes"}),
        pytest.param("mine.py:takes_none", {"gold": "fails", "empty": "ok"}, marks=pytest.mark.slow),
        pytest.param("mine.py:contains", {"gold": "ok", "empty": "passes", "letters": "ok"}, marks=pytest.mark.slow),
        pytest.param("mine.py:raises", {"gold": "ok", "empty": "not judged", "digits": "ok"}, marks=pytest.mark.slow),
        ("mine.py:crashes_the_group", {"gold": "ok", "letters": "not judged", "digits": "ok"}),
        ("tagged.py:score_any", {"gold": "ok", "letters": "ok", "formatted": "passes"}),
        ("mine.py:dies", {"gold": "fails"}),
    ],
)
def test_an_unsound_reward(reward, verdicts, tidemill, recipe):
    found = lines(tidemill, recipe, reward, code=1)
    assert {kind: found[kind]["verdict"] for kind in verdicts} == verdicts
    assert all(line["why"] for line in found.values() if line["verdict"] != "ok")


def test_a_reply_has_the_form_that_the_reward_reads(tidemill, recipe):
    assert lines(tidemill, recipe, "tagged.py:score", code=0)["formatted"]["mean"] == 0.0


@pytest.mark.slow
def test_a_reply_has_the_form_that_a_reasoning_gym_reads(tidemill, recipe):
    gym = '{ kind = "reasoning_gym", dataset = "chain_sum", size = 20, eval_size = 5, answer_tag = "answer" }'
    said = tidemill("reward", "test", str(recipe), f"env={gym}", "--json")
    found = {line["kind"]: line for line in json.loads(said.out)["lines"]}
    assert said.code == 0 and found["gold"]["passed"] == 20 and found["formatted"]["verdict"] == "ok"


@pytest.mark.parametrize(
    "reward", ["exact", *(pytest.param(r, marks=pytest.mark.slow) for r in ("numeric", "last_boxed", "math"))]
)
def test_named_rewards_on_rows(reward, tidemill, recipe):
    data = recipe.parent / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"say {i}", "answer": str(700 + i)}) + "\n" for i in range(30)))
    env = f'{{ kind = "rows", data = "{data}", reward = "{reward}" }}'
    said = tidemill("reward", "test", str(recipe), f"env={env}")
    assert said.code == 0, said.out
    assert "gold" in said.out and "fails" not in said.out and "not checked" not in said.out


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ("'mine.py:length'", "does not ask for the answer"),
        ("'talks.py:talk'", "@environment(gold=...)"),
        ("{ kind = 'rows', data = 'r.jsonl', reward = 'regex', reward_options = { pattern = 'x' } }", "can not be told"),
    ],
)
def test_without_a_gold_reply_nothing_is_checked_and_that_is_said(env, why, tidemill, recipe, monkeypatch):
    monkeypatch.chdir(recipe.parent)
    Path("r.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}", "answer": "x"}) + "\n" for i in range(30)))
    Path("talks.py").write_text(
        "from tidemill import environment\n\n@environment(tasks=[{'prompt': str(i)} for i in range(20)])\n"
        "async def talk(task, chat):\n    return float(len(await chat.reply(task.prompt)) > 3)\n"
    )
    said = tidemill("reward", "test", str(recipe), f"env={env}", "--json")
    found = json.loads(said.out)["lines"]
    assert said.code == 0 and {line["verdict"] for line in found} == {"not checked"}
    assert why in found[0]["why"] and found[0]["kind"] == "gold" and found[0]["n"] == 0
    assert any(line["mean"] == 1.0 for line in found), "shown all the same"


def test_a_group_is_judged_as_a_group(tidemill, recipe):
    """The gold reply among its siblings is the best of them; by itself there would be nothing to rank."""
    found = lines(tidemill, recipe, "mine.py:ranks", code=0)
    assert found["gold"]["passed"] == 32 and found["letters"]["passed"] == 0


@pytest.mark.slow
def test_replies_of_ones_own(tidemill, recipe):
    own = recipe.parent / "own.jsonl"
    rows = [
        {"reply": "<answer></answer>"},
        {"answer": "5", "expect": "fail"},
        {"reply": "<answer>nothing", "expect": "pass"},
        {"reply": "so", "expect": "fail", "task": "nowhere"},
    ]
    own.write_text("\n".join(map(json.dumps, rows[:3])))
    found = lines(tidemill, recipe, "tagged.py:score", "--answers", str(own), code=1)
    assert [found[f"own {i}"]["verdict"] for i in (1, 2, 3)] == ["ok", "passes", "fails"], (
        "5 is right once, and told not to be"
    )
    assert found["own 2"]["passed"] == 1 and found["own 3"]["n"] == 32
    own.write_text(json.dumps(rows[0]))
    lines(tidemill, recipe, "tagged.py:score", "--answers", str(own), code=0)
    bad = [
        "[1]",
        '{"reply": 1}',
        '{"reply": "a", "answer": "b"}',
        '{"reply": "a", "expect": "x"}',
        "{",
        json.dumps(rows[3]),
        "",
    ]
    for text in bad:
        own.write_text(text)
        assert tidemill("reward", "test", str(recipe), "--answers", str(own)).code == 2, text


async def test_chance_is_no_pass():
    """Two answers, half of the tasks each: an echo that contains one of them is right half of the time, and no more."""

    def env(judge):
        @environment(
            tasks=[Task(f"t{i}", f"{i}: yes or no?", {"answer": "yes" if i % 2 else "no"}) for i in range(40)],
            gold=lambda answer: answer,
        )
        async def decides(task, chat):
            return float(judge(await chat.reply(task.prompt), task.data["answer"]))

        return decides

    def last_word(reply, answer):
        return (["", *[word for word in ("yes", "no") if word in reply]])[-1] == answer

    def has_no(reply, answer):
        return "no" in reply or reply == answer

    def mostly(reply, answer):
        return has_no(reply, answer) and not reply.startswith("0:")

    for judge, verdict in ((last_word, "ok"), (has_no, "passes"), (mostly, "passes")):
        decides = env(judge)
        found = await check(decides, decides.tasks("train")[:16], limit_s=5, budget_s=60)
        echo = next(line for line in found.lines if line.kind == "echo")
        assert echo.verdict == verdict, echo


async def test_the_commonest_answers_wrong_labels_and_time():
    def env(wrong: int):
        @environment(tasks=[Task(f"t{i}", str(i), {"answer": str(i)}) for i in range(60)], gold=lambda answer: answer)
        async def looks_up(task, chat):
            return Score(float(await chat.reply(task.prompt) == task.data["answer"] and int(task.id[1:]) % 40 >= wrong))

        return looks_up

    for wrong, verdict in ((1, "ok"), (3, "fails")):
        tasks = [task for task in env(wrong).tasks("train") if int(task.id[1:]) < 40][:20] + env(wrong).tasks("train")[-5:]
        found = await check(env(wrong), tasks, limit_s=5, budget_s=60)
        assert found.lines[0].verdict == verdict, found.lines[0]
    found = await check(env(0), env(0).tasks("train")[:8], limit_s=5, budget_s=0)
    assert [line.kind for line in found.lines] == ["gold"] and found.lines[0].n == 1, "out of time after the first"


async def test_a_reward_that_judges_nothing_is_soon_given_up(tmp_path):
    (tmp_path / "mine.py").write_text(REWARDS)
    pool = RewardPool(workers=1, limit_s=5)
    try:
        env = make_environment(build(RunConfig, {"run_dir": "r", "model": "m", "env": f"{tmp_path}/mine.py:dies"}).env, pool)
        found = await check(env, env.tasks("train")[:8], limit_s=30, budget_s=600)
        assert pool.counters()["scoring/calls"] == HOPELESS and found.refused().keys() == {"gold"}
    finally:
        await pool.close()


async def test_every_turn_of_a_game_is_judged() -> None:
    """Where a second turn failed, only attempts that were right at once were left: an echo seemed to solve all."""
    game = guess_game(GuessSettings(low=1, high=4, turns=2))
    found = await check(game, game.tasks("train"), limit_s=5, budget_s=60)
    assert not any(line.infra_errors or line.bad for line in found.lines), found.lines
    assert next(line for line in found.lines if line.kind == "echo").n == len(game.tasks("train"))


def test_train_refuses_and_says_how_to_look(tidemill, recipe):
    for reward, name in (("takes_none", "gold"), ("takes_all", "garbage"), ("dies", "gold")):
        said = tidemill("train", str(recipe), f"env={recipe.parent}/mine.py:{reward}")
        assert said.code == 2 and "\n" not in said.out
        assert "`tidemill reward test RECIPE`" in said.out and f"scoring.accept=['{name}']" in said.out
    with SqliteLedger(recipe.parent / "run", mode="read") as ledger:
        assert ledger.counts().admitted == 0 and not (recipe.parent / "run" / "initial").exists(), "nothing was begun"
        assert [e.detail["accepted"] for e in ledger.events("reward_check")] == [{}, {}, {}]


def test_what_is_accepted_by_name_is_recorded(tidemill, recipe):
    env = f"env={recipe.parent}/mine.py:takes_all"
    said = tidemill("train", str(recipe), env, "scoring.accept=['gold']")
    assert said.code == 2 and "garbage" in said.out
    said = tidemill("train", str(recipe), env, "scoring.accept=['garbage']")
    assert said.code == 0 and "so the run begins although" in said.out
    with SqliteLedger(recipe.parent / "run", mode="read") as ledger:
        assert "empty replies earn the full score" in ledger.events("reward_check")[-1].detail["accepted"]["garbage"]
    assert json.loads((recipe.parent / "run" / "config.json").read_text())["scoring"]["accept"] == ["garbage"]


def test_a_run_that_goes_on_is_not_checked_again(tidemill, recipe):
    assert tidemill("train", str(recipe)).code == 0
    (recipe.parent / "run" / "report.json").unlink()
    (recipe.parent / "mine.py").write_text(REWARDS.replace("completion.strip() == answer", "False"))
    said = tidemill("train", str(recipe), "steps=2")
    assert said.code == 0
    with SqliteLedger(recipe.parent / "run", mode="read") as ledger:
        assert len(ledger.events("reward_check")) == 1


async def test_a_reward_is_given_the_text_to_the_letter():
    """Also text that a tokenizer has a token for, and what no policy could say."""
    heard = list[str]()

    @environment(tasks=[Task("t", "a<eos>b", {"answer": "<eos>"})], gold=lambda task: "x <eos>  y\n")
    async def game(task, chat):
        heard.append(await chat.reply(task.prompt))
        return Score(float(heard[-1] == "x <eos>  y\n"))

    found = await check(
        game, [Task("t", "a<eos>b", {"answer": "<eos>"})], limit_s=5, budget_s=60, own=[Own("a\ud800b", "fail")]
    )
    assert not [line for line in found.lines if line.bad], found
    assert "a<eos>b" in heard and "x <eos>  y\n" in heard and "a?b" in heard
