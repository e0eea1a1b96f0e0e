"""Every block of docs/writing_an_environment.md runs, and does what the page says."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest
from test_make import attempt

from tidemill.core.types import Score, Task, Unscorable
from tidemill.envs.build_environment import make_environment
from tidemill.envs.judge import RewardJudge
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.run.recipe import RunConfig, load_recipe

PAGE = Path(__file__).parents[2] / "docs" / "writing_an_environment.md"
BLOCK = re.compile(r"(?:`(?P<file>[\w.]+)`:\n\n)?```(?P<language>\w*)\n(?P<code>.*?)```", re.DOTALL)


@pytest.fixture
def page(tmp_path, monkeypatch) -> list[tuple[str, str]]:
    """The page's blocks as (language, code); those that name a file are written, and the folder is the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    blocks = list(BLOCK.finditer(PAGE.read_text()))
    for block in blocks:
        if block["file"]:
            Path(block["file"]).write_text(block["code"])
    return [(b["language"], b["code"]) for b in blocks]


def recipe(code: str) -> RunConfig:
    Path("recipe.toml").write_text(code)
    return load_recipe(["recipe.toml"])


async def test_the_recipes_build_and_judge(page):
    pool = RewardPool(workers=1, limit_s=20)
    tables = [code for language, code in page if language == "toml"]
    assert len(tables) == 2
    try:
        sums = make_environment(recipe(tables[0]).env, pool)
        assert {len(sums.tasks("train")) + len(sums.tasks("eval"))} == {4}
        task = sums.tasks("eval")[0]
        assert await sums.judge(task, [attempt(task.data["answer"] + "\n"), attempt("?")]) == [Score(1.0), Score(0.0)]
        spelling = make_environment(recipe(tables[1].replace("doubling.py:doubling", "spelling.py:score")).env, pool)
        task = spelling.tasks("eval")[0]
        judged = await spelling.judge(task, [attempt("ruolf"), attempt("ruol")])
        assert judged == [Score(1.0), Score(0.8)]
        (none,) = await spelling.judge(Task("t", "p", {"answer": ""}), [attempt("x")])
        assert isinstance(none, Unscorable)
    finally:
        await pool.close()


async def test_the_conversation_and_its_test(page):
    tables = [code for language, code in page if language == "toml"]
    env = make_environment(recipe(tables[1]).env, RewardPool(workers=0))
    assert [len(env.tasks(split)) for split in ("train", "eval")] == [38, 10]
    sys.modules.pop("doubling", None)
    namespace: dict = {}
    exec(compile(Path("test_doubling.py").read_text(), "test_doubling.py", "exec"), namespace)
    await asyncio.to_thread(namespace["test_the_second_try_counts_half"])


async def test_the_group_form_is_called_as_the_page_says(page):
    code = next(code for _, code in page if "near_the_length" in code)
    Path("lengths.py").write_text(code)
    judge = RewardJudge("lengths.py:near_the_length", RewardPool(workers=0))
    judge.check({"length"})
    outcomes = await judge(Task("t", "p", {"length": 4}), [attempt("four"), attempt("no")])
    assert outcomes == [Score(0.0), Score(-0.5)]


def test_every_block_is_covered(page):
    assert [language for language, _ in page] == ["json", "python", "toml", "python", "python", "toml", "python", "python"]
