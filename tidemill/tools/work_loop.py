"""The loop of an agent with tools: ask the policy, run what it calls, tell it the results, until it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.core.chat_interface import Chat
from tidemill.core.errors import ContextFull
from tidemill.core.reply import ToolResult, Worked
from tidemill.core.types import Finish
from tidemill.models.chat_template import as_messages
from tidemill.tools.tool_set import ToolSet


async def work(
    chat: Chat,
    message: str | Sequence[Mapping[str, Any]],
    tools: ToolSet | Sequence[Any],
    *,
    system: str | None = None,
    max_turns: int = 16,
    max_calls: int = 64,
    max_tokens: int | None = None,
) -> Worked:
    """Let the policy work on `message` with tools until it answers, or reaches a limit.

    message: a text, or messages to begin with. tools: a ToolSet, or what one is made of. max_turns: replies. max_calls:
    calls of tools; a reply that calls for more is the last one, and its calls do not run. max_tokens: of each reply. A
    conversation that outgrows the context after the first reply ends the work. Raises ToolUnavailable from a tool, and what
    `chat.complete` raises.
    """
    if max_turns < 1 or max_calls < 0:
        raise ValueError(f"work(max_turns={max_turns}, max_calls={max_calls}): expected at least 1 turn and 0 calls")
    own = tools if isinstance(tools, ToolSet) else ToolSet(tools)
    history = [{"role": "system", "content": system}] if system is not None else []
    history += as_messages(message)
    done: Worked | None = None
    results = list[ToolResult]()
    for turn in range(1, max_turns + 1):
        try:
            reply = await chat.complete(history, tools=own.schemas, max_tokens=max_tokens, last=turn == max_turns)
        except ContextFull:
            if done is None:
                raise
            done.ended = "context"
            return done
        history.append(reply.message)
        done = Worked(reply, history, results)
        calls = reply.message.get("tool_calls") or []
        if reply.finish is Finish.CONTEXT:
            done.ended = "context"
        elif (calls or reply.faults) and len(results) + len(calls) > max_calls:
            done.ended = "max_calls"
        elif (calls or reply.faults) and turn == max_turns:
            done.ended = "max_turns"
        elif calls or reply.faults:
            found = await own.results(calls)
            results += found
            history += observations(found, reply.faults)
            continue
        return done
    raise AssertionError("the last turn returns")


def observations(results: Sequence[ToolResult], faults: Sequence[str]) -> list[dict[str, Any]]:
    """The messages that tell a policy what came of its calls, and why others could not be read.

    A fault is added to the last result. Where there is none it is a user's message, which all templates of text render.
    A tool's message without a call before it is refused or lost by 11 of the 38 that TRL ships: Gemma's, gpt-oss's, Phi's.
    """
    messages = [each.message for each in results]
    told = "\n".join(f"error: {fault}" for fault in faults)
    if told and messages:
        messages[-1]["content"] += f"\n{told}"
    elif told:
        messages.append({"role": "user", "content": told})
    return messages
