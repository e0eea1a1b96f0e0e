"""Chat messages, their rendering by a template, and the token that ends a turn.

A template is code from elsewhere. Whatever it raises becomes one sentence that names the template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from tidemill.core.errors import ConfigError
from tidemill.models.tokenizer import Tokenizer

Message = dict[str, Any]
Messages = list[Message]
"""`role`, `content` and whatever else a template reads: `name`, `tool_calls`, `tool_call_id`, `reasoning_content`."""

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions, as chat completions take them."""

AssistantTurn = str | Message
"""An assistant's turn: its text, or a message with more than a text, such as `tool_calls` or `reasoning_content`."""

Turn = tuple[Messages, AssistantTurn]
"""Messages, and the reply to them."""

Span = tuple[int, int]  # characters of a rendering, from and up to
MARK = "\ue0f0REPLY\ue0f1"  # private characters: no template looks for them, and none trims them
_HALF = re.compile(r"[\ud800-\udfff]")


def as_messages(message: str | Sequence[Mapping[str, Any]]) -> Messages:
    """The messages of a prompt: a text becomes one user message, a list stays as it is.

    Arguments of tool calls that are JSON become mappings, which templates take. Raises ValueError for anything else, for an
    empty list, and for text that cannot be encoded.
    """
    messages = [{"role": "user", "content": message}] if isinstance(message, str) else [_read_calls(m) for m in message]
    if not messages or not all(is_message(m) for m in messages):
        raise ValueError(f"message {message!r:.80}: expected a text, or a list of messages with role and content")
    if half := half_character(messages):
        raise ValueError(f"the message {half}")
    return messages


def _read_calls(message: Mapping[str, Any]) -> Message:
    return with_arguments(message, arguments_form)


def with_arguments(message: Mapping[str, Any], form: Callable[[Any], Any]) -> Message:
    """A copy of a message with the arguments of its tool calls in another form."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    made = list[Any]()
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            call = {**call, "function": {**function, "arguments": form(function.get("arguments"))}}
        made.append(call)
    return {**message, "tool_calls": made}


def arguments_form(arguments: Any) -> Any:
    """Arguments of a call, as they are compared and as templates take them: a mapping where they are one."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments.strip()
    return found if isinstance(found, dict) else arguments.strip()


def is_message(value: Any) -> bool:
    """True if `value` has a role, and a content (text or parts) unless it calls tools."""
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    return isinstance(value.get("content"), str | list) or ("tool_calls" in value and value.get("content") is None)


def assistant(reply: AssistantTurn) -> Message:
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


def render(tokenizer: Tokenizer, messages: Sequence[Message], *, ask: bool, tools: Tools = ()) -> str:
    """The text of the whole conversation, as the template renders it.

    ask: add the generation prompt, ready for a reply. If the template has no developer role, its messages become the
    system's. Raises ConfigError, in one sentence, whatever the template raises.
    """
    messages = with_known_roles(tokenizer, messages)
    given: dict[str, Any] = {"tokenize": False, "add_generation_prompt": ask} | ({"tools": list(tools)} if tools else {})
    try:
        return tokenizer.apply_chat_template(list(messages), **given)
    except Exception as error:
        with suppress(Exception):  # some templates take a call's arguments as text
            if any(message.get("tool_calls") for message in messages):
                return tokenizer.apply_chat_template([with_arguments(each, _as_json) for each in messages], **given)
        roles = ", ".join(str(m.get("role")) for m in messages)
        why = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"the chat template of {tokenizer.name_or_path!r} refuses roles {roles}: {why}") from None


def with_known_roles(tokenizer: Tokenizer, messages: Sequence[Message]) -> Sequence[Message]:
    """The messages, those of developers as the system's if the template leaves that role out or refuses it."""
    if not any(message.get("role") == "developer" for message in messages):
        return messages
    if not tokenizer.chat_template or _knows_developers(tokenizer, template_source(tokenizer)):
        return messages
    return [{**each, "role": "system"} if each.get("role") == "developer" else each for each in messages]


@lru_cache(maxsize=16)
def _knows_developers(tokenizer: Tokenizer, template: str) -> bool:
    assert template == template_source(tokenizer)
    probe = [{"role": "developer", "content": MARK}, {"role": "user", "content": "a"}]
    try:
        return MARK in tokenizer.apply_chat_template(probe, tokenize=False, add_generation_prompt=True)
    except Exception:  # the template does not take that role
        return False


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def marked_spans(tokenizer: Tokenizer, messages: Sequence[Message], text: str) -> list[Span]:
    """Spans between the template's own `{% generation %}` marks in `text`; or []."""
    template = template_source(tokenizer)
    if "endgeneration" not in template:
        return []
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
    special: Mapping[str, Any] = getattr(tokenizer, "special_tokens_map", {})
    found: Any = render_jinja_template([chat], chat_template=template, return_assistant_tokens_mask=True, **special)
    (rendered,), (spans,) = found
    return [(begin, end) for begin, end in spans] if rendered == text else []


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """The token that the template puts after a reply; None if there is none.

    It is the first added token after the reply in a conversation of one turn. Often it is the tokenizer's eos, but not
    for base models that share a chat model's tokenizer: they end turns with one token and documents with another.
    """
    return _end_of_turn(tokenizer, template) if (template := template_source(tokenizer)) else None


def template_source(tokenizer: Tokenizer, tools: Tools = ()) -> str:
    """The template that is in use, with tools if there are some; "" if there is none."""
    template = tokenizer.chat_template or ""
    if isinstance(template, str):
        return template
    return (template.get("tool_use") if tools else None) or template.get("default", "")


@lru_cache(maxsize=16)
def _end_of_turn(tokenizer: Tokenizer, template: str) -> int | None:
    assert template == template_source(tokenizer)
    try:
        text = render(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARK}], ask=False)
    except ConfigError:
        return None
    _, found, closing = text.rpartition(MARK)
    ids = tokenizer.encode(closing.lstrip(), add_special_tokens=False) if found else []
    return ids[0] if ids and ids[0] in added_tokens(tokenizer) else None


def added_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of the added tokens, at which text is split before it is encoded."""
    return _added_tokens(tokenizer, len(tokenizer))


def added_texts(tokenizer: Tokenizer) -> frozenset[str]:
    """The texts of the added tokens."""
    return _added_texts(tokenizer, len(tokenizer))


@lru_cache(maxsize=16)
def _added_texts(tokenizer: Tokenizer, size: int) -> frozenset[str]:
    return frozenset(str(each) for each in tokenizer.added_tokens_decoder.values())


@lru_cache(maxsize=16)
def _added_tokens(tokenizer: Tokenizer, size: int) -> frozenset[int]:
    return frozenset(tokenizer.added_tokens_decoder)
