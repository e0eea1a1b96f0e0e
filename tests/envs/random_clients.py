"""Agents at random that ask by HTTP, with tools, and whose library tries again as clients do.

A request is sent once; or again with a count of retries, after its answer or beside it; or again without one, after its
client has left. Each of them is one call: it gets what was sampled for it, and nothing is sampled anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from envs.random_agents import ASKED, Agent, RandomEngine, user
from envs.scripted_engine import chat_tokenizer
from models.chat_formats import QWEN3

from tidemill.core.chat_interface import ServedChat
from tidemill.core.types import Completion, GenerateRequest
from tidemill.gateway.episode_calls import GatewayCall
from tidemill.gateway.gateway import Gateway, serve_chat
from tidemill.models.chat_template import Messages, as_messages
from tidemill.models.tokenizer import Tokenizer

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]
SHOWN = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
# As Qwen 3's: what was thought stays within a loop of calls, and is taken out once the user has spoken again.
THINKS_WITH_TOOLS = chat_tokenizer(SHOWN + QWEN3)
# As others do it: what was thought is taken out at once.
FORGETS_WITH_TOOLS = chat_tokenizer(
    SHOWN + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{{ (m.content or '').split('</think>')[-1] }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% else %}{{ m.content or '' }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = {"keeps thinking in a loop of calls": THINKS_WITH_TOOLS, "forgets": FORGETS_WITH_TOOLS}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
HALF = '<tool_call>\n{"name": "add", "argum'
PATH = "/chat/completions"


class CallingEngine(RandomEngine):
    """Calls tools, too, now and then by half; holds a reply back until it is let go."""

    openings = ("", "<think>hm</think>")  # what is not closed, a client sends back in another form

    def __init__(self, tokenizer: Tokenizer, rng: random.Random, calls: bool) -> None:
        super().__init__(tokenizer, rng)
        self.calls_tools, self.held = calls, asyncio.Event()
        self.held.set()

    async def generate(self, request: GenerateRequest) -> Completion:
        await self.held.wait()
        return await super().generate(request)

    def _text(self) -> str:
        if not self.calls_tools or self.rng.random() < 0.4:
            return super()._text()
        many = self.rng.choice(["", "a b"]) + "\n".join([CALL] * self.rng.randint(1, 3))
        return self.rng.choice(self.openings) + (many if self.rng.random() < 0.8 else HALF)


class Client(Agent):
    """An agent behind a gateway."""

    context, most = 40_000, 400

    model: Gateway
    http: httpx.AsyncClient

    def __init__(self, tokenizer: Tokenizer, rng: random.Random, engine: CallingEngine) -> None:
        super().__init__(tokenizer, rng, engine)
        self.engine, self.sent = engine, Counter[str]()  # how requests were sent
        self.one = asyncio.Lock()  # bounded: nothing is held back for long

    async def talk(self) -> None:
        complete = self.chat.complete

        async def noted(messages: Any, **more: Any) -> Any:
            ASKED.set((messages, more["tools"]))
            return await complete(messages, **more)

        self.chat.complete = noted  # type: ignore[method-assign]
        async with serve_chat(self.chat) as self.model, client_of(self.model) as self.http:
            await super().talk()

    def next(self) -> Messages:
        asked = self.known[-1] if self.known and self.rng.random() < 0.7 else []
        if calls := (asked[-1].get("tool_calls") if asked else None):
            results = [{"role": "tool", "tool_call_id": each["id"], "content": self.word()} for each in calls]
            return [*asked, *results, *([user(self.word())] if self.rng.random() < 0.2 else [])]
        return super().next()

    async def ask(self, messages: Messages) -> None:
        self.asked.append(messages)
        offered = {"tools": TOOLS} if self.engine.calls_tools and self.rng.random() < 0.9 else {}
        number = len(self.asked)  # so that what is asked twice on purpose is two requests
        raw = json.dumps({"model": "m", "messages": messages, "user": str(number), **offered}).encode()
        how = self.rng.choice(["once", "told", "beside", "left"])
        self.sent[how] += 1
        answers = await getattr(self, how)(raw)
        assert all(each == answers[0] for each in answers), how
        message = answers[0]["choices"][0]["message"]
        self.known.append([*messages, {key: value for key, value in message.items() if value is not None}])

    async def post(self, raw: bytes, again: int = 0) -> dict[str, Any]:
        headers = {"x-stainless-retry-count": str(again)} if again else {}
        answer = await self.http.post(PATH, content=raw, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def once(self, raw: bytes) -> list[Any]:
        return [await self.post(raw)]

    async def told(self, raw: bytes) -> list[Any]:
        """The answer was lost on its way, and the library says so."""
        return [await self.post(raw, again) for again in range(self.rng.randint(2, 3))]

    async def beside(self, raw: bytes) -> list[Any]:
        """The library gave up waiting, though its first request is still under way."""
        async with self._held_back(raw) as (first, call):
            second = asyncio.ensure_future(self.post(raw, 1))
            await until(lambda: call.waiting == 2)
        return [await first, await second]

    async def left(self, raw: bytes) -> list[Any]:
        """The connection broke, and the same is asked again, without a word."""
        async with self._held_back(raw) as (first, call):
            first.cancel()
            await until(lambda: call.left)
            second = asyncio.ensure_future(self.post(raw))
            await until(lambda: call.waiting == 1)
        return [await second]

    @asynccontextmanager
    async def _held_back(self, raw: bytes) -> AsyncIterator[tuple[asyncio.Task[dict[str, Any]], GatewayCall]]:
        """A request, and its call at the gateway, while nothing is sampled."""
        key = hashlib.sha256(b"/v1/chat/completions\0" + raw).hexdigest(), ""
        async with self.one:
            self.engine.held.clear()
            first = asyncio.ensure_future(self.post(raw))
            await until(lambda: key in self.model._calls._calls)
            (call,) = self.model._calls._calls[key]
            yield first, call
            assert not call.answered
            self.engine.held.set()


async def until(there: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not there():
            await asyncio.sleep(0)


def client_of(model: ServedChat) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=model.url, headers={"authorization": f"Bearer {model.key}"}, timeout=60, trust_env=False, verify=False
    )


def check_shown(tokenizer: Tokenizer, engine: RandomEngine) -> None:
    """Each prompt is what the template renders of the whole conversation, and of the tools that it is told of."""
    for told, (asked, _) in zip(engine.asked, engine.calls, strict=True):
        messages, tools = told
        if tokenizer.chat_template:
            how: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
            text = str(tokenizer.apply_chat_template(as_messages(messages), tools=tools or None, **how))
        else:
            text = "".join(each["content"] for each in messages)
        shown = tokenizer.decode(asked.tokens, skip_special_tokens=not tokenizer.chat_template)
        assert "".join(shown.split()) == "".join(text.split())
