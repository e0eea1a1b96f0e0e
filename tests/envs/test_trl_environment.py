"""TRL's environments and tools play here as they stand."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from tools.scripted_chat import ScriptedChat, call, saying
from trl_games import ROWS, Vault, few_tries, says_so

import tidemill
from tidemill.core.errors import ConfigError, EpisodeFailed
from tidemill.core.types import InfraError, Score, Unscorable
from tidemill.envs.tasks import task_of
from tidemill.envs.trl_environment import trl_environment, trl_message, trl_text

TASKS = [task_of(row, "row") for row in ROWS]
SPLITS = {"train": ROWS[:1], "eval": ROWS[1:]}


def replies(*digits: list[int]) -> list[Any]:
    return [*(saying("", call("turn", {"digits": each})) for each in digits), "it is open"]


async def test_an_episode() -> None:
    env = trl_environment(Vault, tasks=SPLITS, reward_funcs=[few_tries, says_so], reward_weights=[1.0, 2.0])
    assert env.name == "Vault" and env.tasks("train")[0].data["digits"] == [3, 1, 4]
    chat = ScriptedChat(*replies([3, 1, 5], [3, 1, 4]))
    score = await env.run(TASKS[0], chat)
    assert score == Score(1.8, {"few_tries": -0.2, "says_so": 0.5, "Vault": 1.0})
    assert chat.asked[0] == [{"role": "user", "content": "Open the vault. It has 3 digits."}]
    assert [each["function"]["name"] for each in chat.options[0]["tools"]] == ["look", "turn"]
    assert [each["content"] for each in chat.asked[2] if each["role"] == "tool"] == [
        *("{'opened': False, 'right': 2}", "{'opened': True, 'right': 3}")
    ]
    assert ROWS[0]["prompt"] == [{"role": "user", "content": "Open the vault."}]
    score = await env.run(TASKS[1], ScriptedChat("no"))
    assert score == Score(0.0, {"few_tries": 0.0, "says_so": 0.0, "Vault": 0.0})


async def test_instances_are_used_again_and_never_by_two_episodes() -> None:
    made: list[Vault] = []

    def factory() -> Vault:
        made.append(Vault())
        return made[-1]

    env = trl_environment(factory, tasks=SPLITS, name="vaults")
    chats = [ScriptedChat(*replies([digit], [3, 1, 4])) for digit in range(5)]
    scores = await asyncio.gather(*(env.run(TASKS[0], chat) for chat in chats))
    assert [each.value for each in scores if isinstance(each, Score)] == [1.0] * 5
    assert len(made) == 5 and all(each.tries == 2 for each in made) and len({each.thread for each in made}) == 5
    for _ in range(3):
        await env.run(TASKS[1], ScriptedChat("no"))
    assert len(made) == 5 and sum(each.resets for each in made) == 8
    chats = [ScriptedChat(*replies([digit], [2], [2, 7])) for digit in range(5)]
    assert await asyncio.gather(*(env.run(TASKS[1], chat) for chat in chats)) == [Score(1.0, {"Vault": 1.0})] * 5
    assert len(made) == 5 and [each.tries for each in made] == [3] * 5


async def test_exceptions_of_its_tools_are_observed() -> None:
    chat = ScriptedChat(*replies([2, 7], [1]))
    score = await trl_environment(Vault, tasks=SPLITS).run(TASKS[1], chat)
    assert score == Score(1.0, {"Vault": 1.0})
    assert chat.asked[-1][-1]["content"] == "error: turn raised ValueError: It is open."


async def test_other_failures_are_infrastructure() -> None:
    go = threading.Event()
    made = []

    class Slow:
        def __init__(self) -> None:
            made.append(self)

        def reset(self, where: str, **row: Any) -> None:
            if where == "reset":
                go.wait(60)

        def work(self) -> str:
            """Work."""
            assert go.wait(60)
            return ""

        def get_reward(self) -> float:
            raise RuntimeError("no reward")

    env = trl_environment(Slow, tasks=SPLITS, limit_s=0.05)
    tasks = {where: tidemill.Task(where, "x", {"where": where}) for where in ("reset", "tool", "reward")}
    with pytest.raises(EpisodeFailed, match=r"reset did not return within 0.05 s"):
        await env.run(tasks["reset"], ScriptedChat("x"))
    with pytest.raises(tidemill.ToolUnavailable, match=r"tool work gave no result within 0.05 s"):
        await env.run(tasks["tool"], ScriptedChat(saying("", call("work"), call("work")), "x"))
    go.set()
    env = trl_environment(Slow, tasks=SPLITS, limit_s=60)
    with pytest.raises(RuntimeError, match="no reward"):
        await env.run(tasks["reward"], ScriptedChat("x"))
    before = len(made)
    with pytest.raises(RuntimeError):
        await env.run(tasks["reward"], ScriptedChat("x"))
    assert len(made) == before + 1, "an instance that failed plays on"


async def test_tools_alone_and_rewards_of_each_form() -> None:
    def double(number: int) -> int:
        """Double a number.

        Args:
            number: Any number.
        """
        return 2 * number

    async def right(completion: str, answer: str) -> float:
        return float(completion == answer)

    def none(completions: list[Any], **kwargs: Any) -> list[None]:
        assert "environments" not in kwargs
        return [None] * len(completions)

    rows = [{"prompt": "2 * 4?", "answer": "8"}, {"prompt": "2 * 3?", "answer": "6"}]
    env = trl_environment(tools=[double], tasks={"train": rows[:1], "test": rows[1:]}, reward_funcs=[right, none])
    chat = ScriptedChat(saying("", call("double", {"number": 4})), lambda seen: seen[-1]["content"])
    assert await env.run(env.tasks("train")[0], chat) == Score(1.0, {"right": 1.0})
    alone = trl_environment(tools=[double], tasks={"train": rows[:1], "test": rows[1:]}, reward_funcs=none)
    assert isinstance(await alone.run(alone.tasks("train")[0], ScriptedChat("8")), Unscorable)


async def test_a_column_chooses_among_several() -> None:
    class Other(Vault):
        def reset(self, **row: Any) -> str | None:
            assert "environment" not in row
            return super().reset(**row) or " Now."

    env = trl_environment({"vault": Vault, "other": Other}, tasks=SPLITS)
    chat = ScriptedChat(*replies([2, 7]))
    task = tidemill.Task("t", TASKS[1].prompt, TASKS[1].data | {"environment": "other"})
    assert await env.run(task, chat) == Score(1.0, {"Other": 1.0})
    assert chat.asked[0][-1]["content"] == "Open it. Now."
    with pytest.raises(EpisodeFailed, match="environment is '': expected one of vault, other"):
        await env.run(TASKS[1], ScriptedChat())


async def test_a_failing_reward_is_no_score() -> None:
    def fails(completions: list[Any], **kwargs: Any) -> list[float]:
        raise KeyError("x")

    def wrong(completions: list[Any], **kwargs: Any) -> list[float]:
        return [1.0, 2.0]

    for reward, reason in ((fails, "fails raised KeyError: 'x'"), (wrong, "wrong returned 2 values: expected a list of 1")):
        outcome = await trl_environment(Vault, tasks=SPLITS, reward_funcs=reward).run(TASKS[1], ScriptedChat("x"))
        assert isinstance(outcome, InfraError) and reason in outcome.reason


def test_what_trl_would_not_take_is_refused() -> None:
    class NoReset:
        def guess(self) -> str:
            """Guess."""
            return ""

    class NoHint:
        def reset(self, **row: Any) -> None: ...

        def guess(self, word) -> str:
            """Guess.

            Args:
                word: x
            """
            return ""

    class NoReward:
        def reset(self, **row: Any) -> None: ...

    for factory, sentence in (
        (NoReset, "'NoReset' has no method reset"),
        (NoHint, "argument 'word' has no type hint"),
        (NoReward, "has no reward: give reward_funcs, or a method get_reward"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            trl_environment(factory, tasks=SPLITS)

    def needs(completions: list[Any], completion_ids: list[Any]) -> list[float]:
        return []

    env = trl_environment(Vault, tasks=SPLITS, reward_funcs=needs)
    with pytest.raises(ConfigError, match="needs 'completion_ids', which neither tasks nor episodes have"):
        env.tasks("train")
    with pytest.raises(ConfigError, match="2 reward_weights for 1 reward_funcs"):
        trl_environment(Vault, tasks=SPLITS, reward_funcs=few_tries, reward_weights=[1, 2])


def test_texts_and_messages_are_those_of_trl() -> None:
    assert trl_text({"a": True}) == "{'a': True}" and trl_text(None) == "None" and trl_text([1]) == "[1]"
    assert trl_text([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "ab"
    made = trl_message(saying("", call("f", {"a": 1}), call("g", "[")).message | {"content": None})
    assert made["content"] == "" and [each["function"]["arguments"] for each in made["tool_calls"]] == [{"a": 1}, "["]
    assert json.dumps(made)
