"""Programs in the docs run as they stand; those for users of TRL without the training itself."""

from __future__ import annotations

import linecache
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from envs.scripted_engine import ScriptedEngine, chat_tokenizer, says

from tidemill.controller.rollout import EpisodeSetup
from tidemill.core.types import Finish, SamplingParams, Score, Trajectory
from tidemill.envs.chat import rollout_seeds
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.run import api
from tidemill.run.session import RunEnded

DOCS = Path(__file__).parents[2] / "docs"


def programs(name: str) -> list[str]:
    found = re.findall(r"^```python\n(.*?)^```", (DOCS / name).read_text(encoding="utf-8"), re.S | re.M)
    assert found
    return [each for each in found if "import" in each]


def replied(text: str) -> Trajectory:
    tokens, mask = np.arange(2, dtype=np.int32), np.array([False, True])
    return Trajectory(tokens, mask, np.zeros(2, np.float32), np.array([-1, 0]), Finish.STOP, text=text)


def test_the_script_of_a_trl_user(monkeypatch, tmp_path, capsys):
    seen = []

    async def instead(config, display, callbacks, make):
        env = make(RewardPool(workers=0), tmp_path / "source")
        task = env.tasks("train")[0]
        seen.append([config.steps, len(env.tasks("train")), len(env.tasks("eval")), env.notes])
        seen.append(await env.judge(task, [replied(task.data["answer"]), replied("no")]))
        return RunEnded(3, True, {"steps": 3, "accuracy_before": 0.0, "accuracy_after": 1.0, "held_out": 10})

    monkeypatch.setattr(api, "run", instead)
    (program,) = programs("from_trl.md")
    linecache.cache["from_trl.md"] = (len(program), None, program.splitlines(keepends=True), "from_trl.md")
    exec(compile(program, "from_trl.md", "exec"), {"__name__": "example"})
    assert seen[0] == [100, 90, 10, []]
    assert seen[1] == [Score(1.0, {"right": 1.0, "short": 1.0}), Score(0.2, {"right": 0.0, "short": 1.0})]
    assert capsys.readouterr().out.startswith("run runs/sums: 3 steps, done\nheld-out accuracy 0.000 -> 1.000 on 10 tasks")


@pytest.mark.parametrize("program", programs("data.md"))
def test_what_the_page_on_data_says_of_rows(program):
    exec(compile(program, "data.md", "exec"), {"__name__": "example"})


@pytest.mark.slow  # it trains
def test_the_program_of_the_readme(tmp_path):
    (program,) = programs("../README.md")
    shorter = {"steps=150": "steps=3", '"accuracy": 0.5': '"accuracy": 0.02'}
    for whole, less in shorter.items():
        assert whole in program
        program = program.replace(whole, less)
    (tmp_path / "sorting.py").write_text(program)
    done = subprocess.run([sys.executable, "sorting.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "run runs/sorting: 3 steps, done\nheld-out accuracy 0." in done.stdout


async def test_the_agent_of_the_page_on_agents():
    (program,) = (each for each in programs("agents.md") if "told_twice" in each)
    linecache.cache["agents.md"] = (len(program), None, program.splitlines(keepends=True), "agents.md")
    scope = {"__name__": "example"}
    exec(compile(program, "agents.md", "exec"), scope)
    tokenizer = chat_tokenizer()
    params = SamplingParams(stop_ids=(tokenizer.eos_token_id,))
    env = scope["told_twice"]
    task = env.tasks("eval")[0]
    engine = ScriptedEngine(says(tokenizer, "five", "7", task.data["answer"]))
    episodes = EpisodeSetup(env, tokenizer, params, 1000, 60.0)
    rows = await episodes.play(task, engine, "k", rollout_seeds(0, 0, 0))
    assert rows[-1].outcome == Score(1.0) and [row.turns for row in rows] == [2, 1] and rows[-1].parent is None


@pytest.mark.runs
def test_the_ten_minutes_of_the_page_on_agents(tmp_path):
    pytest.importorskip("openai")
    page = (DOCS / "agents.md").read_text(encoding="utf-8")
    (program,) = (each for each in programs("agents.md") if "AsyncOpenAI" in each and "random" in each)
    (recipe,) = re.findall(r"^```toml\n(run_dir.*?)^```", page, re.S | re.M)
    (tmp_path / "my_agent.py").write_text(program)
    (tmp_path / "recipe.toml").write_text(recipe)
    few = ["steps=2", "rollout.groups=2", "rollout.group_size=4", "warmup.accuracy=0", "eval.final_tasks=8", "eval.every=0"]
    command = [sys.executable, "-m", "tidemill.cli.main", "train", "recipe.toml", *few]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 steps" in done.stdout and "runs/sorting" in done.stdout
