"""Chat messages: their types, and checks of what a prompt, environment or row gives."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.models.chat_template import Message, Messages

Reply = str | Message
"""An assistant's turn: its text, or a message with more than a text, such as `tool_calls` or `reasoning_content`."""

Turn = tuple[Messages, Reply]
"""Messages, and the reply to them."""

_HALF = re.compile(r"[\ud800-\udfff]")


def as_messages(message: str | Sequence[Mapping[str, Any]]) -> Messages:
    """The messages of a prompt: a text becomes one user message, a list stays as it is.

    Raises ValueError for anything else, for an empty list, and for text that cannot be encoded.
    """
    messages = [{"role": "user", "content": message}] if isinstance(message, str) else [dict(m) for m in message]
    if not messages or not all(is_message(m) for m in messages):
        raise ValueError(f"message {message!r:.80}: expected a text, or a list of messages with role and content")
    if half := half_character(messages):
        raise ValueError(f"the message {half}")
    return messages


def is_message(value: Any) -> bool:
    """True if `value` has a role and a content: a text or a list of parts.

    A message that calls tools needs no content.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    return isinstance(value.get("content"), str | list) or ("tool_calls" in value and value.get("content") is None)


def assistant(reply: Reply) -> Message:
    return {"role": "assistant", "content": reply} if isinstance(reply, str) else {"role": "assistant", **reply}


def text_of(message: Mapping[str, Any]) -> str:
    """The message's content as text, without parts that are no text."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)


def half_character(value: Any) -> str:
    """The end of an error sentence if a text within `value` holds half a surrogate pair; else "".

    JSON can express it (a cut emoji becomes "\\ud83d"), and no tokenizer, file or socket accepts it.
    """
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str) and (found := _HALF.search(each)):
            return f"holds half a character, {found[0]!r}, which is no text: write the whole one"
        if isinstance(each, Mapping):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            left += each
    return ""
