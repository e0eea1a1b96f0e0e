"""Messages of a chat and the tools that it offers, in OpenAI's form: the neutral form of every API here."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from tidemill.api_formats.body_decoding import short
from tidemill.api_formats.parameters import FIRST, Parameters, expected
from tidemill.core.errors import ApiError

DEEPEST = 64  # levels of nesting in a tool's schema, which templates write recursively
ToolName = Annotated[str, Field(min_length=1, max_length=256)]


class TextPart(Parameters):
    """A part of a message's content. Other fields than these are ignored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "input_text", "output_text"]
    text: str


class CalledFunction(Parameters):
    """The function that a call names, and its arguments as JSON text, which is not checked: a model wrote it."""

    model_config = ConfigDict(extra="ignore")

    name: ToolName
    arguments: str = ""


class ToolCall(Parameters):
    """A call of a tool in an assistant's message."""

    model_config = ConfigDict(extra="ignore")

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def plain(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}


Text = Annotated[str | Annotated[list[TextPart], FIRST], expected("a text, or a list of parts of type 'text'")]


class Message(Parameters):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text
    name: str = ""
    tool_calls: list[ToolCall] = Field(default=[], fail_fast=True)
    tool_call_id: str = ""
    reasoning_content: str = ""
    type: Any = None  # "message", as some clients write
    refusal: Any = None  # of an assistant's message that was given back; none of ours has one

    @model_validator(mode="before")
    @classmethod
    def _of_calls(cls, given: Any) -> Any:
        """The message with a text: an assistant that calls tools may have none."""
        wordless = isinstance(given, dict) and given.get("role") == "assistant" and given.get("content") is None
        return given | {"content": ""} if wordless else given

    @model_validator(mode="after")
    def _of_assistant(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls in a message of role {self.role!r}: only those of role 'assistant' have any")
        return self

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    @property
    def plain(self) -> dict[str, Any]:
        """The message as a chat template takes it."""
        text = self.text
        found: dict[str, Any] = {"role": self.role, "content": None if self.tool_calls and not text else text}
        for key in ("name", "tool_call_id", "reasoning_content"):
            if value := getattr(self, key):
                found[key] = value
        return found | ({"tool_calls": [call.plain for call in self.tool_calls]} if self.tool_calls else {})


class FunctionSchema(Parameters):
    """A function that may be called: its name, what it does, and the JSON schema of its arguments."""

    name: ToolName
    description: str = ""
    parameters: dict[str, Any] = Field(default={})
    returns: dict[str, Any] = Field(default={}, alias="return")  # in schemas of transformers: templates may show it
    strict: bool = False  # accepted: nothing here makes arguments obey their schema

    @model_validator(mode="after")
    def _shallow(self) -> Self:
        if _deeper(self.parameters, DEEPEST) or _deeper(self.returns, DEEPEST):
            raise ValueError(f"the parameters of {self.name!r} are nested more than {DEEPEST} levels deep")
        return self


class FunctionTool(Parameters):
    """A tool of a chat."""

    type: Literal["function"] = "function"
    function: FunctionSchema

    @property
    def plain(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        shown = {"name", "description", "parameters", "returns"} & self.function.model_fields_set
        given = self.function.model_dump(include=shown, by_alias=True)
        return {"type": "function", "function": given}


class NamedFunction(Parameters):
    name: ToolName


class NamedChoice(Parameters):
    """The choice of one tool, by its name."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedChoice,
    expected("'none', 'auto', 'required', or {'type': 'function', 'function': {'name': ...}}"),
]


def check_choice(choice: str | NamedChoice, tools: list[FunctionTool]) -> None:
    """Raise ApiError for a choice of a tool that there is not."""
    names = [tool.function.name for tool in tools]
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        raise ApiError(f"tool_choice names {short(choice.function.name)}, which is none of tools", param="tool_choice")
    if choice == "required" and not tools:
        raise ApiError("tool_choice = 'required' was given without tools: give some, or leave it out", param="tool_choice")


def _deeper(value: Any, levels: int) -> bool:
    """True if a value is nested deeper, found without recursion."""
    layer = [value]
    for _ in range(levels):
        layer = [
            each
            for inner in layer
            for each in (inner.values() if isinstance(inner, dict) else inner)
            if isinstance(each, dict | list)
        ]
        if not layer:
            return False
    return True
