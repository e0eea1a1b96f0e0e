"""A chat that records what it is asked, and answers as it is told; and clients of a gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from tidemill.core.reply import Reply
from tidemill.core.types import Finish

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


def said(text: str, finish: Finish = Finish.STOP, **more: Any) -> Reply:
    """A reply of text alone."""
    message = {"role": "assistant", "content": text}
    return Reply(text, message, finish, prompt_tokens=7, cached_tokens=3, tokens=len(text), **more)


def calling(*calls: tuple[str, str], content: str | None = None, reasoning: str = "", turn: int = 1) -> Reply:
    """A reply that calls tools: (name, arguments as JSON text)."""
    made = [
        {"id": f"c{turn:04}{i:04}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": made}
    if reasoning:
        message["reasoning_content"] = reasoning
    return Reply(json.dumps(calls), message, Finish.STOP, prompt_tokens=7, cached_tokens=3, tokens=9)


class RecordingChat:
    """`answer(messages)` gives the reply, or the exception to raise. With `gate`, replies wait for it."""

    def __init__(self, answer: Callable[[list[Mapping[str, Any]]], Reply | Exception] | None = None) -> None:
        self.answer = answer or (lambda messages: said(f"to {messages[-1]['content']}"))
        self.asked: list[dict[str, Any]] = []
        self.schemas: list[Any] = []
        self.cancelled = 0
        self.under_way = self.most = 0
        self.gate: asyncio.Event | None = None
        self.came = asyncio.Condition()  # bounded: in tests

    async def complete(
        self,
        messages: Any,
        *,
        tools: Sequence[Any] = (),
        schema: Any = None,
        max_tokens: int | None = None,
        last: bool = False,
    ) -> Reply:
        self.asked.append({"messages": list(messages), "tools": list(tools), "max_tokens": max_tokens})
        self.schemas.append(schema)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        async with self.came:
            self.came.notify_all()
        try:
            await (self.gate.wait() if self.gate else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.under_way -= 1
        answer = self.answer(list(messages))
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def count(self, number: int) -> None:
        """Wait until it has been asked so often."""
        async with asyncio.timeout(30), self.came:
            await self.came.wait_for(lambda: len(self.asked) >= number)


def http(model: Any, key: str | None = None) -> httpx.AsyncClient:
    """A plain client of a gateway, without retries."""
    headers = {"authorization": f"Bearer {model.key if key is None else key}"}
    return httpx.AsyncClient(base_url=model.anthropic_url, headers=headers, timeout=60, trust_env=False)
