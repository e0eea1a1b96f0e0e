"""Replies to whole conversations, results of tools, and the work that is done with both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from tidemill.core.types import Finish

Fault = Literal["", "malformed", "error", "late"]
Ended = Literal["answer", "max_turns", "max_calls", "context"]


class Reply(msgspec.Struct, frozen=True):
    """The policy's reply to a conversation, as its environment sees it."""

    text: str  # as it was sampled, without the end of the turn
    message: dict[str, Any]  # to go on from: role, content, and tool_calls or reasoning_content if the text has them
    finish: Finish  # STOP; LENGTH: cut at max_tokens; CONTEXT: cut where the context ended
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, served from the prefix cache
    tokens: int = 0  # that were sampled
    faults: tuple[str, ...] = ()  # why calls of tools in the text cannot be read, in one sentence each


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of one call, as the policy reads it."""

    name: str
    content: str
    call_id: str = ""
    fault: Fault = ""
    seconds: float = 0.0

    @property
    def message(self) -> dict[str, Any]:
        """The message that goes on with the conversation."""
        named = {"tool_call_id": self.call_id} if self.call_id else {}
        named |= {"name": self.name} if self.name else {}
        return {"role": "tool", **named, "content": self.content}


@dataclass(slots=True)
class Worked:
    """An agent's work: its last reply, the whole conversation, and each call's result."""

    reply: Reply
    messages: list[dict[str, Any]]  # all of them, the last reply's included
    results: list[ToolResult] = field(default_factory=list)
    ended: Ended = "answer"  # "answer": the last reply calls no tool; else the limit that was reached

    @property
    def text(self) -> str:
        """The answer: the last reply's content, without reasoning and calls."""
        content = self.reply.message.get("content")
        return content if isinstance(content, str) else ""
