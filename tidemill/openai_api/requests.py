"""Request bodies as checked records; a bad one raises an ApiError that says what is expected.

An unsupported parameter that would change the reply is refused, unless its value changes nothing. Parameters that only
concern OpenAI's own bookkeeping are accepted and ignored.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from tidemill.core.errors import ApiError
from tidemill.core.types import MIN_REPETITION, MIN_TEMPERATURE
from tidemill.openai_api.body_decoding import read, short

MAX_BODY = 8 << 20  # bytes
MAX_BIAS = 1024  # tokens with a bias per request
MAX_CHOICES = 1024  # choices per request: prompts times n
IGNORED = (
    "user",
    "store",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "request_id",
)
UNCHANGING: dict[str, list[Any]] = {  # unsupported parameters, with the values that change nothing
    "suffix": [""],
    "best_of": [1],
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "functions": [[]],
    "function_call": ["none", "auto"],
    "modalities": [["text"]],
    "response_format": [{"type": "text"}],
    "use_beam_search": [False],
    "length_penalty": [1],
    "include_stop_str_in_output": [False],
    "spaces_between_special_tokens": [True],
    "truncate_prompt_tokens": [],
    "prompt_logprobs": [],
    "allowed_token_ids": [[]],
    "bad_words": [[]],
    "logits_processors": [[]],
    "priority": [0],
    "documents": [[]],
    "include_reasoning": [True],
    "reasoning_effort": ["none"],
    "mm_processor_kwargs": [{}],
    "vllm_xargs": [{}],
    "structured_outputs": [{}],
    "chat_template": [],
    "guided_json": [],
    "guided_regex": [],
    "guided_choice": [[]],
    "guided_grammar": [],
    "verbosity": ["medium"],
}
OF_CHATS: dict[str, list[Any]] = {"echo": [False], "add_special_tokens": [False]}
ROLES = ("system", "developer", "user", "assistant", "tool")

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Messages = list[dict[str, str]]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False
    include_obfuscation: bool = False  # accepted and ignored: this server pads nothing


class Body(BaseModel):
    """Parameters that completions and chats share. A null parameter counts as not given."""

    model_config = STRICT

    model: str
    n: int = Field(default=1, ge=1, le=128)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)  # 0 and -1: off
    min_p: float = Field(default=0.0, ge=0, lt=1)
    ignore_eos: bool = False
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: list[Stop] = Field(default=[], max_length=16)
    stop_token_ids: list[int] = Field(default=[], max_length=256)
    min_tokens: int = Field(default=0, ge=0)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, ge=MIN_REPETITION, le=1 / MIN_REPETITION)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default={}, max_length=MAX_BIAS)
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None


class CompletionBody(Body):
    """Body of `/v1/completions`."""

    prompt: Any  # see `prompts_of`
    max_tokens: int = Field(default=16, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False
    add_special_tokens: bool = True


class ChatInput(BaseModel):
    """Input of the chat template: messages and options."""

    messages: Annotated[list[dict[str, Any]], FailFast()] = Field(min_length=1)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class ChatBody(Body, ChatInput):
    """Body of `/v1/chat/completions`."""

    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)


class TokenizeBody(BaseModel):
    """Body of `/tokenize` with a text."""

    model_config = STRICT

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(ChatInput):
    """Body of `/tokenize` with messages."""

    model_config = STRICT

    model: str | None = None
    return_token_strs: bool = False


class DetokenizeBody(BaseModel):
    """Body of `/detokenize`."""

    model_config = STRICT

    model: str | None = None
    tokens: Annotated[list[int], FailFast()]


B = TypeVar("B", bound=Body)
K = TypeVar("K", bound=BaseModel)
OWN_NAMES = ("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding", "truncation")
OWN_NAMES += ("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs")


def parse(kind: type[B], raw: bytes) -> B:
    """Decode and check the body of a completion or a chat. Raises ApiError."""
    tree = {key: value for key, value in read(raw).items() if value is not None and key not in IGNORED}
    if tree.get("best_of") == tree.get("n", 1):
        tree.pop("best_of", None)
    unchanging = UNCHANGING | OF_CHATS if issubclass(kind, ChatBody) else UNCHANGING
    for key, values in unchanging.items():
        if key in tree and (value := tree.pop(key)) not in values:
            raise ApiError(f"{key} = {short(value)} is not supported by this server: leave {key!r} out", param=key)
    if isinstance(tree.get("stop"), str):
        tree["stop"] = [tree["stop"]]
    if isinstance(bias := tree.get("logit_bias"), dict) and len(bias) > MAX_BIAS:
        raise ApiError(f"logit_bias has {len(bias)} tokens: expected at most {MAX_BIAS}", param="logit_bias")
    body = validated(kind, tree)
    if 0 < body.temperature < MIN_TEMPERATURE:
        message = f"temperature = {body.temperature}: expected 0, which is greedy, or a value from 0.001 to 100"
        raise ApiError(message, param="temperature")
    if body.stream_options is not None and not body.stream:
        raise ApiError(
            "stream_options was given without stream: set stream to true, or leave it out", param="stream_options"
        )
    return body


def validated(kind: type[K], tree: dict[str, Any]) -> K:
    """Validate a body. Raises ApiError for the first fault only: describing thousands takes time."""
    extra = [key for key in tree if key not in kind.model_fields]
    known = {key: tree[key] for key in (*extra[:1], *kind.model_fields) if tree.get(key) is not None}
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        raise _refusal(kind, error) from None


def options_of(chat: ChatInput) -> dict[str, Any]:
    """Options for the chat template. Raises ApiError for bad or contradicting ones."""
    if given := [key for key in chat.chat_template_kwargs if key in OWN_NAMES or not key.isidentifier()]:
        message = f"chat_template_kwargs.{short(given[0])}: expected names that the template itself asks for"
        raise ApiError(message, param="chat_template_kwargs")
    if chat.continue_final_message and chat.add_generation_prompt:
        raise ApiError(
            "continue_final_message was given with add_generation_prompt: set add_generation_prompt to false",
            param="continue_final_message",
        )
    given = {"add_generation_prompt": chat.add_generation_prompt, "continue_final_message": chat.continue_final_message}
    return chat.chat_template_kwargs | given


def prompts_of(value: Any) -> list[str | list[int]]:
    """The prompts of a completion: from a text, a list of texts, a row of token ids, or a list of rows.

    Raises ApiError for anything else.
    """
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
        f"prompt = {short(value)}: expected a text, a list of texts, a list of token ids, or a list of lists of token ids",
        param="prompt",
    )


def messages_of(value: list[dict[str, Any]]) -> Messages:
    """The messages of a chat, each with a role and a text. Raises ApiError for others."""
    return [_message(i, {k: v for k, v in message.items() if v is not None}) for i, message in enumerate(value)]


def _message(index: int, given: dict[str, Any]) -> dict[str, str]:
    where = f"messages[{index}]"
    known = ("role", "content", "name", "type")
    if extra := [key for key in given if key not in known and given[key] not in ([], "")]:
        raise ApiError(f"{where}.{extra[0]} is not supported by this server: give role and content", param="messages")
    role, content = given.get("role"), given.get("content")
    if role not in ROLES:
        raise ApiError(f"{where}.role = {short(role)}: expected one of {', '.join(ROLES)}", param="messages")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(content) else None
    if not isinstance(content, str):
        raise ApiError(f"{where}.content: expected a text, or a list of parts of type 'text'", param="messages")
    if not isinstance(name := given.get("name", ""), str):
        raise ApiError(f"{where}.name = {short(name)}: expected a text", param="messages")
    return {"role": role, "content": content} | ({"name": name} if name else {})


def _is_row(value: list[Any]) -> bool:
    return bool(value) and all(type(item) is int for item in value)  # `type`, because True is an int and not a token id


def _refusal(kind: type[BaseModel], error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    param = str(first["loc"][0])[:100] if first["loc"] else None
    match first["type"]:
        case "extra_forbidden":
            near = difflib.get_close_matches(where, kind.model_fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out"
            return ApiError(f"unknown parameter {short(where)}: {hint}", param=param)
        case "missing":
            return ApiError(f"{where!r} is required and was not given", param=param)
    message = str(first["msg"]).removeprefix("Input ")
    return ApiError(f"{where} = {short(first['input'])}: {message}", param=param)
