"""What a policy calls runs within limits, and all that goes wrong becomes an observation."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_chat import call

import tidemill
from tidemill.core.errors import ConfigError
from tidemill.tools import limited_call as module
from tidemill.tools.function_tool import Tool, as_tool, tools_of
from tidemill.tools.limited_call import Places
from tidemill.tools.tool_set import UNKNOWN, ToolSet, text_of_result


@tidemill.tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


@tidemill.tool(name="times")
async def multiply(a: int, b: int) -> dict[str, int]:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    await asyncio.sleep(0)
    return {"product": a * b}


def fails(how: str) -> str:
    """Raise an exception.

    Args:
        how: Which one.
    """
    kinds = {"exit": SystemExit(3), "value": ValueError("no such thing"), "cancel": asyncio.CancelledError()}
    if how == "unprintable":

        class Unprintable(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        raise Unprintable
    raise kinds[how]


@pytest.fixture
def stuck() -> Iterator[Any]:
    """A tool that returns when it is let go, which the test need not do."""
    go = threading.Event()

    def wait() -> str:
        """Wait."""
        assert go.wait(60)
        return "done"

    wait.go = go  # pyright: ignore
    yield wait
    go.set()


async def test_calls_become_messages() -> None:
    tools = ToolSet([add, multiply])
    assert [each["function"]["name"] for each in tools.schemas] == ["add", "times"]
    assert add(2, 3) == 5, "a tool stays a plain function"
    assert await tools.call(call("add", {"a": 2, "b": 3}, 7)) == {
        "role": "tool",
        "tool_call_id": "c00000007",
        "name": "add",
        "content": "5",
    }
    mapping = {"function": {"name": "times", "arguments": {"a": 2, "b": 3}}}  # no text, and no id
    assert await tools.call(mapping) == {"role": "tool", "name": "times", "content": '{"product": 6}'}
    assert tools.counts["add"].calls == 1 and tools.counts["times"].malformed == 0 < tools.counts["times"].seconds


@pytest.mark.parametrize(
    ("made", "content", "fault", "counted"),
    [
        (call("sum", {}), "error: there is no tool 'sum': expected add, fails", "malformed", UNKNOWN),
        (call("add", {"a": 1}), "error: add: the argument 'b' is missing", "malformed", "add"),
        (
            call("add", {"a": 1, "b": "x"}),
            "error: add: the argument 'b' is a string: expected an integer",
            "malformed",
            "add",
        ),
        (call("add", "{a: 1}"), "error: add: the arguments are no JSON: Expecting property name", "malformed", "add"),
        (call("add", "[" * 100_000), "error: add: the arguments are nested too deep", "malformed", "add"),
        (call(None), "error: the call names no tool", "malformed", UNKNOWN),
        (call(["add"]), "error: the call names no tool", "malformed", UNKNOWN),
        ("add(1, 2)", "error: the call names no tool", "malformed", UNKNOWN),
        ({"function": 3, "id": 4}, "error: the call names no tool", "malformed", UNKNOWN),
        (call("x" * 10_000), f"error: there is no tool '{'x' * 64}... (10000 characters)'", "malformed", UNKNOWN),
        (call("\ud83d"), "error: there is no tool '\\\\ud83d'", "malformed", UNKNOWN),
        (call("fails", {"how": "value"}), "error: fails raised ValueError: no such thing", "error", "fails"),
        (call("fails", {"how": "exit"}), "error: fails raised RuntimeError: SystemExit: 3", "error", "fails"),
        (call("fails", {"how": "cancel"}), "error: fails raised RuntimeError: CancelledError", "error", "fails"),
        (call("fails", {"how": "unprintable"}), "error: fails raised Unprintable", "error", "fails"),
    ],
)
async def test_what_goes_wrong_is_an_observation(made: Any, content: str, fault: str, counted: str) -> None:
    tools = ToolSet([add, fails])
    result = await tools.result(made)
    assert result.content.startswith(content) and result.fault == fault
    json.dumps(result.message).encode()
    result.content.encode()  # no half characters, which no chat would take
    counts = tools.counts[counted]
    assert (counts.calls, counts.malformed, counts.errors) == (1, fault == "malformed", fault == "error")
    assert list(tools.counts) == [counted]


CALLS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["add", '{"a": 1, "b": 2}', "{"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["id", "function", "name", "arguments", "a", "b", "type"]), inner, max_size=4)
    ),
)


@given(CALLS)
def test_no_call_raises(made: Any) -> None:
    message = asyncio.run(ToolSet([add]).call(made))
    assert message["role"] == "tool" and isinstance(message["content"], str)


async def test_calls_of_one_reply_run_together() -> None:
    """Each waits for the other, so that one after the other would never end."""
    sync, first, second = threading.Barrier(2), asyncio.Event(), asyncio.Event()

    def blocking(name: str) -> str:
        """Wait for the other.

        Args:
            name: Its name.
        """
        sync.wait(60)
        return name

    async def waiting(own: bool) -> str:
        """Wait for the other.

        Args:
            own: Which of both.
        """
        (first if own else second).set()
        await (second if own else first).wait()
        return str(own)

    tools = ToolSet([blocking, waiting], limit_s=60)
    calls = [call("blocking", {"name": "x"}), call("waiting", {"own": True}), call("waiting", {"own": False})]
    found = await tools.results([*calls, call("blocking", {"name": "y"})])
    assert [each.content for each in found] == ["x", "True", "False", "y"]


async def test_methods_of_one_object_never_overlap() -> None:
    class Counter:
        def __init__(self) -> None:
            self.inside, self.value, self.most = 0, 0, 0

        def up(self, by: int) -> int:
            """Count up.

            Args:
                by: How far.
            """
            return self._step(by)

        def down(self, by: int) -> int:
            """Count down.

            Args:
                by: How far.
            """
            return self._step(-by)

        async def look(self) -> int:
            """Look."""
            self.inside += 1
            self.most = max(self.most, self.inside)
            await asyncio.sleep(0)
            self.inside -= 1
            return self.value

        def _step(self, by: int) -> int:
            self.inside += 1
            self.most = max(self.most, self.inside)
            threading.Event().wait(0.001)  # room for others to come in
            self.value += by
            self.inside -= 1
            return self.value

    counter = Counter()
    tools = ToolSet(tools_of(counter))
    assert list(tools.tools) == ["down", "look", "up"]
    calls = [call("up", {"by": 5}), call("look"), call("down", {"by": 2}), call("look"), call("up", {"by": 1})] * 4
    found = [int(each.content) for each in await tools.results(calls)]
    assert found == [n + 4 * r for r in range(4) for n in (5, 5, 3, 3, 4)] and counter.most == 1


async def test_a_late_tool_is_an_observation(stuck: Any) -> None:
    async def forever() -> None:
        """Wait."""
        await asyncio.Event().wait()

    tools = ToolSet([stuck, tidemill.tool(limit_s=0.01)(forever)], limit_s=0.02)
    found = await tools.results([call("wait"), call("forever")])
    assert [each.content for each in found] == [
        "error: wait gave no result within 0.02 s",
        "error: forever gave no result within 0.01 s",
    ]
    assert [each.fault for each in found] == ["late", "late"] and tools.counts["wait"].late == 1


async def test_a_late_method_holds_its_object() -> None:
    go = threading.Event()

    class Slow:
        entered = 0

        def work(self) -> str:
            """Work."""
            self.entered += 1
            assert go.wait(60)
            return "done"

    slow = Slow()
    tools = ToolSet(tools_of(slow), limit_s=0.02)
    assert [(await tools.result(call("work"))).fault for _ in range(2)] == ["late", "late"]
    assert slow.entered == 1, "a second call came in while the first was at work"
    go.set()
    patient = ToolSet([as_tool(slow.work)], limit_s=60)
    patient._places = tools._places
    assert (await patient.result(call("work"))).content == "done"


async def test_tools_that_hold_all_threads_are_no_fault_of_the_policy(stuck: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_threads", Places(2))
    tools = ToolSet([stuck, add], limit_s=0.02)
    await tools.results([call("wait"), call("wait")])
    with pytest.raises(tidemill.ToolUnavailable, match="hold all threads"):
        await tools.results([call("add", {"a": 1, "b": 2})])
    stuck.go.set()
    patient = ToolSet([add], limit_s=60)  # the places are given back when the threads return
    assert [each.content for each in await patient.results([call("add", {"a": 1, "b": n}) for n in range(8)])] == [
        str(1 + n) for n in range(8)
    ]


async def test_a_tool_may_say_that_it_cannot_work() -> None:
    def search() -> str:
        """Search."""
        raise tidemill.ToolUnavailable("the index is gone")

    ended = []

    async def other() -> None:
        """Work."""
        for _ in range(3):
            await asyncio.sleep(0)
        ended.append(1)

    with pytest.raises(tidemill.ToolUnavailable, match="the index is gone"):
        await ToolSet([search, other]).results([call("search"), call("other")])
    assert ended, "the other call was left behind"


async def test_a_cancelled_episode_gives_its_places_back(stuck: Any) -> None:
    places = Places(1)
    assert await places.take(60)
    waiting = [asyncio.create_task(places.take(60)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.wait([waiting[0]])
    places.leave()
    assert await waiting[1]
    waiting[2].cancel()
    places.leave()  # given to the one that was cancelled in the same turn of the loop
    await asyncio.wait([waiting[2]])
    assert await places.take(0.01)
    assert not await places.take(0.01)


async def test_results_are_text_of_limited_length() -> None:
    @dataclass
    class Point:
        x: int
        y: float

    assert [text_of_result(each) for each in ("é", None, True, 0.5, [1, "ü"], Point(1, 2.0), {1})] == [
        *("é", "null", "true", "0.5", '[1, "ü"]', '{"x": 1, "y": 2.0}', "[1]")
    ]

    def long(size: int) -> str:
        """Write much.

        Args:
            size: How much.
        """
        return "a" * size

    def odd(kind: str) -> Any:
        """Return something odd.

        Args:
            kind: What.
        """
        loop: list[Any] = []
        loop.append(loop)
        return {"loop": loop, "half": "\ud83d", "deep": json.loads("[" * 900 + "]" * 900), "key": {(1, 2): 3}}[kind]

    tools = ToolSet([long, odd], most_output=10)
    assert (await tools.result(call("long", {"size": 10}))).content == "a" * 10
    assert (await tools.result(call("long", {"size": 11}))).content == "a" * 10 + "\n[cut after 10 of 11 characters]"
    found = {kind: await tools.result(call("odd", {"kind": kind})) for kind in ("loop", "half", "deep", "key")}
    assert found["loop"].fault == found["key"].fault == "error" and found["half"].content == "\\ud83d"
    assert found["deep"].content.startswith("[[[[")


async def test_enums_arrive_as_members() -> None:
    class Colour(Enum):
        RED = "red"

    seen: list[Any] = []

    def paint(colour: Colour, other: Colour | None = None) -> None:
        """Paint.

        Args:
            colour: The colour.
            other: Another one.
        """
        seen.extend([colour, other])

    paint.__annotations__ = {"colour": Colour, "other": Colour | None}
    tools = ToolSet([paint])
    assert (await tools.result(call("paint", {"colour": "red", "other": None}))).fault == ""
    assert (await tools.result(call("paint", {"colour": "green"}))).fault == "malformed"
    assert seen == [Colour.RED, None]


async def test_other_callables() -> None:
    class Search:
        """An object with its own schema."""

        def __init__(self) -> None:
            arguments = {"properties": {"q": {"type": "string"}}}
            self.schema = {"name": "look_up", "description": "Look up.", "parameters": arguments}

        async def __call__(self, q: str) -> str:
            return q.upper()

    variable = ContextVar("variable", default="")
    variable.set("seen")

    def context() -> str:
        """Tell."""
        return variable.get()

    def wrapped() -> Any:
        """Return a coroutine."""
        return multiply(2, 2)

    tools = ToolSet([Search(), context, wrapped, Tool("raw", {"function": {"name": "raw", "parameters": {}}}, lambda: 1)])
    assert (await tools.result(call("look_up", {"q": "x"}))).content == "X"
    assert (await tools.result(call("look_up", {"w": "x"}))).fault == "malformed"
    assert [(await tools.result(call(name))).content for name in ("context", "wrapped", "raw")] == [
        *("seen", '{"product": 4}', "1")
    ]


def test_what_is_no_tool_is_said_in_one_sentence() -> None:
    def spaced() -> None:
        """Do."""

    for given_, sentence in (
        ([add, add], "two tools have the name 'add'"),
        ([3], "tool 3 is a int: expected a function"),
        ([ToolSet], "is a type: expected a function"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            ToolSet(given_)
    with pytest.raises(ConfigError, match="at most 64 letters"):
        tidemill.tool(name="with space")(spaced)
    with pytest.raises(ConfigError, match="expected seconds"):
        tidemill.tool(limit_s=0)(spaced)
    with pytest.raises(ConfigError, match="has no docstring"):
        tidemill.tool(lambda: None)
    with pytest.raises(ConfigError, match="above 0"):
        ToolSet([], limit_s=0)
