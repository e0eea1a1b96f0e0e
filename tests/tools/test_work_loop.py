"""An agent works with tools until it answers, or until a limit ends it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted_chat import ScriptedChat, call, saying

import tidemill
from tidemill.core.errors import ContextFull
from tidemill.core.types import Finish
from tidemill.tools.tool_set import ToolSet
from tidemill.tools.work_loop import observations, work


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def adding(a: int, b: int, number: int = 0) -> dict[str, Any]:
    return call("add", {"a": a, "b": b}, number)


async def test_results_go_on_with_the_conversation() -> None:
    chat = ScriptedChat(
        saying("", adding(2, 3, 1), adding(4, 5, 2)),
        lambda seen: saying("", adding(*(int(each["content"]) for each in seen[-2:]), 3)),
        lambda seen: f"it is {seen[-1]['content']}",
    )
    tools = ToolSet([add])
    done = await work(chat, "2 + 3 + 4 + 5?", tools, system="Use tools.", max_tokens=9, max_turns=3)
    assert (done.text, done.ended, done.reply.text) == ("it is 14", "answer", "it is 14")
    assert [each.content for each in done.results] == ["5", "9", "14"] and tools.counts["add"].calls == 3
    assert [each["role"] for each in done.messages] == [
        *("system", "user", "assistant", "tool", "tool", "assistant", "tool", "assistant")
    ]
    assert [each["tool_call_id"] for each in done.messages if each["role"] == "tool"] == [f"c0000000{n}" for n in (1, 2, 3)]
    for before, after in zip(chat.asked, chat.asked[1:], strict=False):
        assert after[: len(before)] == before, "what was said before has changed: the attempt would branch"
    assert [each["tools"] for each in chat.options] == [tools.schemas] * 3
    assert [each["max_tokens"] for each in chat.options] == [9] * 3
    assert [each["last"] for each in chat.options] == [False, False, True]


async def test_no_call_ends_it_at_once() -> None:
    begun = [{"role": "user", "content": "hi"}]
    done = await work(ScriptedChat("hello"), begun, [add])
    assert (done.text, done.ended, done.results) == ("hello", "answer", []) and len(begun) == 1


async def test_faults_are_told() -> None:
    chat = ScriptedChat(saying("<call>{", faults=["the call is not closed"]), "sorry")
    done = await work(chat, "?", [add])
    assert done.messages[2] == {"role": "user", "content": "error: the call is not closed"} and done.ended == "answer"
    assert observations([], ["a", "b"]) == [{"role": "user", "content": "error: a\nerror: b"}]
    chat = ScriptedChat(saying("", adding(1, 1), faults=["the second call is no JSON"]), "2")
    done = await work(chat, "?", [add])
    assert [each["content"] for each in done.messages[2:]] == ["2\nerror: the second call is no JSON", "2"]


async def test_the_last_turn_ends_it() -> None:
    chat = ScriptedChat(*[saying("", adding(1, 1))] * 3)
    done = await work(chat, "?", [add], max_turns=3)
    assert done.ended == "max_turns" and len(done.results) == 2 and done.messages[-1] == done.reply.message


async def test_the_last_call_ends_it() -> None:
    replies = [saying("", adding(1, 1)), saying("", adding(1, 1), adding(1, 1)), saying("", *[adding(1, 1)] * 1000)]
    done = await work(ScriptedChat(*replies), "?", [add], max_calls=3)
    assert done.ended == "max_calls" and len(done.results) == 3 and done.messages[-1] == done.reply.message
    done = await work(ScriptedChat(*replies), "?", [add], max_calls=2)
    assert done.ended == "max_calls" and len(done.results) == 1
    done = await work(ScriptedChat(saying("", adding(1, 1)), "2"), "?", [add], max_calls=1)
    assert done.ended == "answer"


async def test_a_full_context_ends_it() -> None:
    def read() -> str:
        """Read a page."""
        return "words " * 500

    done = await work(ScriptedChat(*[saying("", call("read"))] * 4, context=4000), "?", [read])
    assert done.ended == "context" and len(done.results) == 2 and done.reply.message["tool_calls"]
    with pytest.raises(ContextFull):
        await work(ScriptedChat("", context=10), "a long question", [read])
    done = await work(ScriptedChat(saying("", call("read"), finish=Finish.CONTEXT)), "?", [read])
    assert done.ended == "context" and not done.results


async def test_infrastructure_ends_the_episode() -> None:
    def search() -> str:
        """Search."""
        raise tidemill.ToolUnavailable("the index is gone")

    with pytest.raises(tidemill.ToolUnavailable):
        await work(ScriptedChat(saying("", call("search"))), "?", [search])


async def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="at least 1 turn"):
        await work(ScriptedChat("x"), "?", [add], max_turns=0)
    assert json.dumps((await work(ScriptedChat("x"), "?", [])).messages)
