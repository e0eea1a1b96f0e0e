"""Request bodies: bytes to a checked record, or an ApiError that says what was given and what is expected.

A parameter that would change the meaning of the reply and that is not supported is refused, unless it has the value that
changes nothing. Parameters that only concern OpenAI's own bookkeeping are accepted and ignored.
"""

from __future__ import annotations

import difflib
import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tidemill.serving.errors import ApiError
from tidemill.types import MIN_TEMPERATURE

MAX_BODY = 8 << 20  # bytes
MAX_CHOICES = 1024  # of one request, prompts times n
IGNORED = (
    "user",
    "store",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
)
UNCHANGING: dict[str, list[Any]] = {  # not supported; these values ask for nothing
    "presence_penalty": [0],
    "frequency_penalty": [0],
    "logit_bias": [{}],
    "suffix": [""],
    "best_of": [1],
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "functions": [[]],
    "function_call": ["none", "auto"],
    "modalities": [["text"]],
    "response_format": [{"type": "text"}],
}
ROLES = ("system", "developer", "user", "assistant", "tool")

Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Messages = list[dict[str, str]]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False  # accepted: nothing is padded here


class Body(BaseModel):
    """What completions and chats have in common. A parameter that is null is a parameter that was not given."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    model: str
    n: int = Field(default=1, ge=1, le=128)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)  # 0 and -1: off
    min_p: float = Field(default=0.0, ge=0, lt=1)
    ignore_eos: bool = False
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: list[Stop] = Field(default=[], max_length=16)
    stream: bool = False
    stream_options: StreamOptions | None = None


class CompletionBody(Body):
    prompt: Any  # see `prompts_of`
    max_tokens: int = Field(default=16, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False


class ChatBody(Body):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)


B = TypeVar("B", bound=Body)


def parse(kind: type[B], raw: bytes) -> B:
    tree = {key: value for key, value in _json(raw).items() if value is not None and key not in IGNORED}
    if tree.get("best_of") == tree.get("n", 1):
        tree.pop("best_of", None)
    for key, unchanging in UNCHANGING.items():
        if key in tree and (value := tree.pop(key)) not in unchanging:
            raise ApiError(f"{key} = {_short(value)} is not supported by this server: leave {key!r} out", param=key)
    if isinstance(tree.get("stop"), str):
        tree["stop"] = [tree["stop"]]
    try:
        body = kind.model_validate(tree)
    except ValidationError as error:
        raise _refusal(kind, error) from None
    if 0 < body.temperature < MIN_TEMPERATURE:
        message = f"temperature = {body.temperature}: expected 0, which is greedy, or a value from 0.001 to 100"
        raise ApiError(message, param="temperature")
    if body.stream_options is not None and not body.stream:
        raise ApiError(
            "stream_options was given without stream: set stream to true, or leave it out", param="stream_options"
        )
    return body


def prompts_of(value: Any) -> list[str | list[int]]:
    """The prompts of a completion: a text, a list of texts, a row of token ids, or a list of such rows."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if _is_row(value):
            return [value]
        if all(isinstance(item, list) and _is_row(item) for item in value):
            return value
    raise ApiError(
        f"prompt = {_short(value)}: expected a text, a list of texts, a list of token ids, or a list of lists of token ids",
        param="prompt",
    )


def messages_of(value: list[dict[str, Any]]) -> Messages:
    """The messages of a chat, each with a role and a text."""
    return [_message(i, {k: v for k, v in message.items() if v is not None}) for i, message in enumerate(value)]


def _message(index: int, given: dict[str, Any]) -> dict[str, str]:
    where = f"messages[{index}]"
    if extra := [key for key in given if key not in ("role", "content") and given[key] not in ([], "")]:
        raise ApiError(f"{where}.{extra[0]} is not supported by this server: give role and content", param="messages")
    role, content = given.get("role"), given.get("content")
    if role not in ROLES:
        raise ApiError(f"{where}.role = {_short(role)}: expected one of {', '.join(ROLES)}", param="messages")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(content) else None
    if not isinstance(content, str):
        raise ApiError(f"{where}.content: expected a text, or a list of parts of type 'text'", param="messages")
    return {"role": role, "content": content}


def _is_row(value: list[Any]) -> bool:
    return bool(value) and all(type(item) is int for item in value)  # True is no token id


def _json(raw: bytes) -> dict[str, Any]:
    try:
        tree = json.loads(raw, parse_constant=_no_constant)
        json.dumps(tree, ensure_ascii=False).encode()  # half a surrogate pair is JSON, and no text
    except UnicodeError:
        raise ApiError("the body is not valid Unicode: send UTF-8, without half surrogate pairs") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ApiError(f"the body is {_short(tree)}: expected a JSON object")
    return tree


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _refusal(kind: type[Body], error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    param = str(first["loc"][0])[:100] if first["loc"] else None
    match first["type"]:
        case "extra_forbidden":
            near = difflib.get_close_matches(where, kind.model_fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out"
            return ApiError(f"unknown parameter {_short(where)}: {hint}", param=param)
        case "missing":
            return ApiError(f"{where!r} is required and was not given", param=param)
    message = str(first["msg"]).removeprefix("Input ")
    return ApiError(f"{where} = {_short(first['input'])}: {message}", param=param)


def _short(value: Any) -> str:
    """A value in a message, at a readable length."""
    if isinstance(value, list | dict):  # not shown: it may be deeper than Python can print
        return f"a list of {len(value)}" if isinstance(value, list) else "an object"
    text = repr(value[:100] if isinstance(value, str) else value)
    return text if len(text) <= 100 else text[:97] + "..."
