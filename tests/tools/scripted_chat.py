"""A chat that says what it is told, with calls of tools as the chat of a run would parse them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tidemill.core.errors import ContextFull
from tidemill.core.reply import Reply
from tidemill.core.types import Finish


def call(name: Any, arguments: Any = None, number: int = 0) -> dict[str, Any]:
    """A call as it stands in a message."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {"id": f"c{number:08d}", "type": "function", "function": {"name": name, "arguments": text}}


def saying(text: str, *calls: Any, faults: Sequence[str] = (), finish: Finish = Finish.STOP) -> Reply:
    """A reply with this text and these calls."""
    message: dict[str, Any] = {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})
    return Reply(text, message, finish, faults=tuple(faults))


class ScriptedChat:
    """`Chat.complete` from a list of replies, or functions of the messages; it keeps what it was asked."""

    def __init__(
        self, *replies: Reply | str | Callable[[list[dict[str, Any]]], Reply | str], context: int = 1 << 30
    ) -> None:
        self._replies, self._context = list(replies), context
        self.asked: list[list[dict[str, Any]]] = []
        self.options: list[dict[str, Any]] = []

    async def complete(self, messages: str | Sequence[Mapping[str, Any]], **options: Any) -> Reply:
        assert not isinstance(messages, str)
        seen = copy.deepcopy([dict(each) for each in messages])
        if len(json.dumps(seen)) > self._context:
            raise ContextFull(Finish.CONTEXT, "the conversation is too long")
        self.asked.append(seen)
        self.options.append(options)
        reply = self._replies.pop(0)
        reply = reply(seen) if callable(reply) else reply
        return saying(reply) if isinstance(reply, str) else reply

    async def reply(self, message: Any, *, max_tokens: int | None = None, last: bool = False) -> str:
        raise NotImplementedError

    async def ask(self, policy: str, message: Any, *, max_tokens: int | None = None) -> str:
        raise NotImplementedError
