"""Tool calls and reasoning in a reply's text, as the families of models write them.

The chat template names the family: what it writes for a call that is past is what the model writes for the next one.
A call that cannot be read is a fault, in one sentence for the model; it never raises.

    Hermes, Qwen   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    Qwen coder     <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    gpt-oss        <|channel|>commentary to=functions.add<|message|>{"a": 1}
    GLM            <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    Llama          {"name": "add", "parameters": {"a": 1}}
    Mistral        [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]    [TOOL_CALLS]add[ARGS]{"a": 1}
    no template    add(1, 2)    add(a=1)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from tidemill.models.call_syntax import (
    ParsedCalls,
    deepseek_calls,
    glm_calls,
    harmony_parts,
    hermes_calls,
    kimi_calls,
    listed_calls,
    llama_calls,
    mistral_calls,
    python_calls,
    xml_calls,
)
from tidemill.models.chat_template import Message, Tools, arguments_form, template_source, text_of
from tidemill.models.tokenizer import Tokenizer

THINK, THOUGHT = "<think>", "</think>"
_FAMILIES: tuple[tuple[str, Callable[[str, Tools], ParsedCalls]], ...] = (  # by what the template has in it, the first wins
    ("<|tool_calls_section_begin|>", kimi_calls),
    ("<｜tool▁calls▁begin｜>", deepseek_calls),
    ("<|tool_call_start|>", listed_calls),
    ("<arg_key>", glm_calls),
    ("<function=", xml_calls),
    ("<tool_call>", hermes_calls),
    ("[TOOL_CALLS]", mistral_calls),
    ("<|python_tag|>", llama_calls),
    ("ipython", llama_calls),
)


class ReplyParts(NamedTuple):
    """The parts of a reply."""

    content: str
    reasoning: str | None  # None: its template has none
    calls: list[tuple[str, str]]  # name, arguments as JSON
    faults: list[str]

    def message(self, turn: int) -> Message:
        """The reply as a message of OpenAI's chat completions. turn: numbers its calls within the episode."""
        made: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        if self.calls:
            made["content"] = self.content or None
            made["tool_calls"] = [
                {"id": call_id(turn, place), "type": "function", "function": {"name": name, "arguments": arguments}}
                for place, (name, arguments) in enumerate(self.calls)
            ]
        return made


def call_id(turn: int, place: int) -> str:
    """The id of a call: nine letters and digits, as Mistral's templates want it."""
    return f"c{turn:05d}{place:03d}"


def read_reply(tokenizer: Tokenizer, text: str, tools: Tools, *, opened: bool = False) -> ReplyParts:
    """Read a reply. text: with its special tokens, without the end of the turn. opened: the prompt opened its reasoning."""
    source = template_source(tokenizer, tools)
    if "<|channel|>" in source and "<|message|>" in source:
        reasoning, found = harmony_parts(text)
        return ReplyParts(_without_special(tokenizer, found.content), reasoning, *found[1:])
    reasoning: str | None = None
    if THOUGHT in source:
        reasoning, text = _thought(text, opened)
    if not tools:
        return ReplyParts(text, reasoning, [], [])
    read = _reader(source) if takes_tools(tokenizer) or not source else hermes_calls  # as `told` tells it
    found = read(text, tools) if read is not None else _declared(tokenizer, text, tools)
    return ReplyParts(_without_special(tokenizer, found.content).strip(), reasoning, *found[1:])


def opens_thought(prompt: str) -> bool:
    """True if a rendered prompt ends in an open `<think>`."""
    return prompt.rstrip().endswith(THINK)


def is_reply(message: Mapping[str, Any], text: str, own: Mapping[str, Any]) -> bool:
    """True if a message is this reply of the policy, outer whitespace aside, which clients trim.

    text: the reply's. own: its message, with its calls. Reasoning may be left out, as clients do.
    """
    if message.get("role") != "assistant":
        return False
    said, calls = text_of(message).strip(), message.get("tool_calls") or ()
    if not calls and said == text.strip():
        return True
    if (thought := message.get("reasoning_content")) and thought.strip() != (own.get("reasoning_content") or "").strip():
        return False
    return said == text_of(own).strip() and _same_calls(calls, own.get("tool_calls") or ())


