"""Replies of OpenAI's `/v1/responses`: a response of items, whole or as numbered events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tidemill.api_formats.replies import TextPiece, Usage
from tidemill.api_formats.responses_bodies import ResponsesBody

Item = dict[str, Any]


@dataclass(slots=True)
class ResponsesShape:
    """Format of one response. A stream's state is kept here: its items so far, and the text of the open one."""

    model: str
    id: str
    created: int
    asked: ResponsesBody
    _number: int = 0  # of the next event
    _items: list[Item] = field(default_factory=list)
    _text: str | None = None  # of the message that is open
    _finish: str | None = None

    @property
    def between(self) -> dict[str, Any]:
        return {}

    def reply(self, pieces: list[TextPiece], usage: Usage) -> dict[str, Any]:
        self._items, self._finish = self._items_of(pieces[0]), pieces[0].finish
        return self._response(usage)

    def opening(self, index: int, usage: Usage) -> list[dict[str, Any]]:
        begun = self._response(None)
        return self._numbered({"type": f"response.{state}", "response": begun} for state in ("created", "in_progress"))

    def chunks(self, index: int, piece: TextPiece) -> list[dict[str, Any]]:
        return self._numbered(self._events(piece))

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        whole = self._response(usage)
        return self._numbered([{"type": f"response.{whole['status']}", "response": whole}])

    def _events(self, piece: TextPiece) -> Iterator[dict[str, Any]]:
        if piece.message is not None:
            for item in self._items_of(piece):
                yield from self._whole(item)
        else:
            if piece.text:
                yield from self._begun() if self._text is None else ()
                yield from self._delta("output_text", piece.text)
            if piece.finish is not None and self._text is not None:
                yield from self._message_done()
        self._finish = piece.finish or self._finish

    def _whole(self, item: Item) -> Iterator[dict[str, Any]]:
        if item["type"] == "message":
            yield from self._begun()
            yield from self._delta("output_text", item["content"][0]["text"])
            yield from self._message_done()
            return
        place, empty = {"output_index": len(self._items)}, {"status": "in_progress"}
        empty |= {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield {"type": "response.output_item.added", **place, "item": item | empty}
        self._items.append(item)
        if item["type"] == "function_call":
            at, arguments = {"item_id": item["id"], **place}, item["arguments"]
            yield {"type": "response.function_call_arguments.delta", **at, "delta": arguments}
            yield {"type": "response.function_call_arguments.done", **at, "name": item["name"], "arguments": arguments}
        else:
            at, text = {"item_id": item["id"], "content_index": 0, **place}, item["content"][0]["text"]
            yield {"type": "response.reasoning_text.delta", **at, "delta": text}
            yield {"type": "response.reasoning_text.done", **at, "text": text}
        yield {"type": "response.output_item.done", **place, "item": item}

    def _begun(self) -> Iterator[dict[str, Any]]:
        self._items.append(self._message("", "in_progress"))
        self._text = ""
        yield {
            "type": "response.output_item.added",
            "output_index": len(self._items) - 1,
            "item": self._items[-1] | {"content": []},
        }
        yield {"type": "response.content_part.added", **self._place(), "part": _part("")}

    def _delta(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        self._text = (self._text or "") + text
        yield {"type": f"response.{kind}.delta", **self._place(), "delta": text, "logprobs": []}

    def _message_done(self) -> Iterator[dict[str, Any]]:
        text, self._text = self._text or "", None
        place = self._place()
        self._items[-1] = self._items[-1] | {"status": "completed", "content": [_part(text)]}
        yield {"type": "response.output_text.done", **place, "text": text, "logprobs": []}
        yield {"type": "response.content_part.done", **place, "part": _part(text)}
        yield {"type": "response.output_item.done", "output_index": place["output_index"], "item": self._items[-1]}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _numbered(self, events: Any) -> list[dict[str, Any]]:
        found = [event | {"sequence_number": self._number + i} for i, event in enumerate(events)]
        self._number += len(found)
        return found

    def _items_of(self, piece: TextPiece) -> list[Item]:
        items = list[Item]()
        if piece.reasoning:
            content = [{"type": "reasoning_text", "text": piece.reasoning}]
            items.append(
                {"id": f"rs_{self.id}", "type": "reasoning", "summary": [], "content": content, "status": "completed"}
            )
        if piece.text or not piece.calls:
            items.append(self._message(piece.text, "completed"))
        for i, call in enumerate(piece.calls):
            about = {"call_id": call["id"], **call["function"], "status": "completed"}
            items.append({"id": f"fc_{self.id}{i:04}", "type": "function_call", **about})
        return items

    def _message(self, text: str, status: str) -> Item:
        about = {"id": f"msg_{self.id}", "type": "message", "status": status, "role": "assistant"}
        return about | {"content": [_part(text)]}

    def _response(self, usage: Usage | None) -> dict[str, Any]:
        asked, cut = self.asked, self._finish == "length"
        status = "in_progress" if usage is None else "incomplete" if cut else "completed"
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": asked.instructions or None,
            "max_output_tokens": asked.max_output_tokens,
            "model": self.model,
            "output": list(self._items),
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": asked.previous_response_id or None,
            "reasoning": {"effort": None, "summary": None},
            "store": asked.store,
            "temperature": asked.temperature,
            "text": {"format": asked.text.format},
            "tool_choice": asked.tool_choice if isinstance(asked.tool_choice, str) else asked.tool_choice.model_dump(),
            "tools": [{"type": "function", "strict": tool.strict, **tool.plain["function"]} for tool in asked.tools],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage_of(usage),
            "user": None,
            "metadata": asked.metadata,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
