"""Bodies of OpenAI's `/v1/responses`, and the chat that each one means."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from tidemill.api_formats.body_decoding import short
from tidemill.api_formats.messages import TextPart, ToolName
from tidemill.api_formats.parameters import FIRST, Parameters, expected, validated
from tidemill.api_formats.requests import IGNORED, ChatBody
from tidemill.core.errors import ApiError

UNCHANGING_IN_RESPONSES: dict[str, list[Any]] = {
    "background": [False],
    "truncation": ["disabled"],
    "reasoning": [{}, {"effort": "none"}],
    "top_logprobs": [0],
    "conversation": [],
    "prompt": [],
    "max_tool_calls": [],
    "context_management": [[]],
    "moderation": [],
}
ALSO_IGNORED = ("include", "stream_options", "prompt_cache_options")
PARTS = "a text, or a list of parts of type 'input_text' or 'output_text'"


class RefusalPart(Parameters):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ReasoningPart(Parameters):
    """A part of a model's thoughts."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["reasoning_text", "summary_text"]
    text: str


Content = Annotated[str | list[TextPart | RefusalPart], expected(PARTS)]


class ResponseItem(Parameters):
    """An item of the input: a message, a call, a call's result, or thoughts. Ids and states are ignored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Any = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: Content = ""
    summary: list[ReasoningPart] = Field(default=[])

    @model_validator(mode="after")
    def _complete(self) -> ResponseItem:
        if self.type == "message" and (self.role is None or self.content is None):
            raise ValueError("expected role and content in a message")
        if self.type == "function_call" and not (self.call_id and self.name):
            raise ValueError("expected call_id and name in a function_call")
        return self


class SpokenMessage(Parameters):
    """The content of a message, checked."""

    content: Content


class Thoughts(Parameters):
    content: list[ReasoningPart] = Field(default=[])


class ResponsesTool(Parameters):
    """A function that may be called. Tools that OpenAI's servers run are refused."""

    type: Literal["function"]
    name: ToolName
    description: str = ""
    parameters: dict[str, Any] = Field(default={})
    strict: bool = False

    @property
    def plain(self) -> dict[str, Any]:
        keys = {"name", "description", "parameters"} & self.model_fields_set
        return {"type": "function", "function": self.model_dump(include=keys)}


class TextOptions(Parameters):
    """Format of the reply's text: as it comes, or JSON of a schema."""

    format: dict[str, Any] = Field(default={"type": "text"})
    verbosity: Literal["medium"] = "medium"

    @property
    def plain(self) -> dict[str, Any]:
        """The format as a chat's `response_format`."""
        about = {key: value for key, value in self.format.items() if key != "type"}
        kind = self.format.get("type")
        return {"type": kind} | ({"json_schema": about} if kind == "json_schema" else about)


class ResponsesChoice(Parameters):
    type: Literal["function"]
    name: ToolName


def _as_items(given: Any) -> Any:
    """A text as the message of the user that it is."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class ResponsesBody(Parameters):
    """Body of `/v1/responses`."""

    model: str
    input: Annotated[list[ResponseItem], FIRST, BeforeValidator(_as_items)]
    instructions: str = ""
    tools: list[ResponsesTool] = Field(default=[], fail_fast=True)
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ResponsesChoice,
        expected("'none', 'auto', 'required', or {'type': 'function', 'name': ...}"),
    ] = "auto"
    text: TextOptions = Field(default=TextOptions())
    max_output_tokens: int | None = Field(default=None, ge=1)
    previous_response_id: str = ""
    temperature: float | None = None
    top_p: float | None = None
    store: bool = True
    stream: bool = False
    parallel_tool_calls: bool = True  # ignored
    metadata: dict[str, str] = Field(default={})  # told again

    @model_validator(mode="before")
    @classmethod
    def _without_unchanging(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        ignored = {*IGNORED, *ALSO_IGNORED} - cls.model_fields.keys()
        tree = {key: value for key, value in given.items() if value is not None and key not in ignored}
        for key in UNCHANGING_IN_RESPONSES.keys() & tree.keys():
            if (value := tree.pop(key)) not in UNCHANGING_IN_RESPONSES[key]:
                raise ApiError(f"{key} = {short(value)} is not supported by this server: leave {key!r} out", param=key)
        return tree

    @property
    def heard(self) -> list[dict[str, Any]]:
        """The input as messages of a chat. Raises ApiError."""
        return _messages(self.input)

    def chat(self, before: list[dict[str, Any]] | None = None) -> ChatBody:
        """An equal body of a chat. before: messages that it goes on from. Raises ApiError."""
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tree: dict[str, Any] = {"model": self.model, "messages": [*instructions, *(before or []), *self.heard]}
        given = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_output_tokens}
        tree |= {key: value for key, value in given.items() if value is not None} | {"stream": self.stream}
        tree["response_format"] = self.text.plain
        choice: Any = self.tool_choice
        if isinstance(choice, ResponsesChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        return validated(ChatBody, tree | {"tools": [tool.plain for tool in self.tools], "tool_choice": choice})


def _messages(items: list[ResponseItem]) -> list[dict[str, Any]]:
    """Messages of a chat: thoughts, text and calls of one turn of the model are one message."""
    found, turn = list[dict[str, Any]](), dict[str, Any]()

    def ended() -> None:
        if turn:
            found.append({"role": "assistant", "content": None if "tool_calls" in turn else "", **turn})
            turn.clear()

    for item in items:
        if item.type == "reasoning":
            ended()
            parts = validated(Thoughts, {"content": item.content or []}).content or item.summary
            turn["reasoning_content"] = "".join(part.text for part in parts)
        elif item.type == "function_call":
            function = {"name": item.name, "arguments": item.arguments}
            turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        elif item.type == "function_call_output":
            ended()
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif item.role == "assistant":
            if "content" in turn or "tool_calls" in turn:
                ended()
            turn["content"] = _text(validated(SpokenMessage, {"content": item.content}).content)
        else:
            ended()
            found.append({"role": item.role, "content": _text(validated(SpokenMessage, {"content": item.content}).content)})
    ended()
    return found


def _text(content: str | list[TextPart | RefusalPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
