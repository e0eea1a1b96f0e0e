"""Request bodies of the APIs that an agent may speak, as calls of a chat.

The recipe decides how the policy is sampled: parameters such as temperature and seed are accepted from an agent and ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tidemill.api_formats.anthropic_bodies import MessagesBody
from tidemill.api_formats.anthropic_replies import MessagesShape
from tidemill.api_formats.body_decoding import read
from tidemill.api_formats.error_bodies import MESSAGES, RESPONSES
from tidemill.api_formats.parameters import validated
from tidemill.api_formats.replies import ChatShape, CompletionShape, StreamShape, TextPiece
from tidemill.api_formats.requests import Body, ChatBody, CompletionBody
from tidemill.api_formats.responses_bodies import ResponsesBody
from tidemill.api_formats.responses_replies import ResponsesShape
from tidemill.core.constraints import Constraint
from tidemill.core.errors import ApiError
from tidemill.core.reply import Reply
from tidemill.core.types import Finish

IMPOSED = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty")
IMPOSED += ("logit_bias", "min_tokens", "reasoning_effort", "verbosity", "prediction")  # by the recipe: ignored
IMPOSED += ("thinking", "context_management", "reasoning", "truncation", "max_tool_calls")
FORMAT = ("text", "output_config")  # of which the format of the reply is no matter of the recipe
UNKNOWN_HERE = ("logprobs", "top_logprobs", "echo", "return_token_ids", "return_tokens_as_token_ids", "stop_token_ids")
UNKNOWN_HERE += ("ignore_eos", "skip_special_tokens", "add_special_tokens", "chat_template_kwargs", "add_generation_prompt")
UNKNOWN_HERE += ("continue_final_message",)  # of tokens and templates, which an agent does not see

B = TypeVar("B", bound=Body)
Messages = list[dict[str, Any]]
Earlier = Callable[[str], Messages]
"""The conversation that ended with the reply of this id. Raises ApiError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """A request to the chat that a body makes, and the format of the reply."""

    conversations: list[Messages]  # each gets `n` replies
    shape: Callable[[str, str, int], StreamShape]  # from the model's name, the reply's id and its time
    tools: Sequence[Mapping[str, Any]] = ()
    schema: Constraint | None = None  # that holds the replies
    limit: int | None = None  # tokens of a reply
    stops: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    include_usage: bool = False  # with the events of a stream
    as_text: bool = False  # the reply is its text alone
    kept: Messages | None = None  # what a later call may go on from, by the reply's id; None: nothing


def read_chat(raw: bytes, earlier: Earlier) -> ModelCall:
    """A call of `/v1/chat/completions`. Raises ApiError."""
    body = _body(ChatBody, raw)
    return ModelCall(
        shape=lambda model, name, created: ChatShape(model, id=name, created=created),
        include_usage=body.include_usage,
        **_of_chat(body),
    )


def read_completion(raw: bytes, earlier: Earlier) -> ModelCall:
    """A call of `/v1/completions`: each prompt is a conversation of one message of the user. Raises ApiError."""
    body = _body(CompletionBody, raw)
    if not all(isinstance(prompt, str) for prompt in body.prompt):
        raise ApiError("prompt is of token ids: expected a text, or a list of texts", param="prompt")
    return ModelCall(
        conversations=[[{"role": "user", "content": prompt}] for prompt in body.prompt],
        shape=lambda model, name, created: CompletionShape(model, id=name, created=created),
        schema=_schema(body),
        limit=body.max_tokens,
        stops=tuple(body.stop),
        n=body.n,
        stream=body.stream,
        include_usage=body.include_usage,
        as_text=True,
    )


def read_responses(raw: bytes, earlier: Earlier) -> ModelCall:
    """A call of `/v1/responses`. Raises ApiError."""
    body = validated(ResponsesBody, _without_imposed(raw))
    before = earlier(body.previous_response_id.removeprefix("resp_")) if body.previous_response_id else []
    return ModelCall(
        shape=lambda model, name, created: ResponsesShape(model, name, created, body),
        include_usage=True,
        kept=[*before, *body.heard] if body.store else None,
        **_of_chat(body.chat(before)),
    )


def read_messages(raw: bytes, earlier: Earlier) -> ModelCall:
    """A call of `/v1/messages`. Raises ApiError."""
    body = validated(MessagesBody, _without_imposed(raw))
    return ModelCall(
        shape=lambda model, name, created: MessagesShape(model, name), include_usage=True, **_of_chat(body.chat())
    )


DIALECTS: dict[str, Callable[[bytes, Earlier], ModelCall]] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completion,
    RESPONSES: read_responses,
    MESSAGES: read_messages,
}


def _of_chat(body: ChatBody) -> dict[str, Any]:
    return {
        "conversations": [[message.plain for message in body.messages]],
        "tools": body.offered,
        "schema": _schema(body),
        "limit": body.limit,
        "stops": tuple(body.stop),
        "n": body.n,
        "stream": body.stream,
    }


def _schema(body: Body) -> Constraint | None:
    return None if body.held is None else body.held[1]


def _without_imposed(raw: bytes) -> dict[str, Any]:
    tree = {key: value for key, value in read(raw).items() if key not in IMPOSED}
    for key in FORMAT:
        if isinstance(given := tree.get(key), dict):
            tree[key] = {name: value for name, value in given.items() if name == "format"}
    return tree


def _body(kind: type[B], raw: bytes) -> B:
    body = validated(kind, _without_imposed(raw))
    for key in UNKNOWN_HERE:
        if (field := kind.model_fields.get(key)) is not None and getattr(body, key) != field.get_default():
            raise ApiError(f"{key} is not available to an agent: leave it out", param=key)
    return body


def piece_of(reply: Reply, call: ModelCall) -> TextPiece:
    """A reply as one piece of text, cut before the first stop string: what comes after it was sampled, and is recorded.

    A reply whose calls cannot be read is all text, so that the agent sees what was said.
    """
    message = None if call.as_text else reply.message
    if message is not None and reply.faults and not message.get("tool_calls"):
        message = {"role": "assistant", "content": reply.text}
    text = reply.text if message is None else message.get("content") or ""
    finish = "stop" if reply.finish is Finish.STOP else "length"
    stop = min((stop for stop in call.stops if stop in text), key=text.index, default=None)
    if stop is not None:
        text, finish = text[: text.index(stop)], "stop"
        message = None if message is None else {**message, "content": text, "tool_calls": []}
    return TextPiece(text, finish=finish, sampled=reply.tokens, message=message, stop=stop)
