"""Replies of OpenAI's completions and chats: choices, stream chunks, logprobs, usage, and token ids as in vLLM."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tidemill.api_formats.vocabulary import Vocabulary

FLOOR = -9999.0  # JSON has no minus infinity


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of a reply with its logprob and its alternatives."""

    token: int
    logprob: float | None  # None: the first token of a prompt, which nothing predicts, or the engine does not know it
    top: list[tuple[int, float]]  # alternatives, likeliest first
    offset: int  # where the token begins, in characters of the choice's text
    data: bytes  # bytes that it adds to the text
    first: bool = False  # the token is the first of the text
    shown: bool = False  # special tokens are part of the text


@dataclass(slots=True)
class TextPiece:
    """A piece of a choice's text. The last one has `finish`, and the number of sampled tokens."""

    text: str
    tokens: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    sampled: int = 0
    ids: list[int] = field(default_factory=list)  # token ids of its sampled tokens
    stop: str | None = None  # the stop string before which it was cut
    message: dict[str, Any] | None = None  # in one piece with the whole text: the assistant's message that it was read as

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls of tools in the message, in OpenAI's form."""
        return [] if self.message is None else self.message.get("tool_calls") or []

    @property
    def reasoning(self) -> str:
        """The model's thoughts before the message's content."""
        return "" if self.message is None else self.message.get("reasoning_content") or ""

    def shifted(self, by: int) -> TextPiece:
        """The piece with its offsets moved by `by` characters, the length of text before the reply."""
        tokens = [replace(token, offset=token.offset + by) for token in self.tokens] if by else self.tokens
        return replace(self, tokens=tokens)


