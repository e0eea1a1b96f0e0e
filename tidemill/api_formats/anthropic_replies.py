"""Replies of Anthropic's `/v1/messages`: a message of blocks, whole or as events."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tidemill.api_formats.replies import TextPiece, Usage

Block = dict[str, Any]


@dataclass(slots=True)
class MessagesShape:
    """Format of one message. A stream's state is kept here: the open block, and the reason for the end."""

    model: str
    id: str
    _blocks: int = 0  # that were begun
    _open: str = ""  # type of the block that is open
    _end: dict[str, Any] = field(default_factory=dict)

    @property
    def between(self) -> dict[str, Any]:
        return {}

    def reply(self, pieces: list[TextPiece], usage: Usage) -> dict[str, Any]:
        return self._message(_blocks(pieces[0]), _end(pieces[0]), usage)

    def opening(self, index: int, usage: Usage) -> list[dict[str, Any]]:
        nothing = {"stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": self._message([], nothing, usage)}]

    def chunks(self, index: int, piece: TextPiece) -> list[dict[str, Any]]:
        events = list[dict[str, Any]]()
        if piece.message is None:  # a piece of the text, of which there are more
            events += self._begin({"type": "text", "text": ""}) if piece.text and not self._open else []
            events += self._delta({"type": "text_delta", "text": piece.text}) if piece.text else []
        else:
            for block in _blocks(piece):
                events += self._whole(block)
        if piece.finish is not None:
            events += self._finish()
            self._end = _end(piece)
        return events

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        return [{"type": "message_delta", "delta": self._end, "usage": _usage(usage)}, {"type": "message_stop"}]

    def _message(self, content: list[Block], end: dict[str, Any], usage: Usage) -> dict[str, Any]:
        head = {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "model": self.model}
        return head | {"content": content} | end | {"usage": _usage(usage)}

    def _whole(self, block: Block) -> list[dict[str, Any]]:
        match block:
            case {"type": "text", "text": text}:
                begun, deltas = {"text": ""}, [{"type": "text_delta", "text": text}]
            case {"type": "thinking", "thinking": text, "signature": mark}:
                begun = {"thinking": "", "signature": ""}
                deltas = [{"type": "thinking_delta", "thinking": text}, {"type": "signature_delta", "signature": mark}]
            case _:
                begun, raw = {"input": {}}, json.dumps(block["input"], ensure_ascii=False)
                deltas = [{"type": "input_json_delta", "partial_json": raw}]
        events = self._begin(block | begun)
        return [*events, *(event for delta in deltas for event in self._delta(delta)), *self._finish()]

    def _begin(self, block: Block) -> list[dict[str, Any]]:
        self._open, self._blocks = block["type"], self._blocks + 1
        return [{"type": "content_block_start", "index": self._blocks - 1, "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}]

    def _finish(self) -> list[dict[str, Any]]:
        was, self._open = self._open, ""
        return [{"type": "content_block_stop", "index": self._blocks - 1}] if was else []


def _blocks(piece: TextPiece) -> list[Block]:
    """The content of a whole message."""
    thoughts = [{"type": "thinking", "thinking": piece.reasoning, "signature": ""}] if piece.reasoning else []
    texts = [{"type": "text", "text": piece.text}] if piece.text else []
    return [*thoughts, *texts, *({"type": "tool_use", **_call(call)} for call in piece.calls)]


def _call(call: dict[str, Any]) -> dict[str, Any]:
    text = call["function"]["arguments"]
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    # A client expects an object, and a model may write anything: other arguments than an object are told as they are.
    return {
        "id": call["id"],
        "name": call["function"]["name"],
        "input": given if isinstance(given, dict) else {"arguments": text},
    }


def _end(piece: TextPiece) -> dict[str, Any]:
    reason = "end_turn" if piece.finish == "stop" else "max_tokens"
    if piece.stop is not None:
        reason = "stop_sequence"
    elif piece.calls and piece.finish == "stop":
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": piece.stop}


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic's numbers: what came from the cache is not among the input's tokens."""
    cached = usage.cached_tokens or 0
    told = {"input_tokens": usage.prompt_tokens - cached, "output_tokens": usage.completion_tokens}
    return told | {"cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}
