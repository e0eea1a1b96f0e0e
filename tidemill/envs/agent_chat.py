"""AgentChat: what every chat offers an agent, on top of `complete`: work with tools, and an API for other programs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from tidemill.core.chat_interface import ServedChat
from tidemill.core.reply import Reply, Worked
from tidemill.gateway.gateway import serve_chat
from tidemill.tools.work_loop import work


class AgentChat(ABC):
    """The part of a chat that is the same in the controller and in an environment's worker."""

    @abstractmethod
    async def reply(
        self,
        message: str | Sequence[Mapping[str, Any]],
        *,
        schema: Any = None,
        max_tokens: int | None = None,
        last: bool = False,
    ) -> str:
        """See `interfaces.Chat`."""

    @abstractmethod
    async def complete(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        schema: Any = None,
        max_tokens: int | None = None,
        last: bool = False,
    ) -> Reply:
        """See `interfaces.Chat`."""

    @abstractmethod
    async def ask(self, policy: str, message: str | Sequence[Mapping[str, Any]], *, max_tokens: int | None = None) -> str:
        """See `interfaces.Chat`."""

    async def work(
        self,
        message: str | Sequence[Mapping[str, Any]],
        tools: Any,
        *,
        system: str | None = None,
        max_turns: int = 16,
        max_calls: int = 64,
        max_tokens: int | None = None,
    ) -> Worked:
        """Let the policy work with tools until it answers: see `tools.work_loop.work`."""
        limits: dict[str, Any] = {"max_turns": max_turns, "max_calls": max_calls, "max_tokens": max_tokens}
        return await work(self, message, tools, system=system, **limits)

    def serve(
        self, *, tokens: int | None = None, deadline_s: float | None = None
    ) -> AbstractAsyncContextManager[ServedChat]:
        """Serve the chat by HTTP to programs on this machine: see `gateway.serve_chat`."""
        return serve_chat(self, tokens=tokens, deadline_s=deadline_s)
