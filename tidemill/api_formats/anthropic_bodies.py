"""Bodies of Anthropic's `/v1/messages`, and the chat that each one means."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from tidemill.api_formats.body_decoding import short
from tidemill.api_formats.messages import ToolName
from tidemill.api_formats.parameters import FIRST, Parameters, expected, validated
from tidemill.api_formats.requests import ChatBody, Stop
from tidemill.core.errors import ApiError

IGNORED_BY_MESSAGES = ("metadata", "service_tier", "inference_geo", "cache_control")  # they concern Anthropic's own servers
UNCHANGING_IN_MESSAGES: dict[str, list[Any]] = {
    "thinking": [{"type": "disabled"}],
    "mcp_servers": [[]],
    "context_management": [{}, {"edits": []}],
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class ContentBlock(Parameters):
    """A block of a message: text, a call, a call's result, or thoughts. Other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default={})
    tool_use_id: str = ""
    content: Annotated[str | list[ContentBlock], expected("a text, or a list of blocks of type 'text'")] = ""

    @property
    def told(self) -> str:
        """The text of a result, or of a block of text."""
        if self.type == "text":
            return self.text
        return self.content if isinstance(self.content, str) else "\n".join(block.told for block in self.content)


BLOCKS = "a text, or a list of blocks of type 'text', 'tool_use', 'tool_result' or 'thinking'"
Blocks = Annotated[str | list[ContentBlock], expected(BLOCKS)]


class AnthropicMessage(Parameters):
    """A message, of the user or of the model."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    def plain(self) -> Iterator[dict[str, Any]]:
        """The messages of a chat that it means: each result of a call is one of its own."""
        blocks = [ContentBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        if self.role == "assistant":
            yield _assistant(blocks)
            return
        texts = list[str]()
        for block in blocks:
            if block.type == "tool_result":
                yield from _texts(self.role, texts)
                texts = []
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.told}
            elif block.type == "text":
                texts.append(block.text)
            else:
                raise ApiError(f"a block of type {block.type!r} in a message of role {self.role!r}", param="messages")
        if texts or not blocks:
            yield {"role": self.role, "content": "\n".join(texts)}


class AnthropicTool(Parameters):
    """A tool with the schema of its input. Tools that Anthropic's servers run are refused."""

    type: Literal["custom"] = "custom"
    name: ToolName
    description: str = ""
    input_schema: dict[str, Any] = Field(default={})
    cache_control: Any = None
    strict: bool = False
    eager_input_streaming: Any = None

    @property
    def plain(self) -> dict[str, Any]:
        given = {"description": self.description} if "description" in self.model_fields_set else {}
        return {"type": "function", "function": {"name": self.name, **given, "parameters": self.input_schema}}


class AnthropicChoice(Parameters):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False  # ignored, as OpenAI's parallel_tool_calls

    @property
    def plain(self) -> Any:
        return {"type": "function", "function": {"name": self.name}} if self.type == "tool" else CHOICES[self.type]


class OutputFormat(Parameters):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Parameters):
    """Format of the reply's text. Efforts are refused."""

    format: OutputFormat | None = None


class CountBody(Parameters):
    """Body of `/v1/messages/count_tokens`."""

    model: str
    messages: Annotated[list[AnthropicMessage], FIRST]
    system: Annotated[str | list[ContentBlock], expected("a text, or a list of blocks of type 'text'")] = ""
    tools: list[AnthropicTool] = Field(default=[], fail_fast=True)
    tool_choice: AnthropicChoice | None = None
    output_config: OutputConfig = Field(default=OutputConfig())

    @model_validator(mode="before")
    @classmethod
    def _without_unchanging(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        tree = {key: value for key, value in given.items() if value is not None and key not in IGNORED_BY_MESSAGES}
        for key in UNCHANGING_IN_MESSAGES.keys() & tree.keys():
            if (value := tree.pop(key)) not in UNCHANGING_IN_MESSAGES[key]:
                raise ApiError(f"{key} = {short(value)} is not supported by this server: leave {key!r} out", param=key)
        return tree

    def _chat(self) -> dict[str, Any]:
        system = self.system if isinstance(self.system, str) else "\n\n".join(block.told for block in self.system)
        messages = [{"role": "system", "content": system}] if system else []
        tree: dict[str, Any] = {"model": self.model, "messages": messages}
        messages += [each for message in self.messages for each in message.plain()]
        if (held := self.output_config.format) is not None:
            tree["response_format"] = {"type": "json_schema", "json_schema": {"schema": held.schema_}}
        choice = "auto" if self.tool_choice is None else self.tool_choice.plain
        return tree | {"tools": [tool.plain for tool in self.tools], "tool_choice": choice}

    def chat(self) -> ChatBody:
        """An equal body of a chat. Raises ApiError."""
        return validated(ChatBody, self._chat())


class MessagesBody(CountBody):
    """Body of `/v1/messages`."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[Stop] = Field(default=[], max_length=16)
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def chat(self) -> ChatBody:
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "stop": self.stop_sequences}
        more = {key: value for key, value in given.items() if value is not None}
        return validated(ChatBody, self._chat() | more | {"max_tokens": self.max_tokens, "stream": self.stream})


def _assistant(blocks: list[ContentBlock]) -> dict[str, Any]:
    texts, calls, thoughts = list[str](), list[dict[str, Any]](), list[str]()
    for block in blocks:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "thinking":
            thoughts.append(block.thinking)
        elif block.type == "tool_use":
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
    made: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or None if calls else "".join(texts)}
    if thought := "".join(thoughts):
        made["reasoning_content"] = thought
    return made | ({"tool_calls": calls} if calls else {})


def _texts(role: str, texts: list[str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": "\n".join(texts)}] if texts else []
