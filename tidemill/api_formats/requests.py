"""Bodies of OpenAI's completions and chats, and of requests about tokens.

An unsupported parameter that would change the reply is refused, unless its value changes nothing. Parameters that only
concern OpenAI's own bookkeeping are accepted and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from tidemill.api_formats.body_decoding import short
from tidemill.api_formats.messages import FunctionTool, Message, ToolChoice, check_choice
from tidemill.api_formats.parameters import FIRST, TEXT_ALONE, Parameters, expected
from tidemill.api_formats.structured_output import FIELDS, asked_constraint
from tidemill.core.constraints import Constraint
from tidemill.core.errors import ApiError
from tidemill.core.types import MIN_REPETITION, MIN_TEMPERATURE

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
    "chat_template": [],
    "guided_grammar": [],
    "verbosity": ["medium"],
}
TOOLS = ("tools", "tool_choice")
OF_CHATS = {key: values for key, values in UNCHANGING.items() if key not in TOOLS}
OF_CHATS |= {"echo": [False], "add_special_tokens": [False]}
OWN_NAMES = ("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding", "truncation")
OWN_NAMES += ("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs")


ROW_ALONE = BeforeValidator(lambda given: [given] if isinstance(given, list) and given and type(given[0]) is int else given)
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Prompts = Annotated[
    Annotated[list[str], FIRST] | Annotated[list[Annotated[list[int], FIRST]], FIRST],
    TEXT_ALONE,
    ROW_ALONE,
    expected("a text, a list of texts, a list of token ids, or a list of lists of token ids"),
]


class StreamOptions(Parameters):
    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False
    include_obfuscation: bool = False  # accepted and ignored: this server pads nothing


class Body(Parameters):
    """Parameters that completions and chats share."""

    unchanging: ClassVar[dict[str, list[Any]]] = UNCHANGING

    model: str
    n: int = Field(default=1, ge=1, le=128)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)  # 0 and -1: off
    min_p: float = Field(default=0.0, ge=0, lt=1)
    ignore_eos: bool = False
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: Annotated[list[Stop], TEXT_ALONE] = Field(default=[], max_length=16)
    stop_token_ids: list[int] = Field(default=[], max_length=256)
    min_tokens: int = Field(default=0, ge=0)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, ge=MIN_REPETITION, le=1 / MIN_REPETITION)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field(default={})
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: Any = None  # this and what follows: see `structured_output`
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    _held: tuple[str, Constraint] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_unchanging(cls, given: Any) -> Any:
        tree = {key: value for key, value in given.items() if value is not None and key not in IGNORED}
        if tree.get("best_of") == tree.get("n", 1):
            tree.pop("best_of", None)
        for key in cls.unchanging.keys() & tree.keys():
            if (value := tree.pop(key)) not in cls.unchanging[key]:
                raise ApiError(f"{key} = {short(value)} is not supported by this server: leave {key!r} out", param=key)
        return tree

    @field_validator("temperature")
    @classmethod
    def _precise(cls, given: float) -> float:
        if 0 < given < MIN_TEMPERATURE:
            raise ValueError("expected 0, which is greedy, or a value from 0.001 to 100")
        return given

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _by_id(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > MAX_BIAS:
            raise ApiError(f"logit_bias has {len(given)} tokens: expected at most {MAX_BIAS}", param="logit_bias")
        try:
            return {int(token): bias for token, bias in given.items()} if isinstance(given, dict) else given
        except ValueError:
            raise ApiError("logit_bias: expected token ids as its keys", param="logit_bias") from None

    @model_validator(mode="after")
    def _streamed(self) -> Self:
        if self.stream_options is not None and not self.stream:
            message = "stream_options was given without stream: set stream to true, or leave it out"
            raise ApiError(message, param="stream_options")
        return self

    @model_validator(mode="after")
    def _structured(self) -> Self:
        self._held = asked_constraint({name: value for name in FIELDS if (value := getattr(self, name)) is not None})
        if self._held is not None and self.ignore_eos and not self.stop_token_ids:
            message = f"ignore_eos was given with {self._held[0]}: such a reply ends where it is complete, so leave it out"
            raise ApiError(message, param="ignore_eos")
        return self

    @property
    def held(self) -> tuple[str, Constraint] | None:
        """The field that asks for structured output, and what the reply must be."""
        return self._held

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def _expect_least(self, limit: int | None) -> None:
        if limit is not None and self.min_tokens > limit:
            raise ApiError(f"min_tokens = {self.min_tokens}: expected at most max_tokens, {limit}", param="min_tokens")


class CompletionBody(Body):
    """Body of `/v1/completions`."""

    prompt: Prompts
    max_tokens: int = Field(default=16, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._expect_least(self.max_tokens)
        if self.max_tokens == 0 and not self.echo:
            raise ApiError("max_tokens = 0: expected at least 1, or echo to look at the prompt alone", param="max_tokens")
        if (prompts := len(self.prompt)) * self.n > MAX_CHOICES:
            raise ApiError(f"{prompts} prompts times n = {self.n}: expected at most {MAX_CHOICES} choices", param="n")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


class ChatInput(Parameters):
    """Input of the chat template: messages and options."""

    messages: Annotated[list[Message], FIRST]
    tools: list[FunctionTool] = Field(default=[], fail_fast=True)
    tool_choice: ToolChoice = "auto"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default={})

    @model_validator(mode="after")
    def _of_template(self) -> Self:
        if own := [key for key in self.chat_template_kwargs if key in OWN_NAMES or not key.isidentifier()]:
            message = f"chat_template_kwargs.{short(own[0])}: expected names that the template itself asks for"
            raise ApiError(message, param="chat_template_kwargs")
        if self.continue_final_message and self.add_generation_prompt:
            raise ApiError(
                "continue_final_message was given with add_generation_prompt: set add_generation_prompt to false",
                param="continue_final_message",
            )
        check_choice(self.tool_choice, self.tools)
        return self

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model is shown, as chat templates take them."""
        return [] if self.tool_choice == "none" else [tool.plain for tool in self.tools]

    @property
    def options(self) -> dict[str, Any]:
        """Options for the chat template."""
        return self.chat_template_kwargs | self.model_dump(include={"add_generation_prompt", "continue_final_message"})


class ChatBody(ChatInput, Body):
    """Body of `/v1/chat/completions`."""

    unchanging: ClassVar[dict[str, list[Any]]] = OF_CHATS

    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs was given without logprobs: set logprobs to true", param="top_logprobs")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ApiError("max_tokens and max_completion_tokens differ: give one of them", param="max_tokens")
        self._expect_least(self.limit)
        return self

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs

    @property
    def limit(self) -> int | None:
        """The most tokens of the reply that the client asked for."""
        return self.max_tokens or self.max_completion_tokens


class TokenizeBody(Parameters):
    """Body of `/tokenize` with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(ChatInput):
    """Body of `/tokenize` with messages."""

    model: str | None = None
    return_token_strs: bool = False


class DetokenizeBody(Parameters):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: list[int] = Field(fail_fast=True)