@dataclass(slots=True)
class Usage:
    """Numbers of tokens of one request."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None  # of the prompt, found in the prefix cache; None: not known

    def body(self) -> dict[str, Any]:
        total = self.prompt_tokens + self.completion_tokens
        told = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens, "total_tokens": total}
        known = self.cached_tokens is not None
        return told | ({"prompt_tokens_details": {"cached_tokens": self.cached_tokens}} if known else {})


class StreamShape(Protocol):
    """Format of the reply to one request of any API, whole or as the events of a stream."""

    @property
    def between(self) -> dict[str, Any]:
        """Fields of each event but the last one, where usage is told at the end."""
        ...

    def reply(self, pieces: list[TextPiece], usage: Usage) -> dict[str, Any]: ...
    def opening(self, index: int, usage: Usage) -> list[dict[str, Any]]: ...
    def chunks(self, index: int, piece: TextPiece) -> list[dict[str, Any]]: ...
    def closing(self, usage: Usage) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class ReplyShape:
    """Format of the reply to one request: model, names of tokens, requested extras."""

    model: str
    vocabulary: Vocabulary | None = None  # names tokens where logprobs were requested
    logprobs: bool = False
    prompts: list[list[int]] | None = None  # token ids of each choice's prompt, if they were requested
    numbered: bool = False  # tokens are named by their ids
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def between(self) -> dict[str, Any]:
        return {"usage": None}

    def envelope(self, kind: str, prefix: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}
        return head | {"choices": choices} | more

    def name(self, token: int, at: TokenLogprob) -> str:
        assert self.vocabulary is not None, "logprobs name tokens"
        return f"token_id:{token}" if self.numbered else self.vocabulary.name(token, at.first)


class CompletionShape(ReplyShape):
    """Format of a text completion, whole or streamed."""

    def reply(self, pieces: list[TextPiece], usage: Usage) -> dict[str, Any]:
        choices = [self._choice(i, piece) | self._prompt(i) for i, piece in enumerate(pieces)]
        return self.envelope("text_completion", "cmpl", choices, usage=usage.body())

    def opening(self, index: int, usage: Usage) -> list[dict[str, Any]]:
        if self.prompts is None:
            return []
        return [self.envelope("text_completion", "cmpl", [self._choice(index, TextPiece("")) | self._prompt(index)])]

    def chunks(self, index: int, piece: TextPiece) -> list[dict[str, Any]]:
        return [self.envelope("text_completion", "cmpl", [self._choice(index, piece)])]

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        return [self.envelope("text_completion", "cmpl", [], usage=usage.body())]

    def _prompt(self, index: int) -> dict[str, Any]:
        return {} if self.prompts is None else {"prompt_token_ids": self.prompts[index]}

    def _choice(self, index: int, piece: TextPiece) -> dict[str, Any]:
        logprobs = self._logprobs(piece.tokens) if self.logprobs else None
        ids = {} if self.prompts is None else {"token_ids": piece.ids}
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish} | ids

    def _logprobs(self, tokens: list[TokenLogprob]) -> dict[str, Any]:
        return {
            "tokens": [self.name(t.token, t) for t in tokens],
            "token_logprobs": [None if t.logprob is None else max(t.logprob, FLOOR) for t in tokens],
            "top_logprobs": [self._alternatives(t) for t in tokens],
            "text_offset": [t.offset for t in tokens],
        }

    def _alternatives(self, at: TokenLogprob) -> dict[str, float] | None:
        """Logprobs of alternatives by name, the token itself included; for equal names the likeliest."""
        if at.logprob is None:
            return None
        found: dict[str, float] = {}
        for number, logprob in at.top:
            found.setdefault(self.name(number, at), max(logprob, FLOOR))
        return found | {self.name(at.token, at): max(at.logprob, FLOOR)}


class ChatShape(ReplyShape):
    """Format of a chat completion, whole or streamed."""

    def reply(self, pieces: list[TextPiece], usage: Usage) -> dict[str, Any]:
        choices = []
        for i, piece in enumerate(pieces):
            message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
            if calls := piece.calls:
                message |= {"content": piece.text or None, "tool_calls": calls}
            if thoughts := piece.reasoning:
                message["reasoning_content"] = thoughts
            choices.append({"index": i, "message": message, **self._end(piece)})
        return self.envelope("chat.completion", "chatcmpl", choices, usage=usage.body(), **self._prompt())

    def opening(self, index: int, usage: Usage) -> list[dict[str, Any]]:
        first = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._envelope([first], **({} if index else self._prompt()))]

    def chunks(self, index: int, piece: TextPiece) -> list[dict[str, Any]]:
        before: list[dict[str, Any]] = [{"reasoning_content": piece.reasoning}] if piece.reasoning else []
        for i, call in enumerate(piece.calls):
            begun = call["function"] | {"arguments": ""}
            before.append({"tool_calls": [{"index": i, **call, "function": begun}]})
            before.append({"tool_calls": [{"index": i, "function": {"arguments": call["function"]["arguments"]}}]})
        if piece.calls and piece.text:
            before.insert(1 if piece.reasoning else 0, {"content": piece.text})
        last = {"content": piece.text} if piece.text and not piece.calls else {}
        open_ = {"logprobs": None, "finish_reason": None}
        return [
            *(self._envelope([{"index": index, "delta": delta, **open_}]) for delta in before),
            self._envelope([{"index": index, "delta": last, **self._end(piece)}]),
        ]

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        return [self._envelope([], usage=usage.body())]

    def _prompt(self) -> dict[str, Any]:
        return {} if self.prompts is None else {"prompt_token_ids": self.prompts[0]}

    def _envelope(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return self.envelope("chat.completion.chunk", "chatcmpl", choices, **more)

    def _end(self, piece: TextPiece) -> dict[str, Any]:
        logprobs = None
        if self.logprobs:
            entries = []
            for t in piece.tokens:
                assert t.logprob is not None, "a chat does not echo its prompt"
                top = [self._entry(t, number, logprob) for number, logprob in t.top]
                entries.append(self._entry(t, t.token, t.logprob) | {"bytes": list(t.data), "top_logprobs": top})
            logprobs = {"content": entries, "refusal": None}
        ids = {} if self.prompts is None else {"token_ids": piece.ids}
        finish = "tool_calls" if piece.calls and piece.finish == "stop" else piece.finish
        return {"logprobs": logprobs, "finish_reason": finish} | ids

    def _entry(self, at: TokenLogprob, token: int, logprob: float) -> dict[str, Any]:
        """Entry of a token at the place of `at`. Its `bytes` are none for a special token that is not shown."""
        assert self.vocabulary is not None, "logprobs name tokens"
        data = self.vocabulary.data(token, at.first, at.shown)
        return {"token": self.name(token, at), "logprob": max(logprob, FLOOR), "bytes": list(data)}
