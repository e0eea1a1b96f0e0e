"""The policy's messages of an episode, which come back in the agent's history: found again by their calls' ids.

An API may write a call differently from the policy: Anthropic's has the arguments as an object, and so loses their spaces.
The chat recognises a message only as it was. So a message with the same calls becomes the one that was said.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from tidemill.core.errors import ApiError

MOST_SAID = 4096  # messages with calls
MOST_CONVERSATIONS = 512  # that can be gone on from by an id
MOST_BYTES = 16 << 20  # of bodies and replies in these


class SaidMessages:
    """The latest messages of the policy, and conversations by the ids of their last replies."""

    def __init__(self) -> None:
        self._said: OrderedDict[str, Mapping[str, Any]] = OrderedDict()  # by the id of the first call
        self._conversations: OrderedDict[str, tuple[list[dict[str, Any]], int]] = OrderedDict()
        self._bytes = 0

    def add(self, message: Mapping[str, Any]) -> None:
        """Remember a message of the policy, if it calls tools."""
        if calls := message.get("tool_calls"):
            self._said[calls[0]["id"]] = message
            if len(self._said) > MOST_SAID:
                self._said.popitem(last=False)

    def restored(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages, each that says the same as one of the policy's as it was said."""
        return [self._restored(message) if message.get("tool_calls") else message for message in messages]

    def keep(self, name: str, messages: list[dict[str, Any]], size: int) -> None:
        """Remember a conversation, which a later call may go on from. size: its bytes, about."""
        self._conversations[name] = messages, size
        self._bytes += size
        while len(self._conversations) > MOST_CONVERSATIONS or self._bytes > MOST_BYTES:
            self._bytes -= self._conversations.popitem(last=False)[1][1]

    def conversation(self, name: str) -> list[dict[str, Any]]:
        """The conversation that was kept under this name. Raises ApiError."""
        if name not in self._conversations:
            message = f"previous_response_id {name[:100]!r} is not known here, or is too old: send the whole conversation"
            raise ApiError(message, status=404, param="previous_response_id", code="previous_response_not_found")
        return self._conversations[name][0]

    def _restored(self, message: dict[str, Any]) -> dict[str, Any]:
        said = self._said.get(message["tool_calls"][0]["id"])
        if said is None or _sense(said) != _sense(message):
            return message
        thoughts = {key: said[key] for key in ("reasoning_content",) if key in said and key in message}
        return {key: value for key, value in said.items() if key != "reasoning_content"} | thoughts


def _sense(message: Mapping[str, Any]) -> Any:
    """What a message says, however it is written; thoughts aside, which an agent may leave out."""
    calls = [(call["id"], call["function"]["name"], _value(call["function"]["arguments"])) for call in message["tool_calls"]]
    return (message.get("content") or "").strip(), calls


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
