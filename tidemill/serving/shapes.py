"""Replies in OpenAI's format: choices, chunks of a stream, logprobs, usage."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tidemill.models.tokenizer import Tokenizer
from tidemill.serving.choices import Piece, TokenLogprob
from tidemill.serving.text import BROKEN

FLOOR = -9999.0  # JSON has no minus infinity


@dataclass(slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int = 0

    def body(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens, "total_tokens": total}


class Names:
    """What a token is called where it is shown alone; special tokens by their names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._of = lru_cache(1 << 16)(lambda token: tokenizer.decode([token], skip_special_tokens=False))

    def __call__(self, token: int) -> str:
        return self._of(token)


@dataclass(frozen=True, slots=True)
class Shape:
    """One request's reply. `logprobs`: whether they were asked for."""

    model: str
    logprobs: bool
    names: Names
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def envelope(self, kind: str, prefix: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}
        return head | {"choices": choices} | more


class CompletionShape(Shape):
    def reply(self, pieces: list[Piece], usage: Usage) -> dict[str, Any]:
        choices = [self._choice(i, piece) for i, piece in enumerate(pieces)]
        return self.envelope("text_completion", "cmpl", choices, usage=usage.body())

    def opening(self, index: int) -> list[dict[str, Any]]:
        return []

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        return self.envelope("text_completion", "cmpl", [self._choice(index, piece)])

    def closing(self, usage: Usage) -> dict[str, Any]:
        return self.envelope("text_completion", "cmpl", [], usage=usage.body())

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        logprobs = self._logprobs(piece.tokens) if self.logprobs else None
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}

    def _logprobs(self, tokens: list[TokenLogprob]) -> dict[str, Any]:
        return {
            "tokens": [self.names(t.token) for t in tokens],
            "token_logprobs": [None if t.logprob is None else max(t.logprob, FLOOR) for t in tokens],
            "top_logprobs": [self._alternatives(t) for t in tokens],
            "text_offset": [t.offset for t in tokens],
        }

    def _alternatives(self, token: TokenLogprob) -> dict[str, float] | None:
        """By name, the token itself always among them. Of several with one name the likeliest is shown."""
        if token.logprob is None:
            return None
        found: dict[str, float] = {}
        for number, logprob in token.top:
            found.setdefault(self.names(number), max(logprob, FLOOR))
        return found | {self.names(token.token): max(token.logprob, FLOOR)}


class ChatShape(Shape):
    def reply(self, pieces: list[Piece], usage: Usage) -> dict[str, Any]:
        choices = []
        for i, piece in enumerate(pieces):
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            choices.append({"index": i, "message": message, **self._end(piece)})
        return self.envelope("chat.completion", "chatcmpl", choices, usage=usage.body())

    def opening(self, index: int) -> list[dict[str, Any]]:
        first = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._envelope([first])]

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        return self._envelope([{"index": index, "delta": delta, **self._end(piece)}])

    def closing(self, usage: Usage) -> dict[str, Any]:
        return self._envelope([], usage=usage.body())

    def _envelope(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return self.envelope("chat.completion.chunk", "chatcmpl", choices, **more)

    def _end(self, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self.logprobs:
            entries = []
            for t in piece.tokens:
                assert t.logprob is not None, "a chat does not echo its prompt"
                top = [self._entry(number, logprob) for number, logprob in t.top]
                entries.append(self._entry(t.token, t.logprob) | {"top_logprobs": top})
            logprobs = {"content": entries, "refusal": None}
        return {"logprobs": logprobs, "finish_reason": piece.finish}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        """`bytes` is null where the token is a part of a character."""
        name = self.names(token)
        return {"token": name, "logprob": max(logprob, FLOOR), "bytes": None if BROKEN in name else list(name.encode())}