def _same_calls(some: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> bool:
    return len(some) == len(others) and all(map(_same_call, some, others))


def _same_call(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if not isinstance(one, Mapping) or not isinstance(function := one.get("function"), Mapping):
        return False
    if one.get("id") and one["id"] != other["id"]:
        return False
    own = other["function"]
    return function.get("name") == own["name"] and arguments_form(function.get("arguments")) == arguments_form(
        own["arguments"]
    )


def _thought(text: str, opened: bool) -> tuple[str, str]:
    """(reasoning, the rest) of a reply."""
    before, found, after = text.partition(THOUGHT)
    if found and (opened or before.lstrip().startswith(THINK)):
        return before.lstrip().removeprefix(THINK).strip(), after.lstrip("\n")
    if not found and (opened or text.lstrip().startswith(THINK)):  # it was cut, or it called a tool, while it thought
        thought, call, rest = text.lstrip().removeprefix(THINK).partition("<tool_call>")
        return thought.strip(), call + rest
    return "", text


def _without_special(tokenizer: Tokenizer, text: str) -> str:
    for number in tokenizer.all_special_ids:
        name = tokenizer.convert_ids_to_tokens(number)
        if name and name in text:
            text = text.replace(name, "")
    return text


@lru_cache(maxsize=16)
def _reader(source: str) -> Callable[[str, Tools], ParsedCalls] | None:
    """The reader of the template's family; None if it is of none that is known here."""
    if not source:
        return python_calls
    return next((read for mark, read in _FAMILIES if mark in source), None)


def _declared(tokenizer: Tokenizer, text: str, tools: Tools) -> ParsedCalls:
    """The calls as the tokenizer's own `response_template` finds them; in Hermes' form if it has none."""
    declared = getattr(tokenizer, "response_template", None)
    if declared is None:
        return hermes_calls(text, tools)
    from transformers.utils.chat_parsing import parse_response

    try:
        message = parse_response(text, declared, prefix="", tools=[dict(each) for each in tools])
        calls = [(str(each["function"]["name"]), each["function"]["arguments"]) for each in message.get("tool_calls") or ()]
        made = [(name, json.dumps(given) if isinstance(given, dict) else str(given)) for name, given in calls]
        return ParsedCalls(str(message.get("content") or ""), made, [])
    except Exception as error:  # a template of the model's folder may raise anything
        return ParsedCalls(text, [], [f"a tool call cannot be read: {type(error).__name__}: {error!s:.200}"])


def takes_tools(tokenizer: Tokenizer) -> bool:
    """True if the chat template tells the policy of the tools that it is given."""
    return _names_tools(template_source(tokenizer, [{}]))


@lru_cache(maxsize=16)
def _names_tools(source: str) -> bool:
    from jinja2 import TemplateError
    from jinja2 import meta as templates
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        tree = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    except TemplateError:  # with tags of its own, such as `generation`
        return "tools" in source
    return "tools" in templates.find_undeclared_variables(tree)


_TOLD = """You may call these functions, one JSON schema a line:
{schemas}
Write each call as <tool_call>{{"name": NAME, "arguments": {{...}}}}</tool_call>"""


def told(messages: Sequence[Message], tools: Tools, *, system: bool = True) -> list[Message]:
    """A conversation with tools for a template that takes none: they are text of its messages, in Hermes' form.

    system: the template has that role; else the first message of the user begins with them.
    """
    schemas = _TOLD.format(schemas="\n".join(json.dumps(each.get("function", each), ensure_ascii=False) for each in tools))
    role = "system" if system else "user"
    first, rest = (messages[0], messages[1:]) if messages and messages[0].get("role") == role else ({}, messages)
    order = [text_of(first), schemas] if system else [schemas, text_of(first)]
    return [{**first, "role": role, "content": "\n\n".join(filter(None, order))}, *map(_as_text, rest)]


def _as_text(message: Message) -> Message:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{text_of(message)}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [f"<tool_call>{json.dumps(_call(each), ensure_ascii=False)}</tool_call>" for each in calls]
    return {"role": message["role"], "content": "\n".join(filter(None, [text_of(message), *texts]))}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    return {"name": function.get("name"), "arguments": arguments_form(function.get("arguments"))}
