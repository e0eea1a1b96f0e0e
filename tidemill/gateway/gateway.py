"""`serve_chat`: an episode's chat as an API for a program, by OpenAI's and Anthropic's clients.

    async with serve_chat(chat) as model:
        await run_agent(base_url=model.url, api_key=model.key)

The HTTP is spoken here, in the process of the environment; the record stays with the chat. See `docs/agents.md`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from tidemill.core.chat_interface import Chat
from tidemill.core.errors import ConfigError

if TYPE_CHECKING:
    from tidemill.gateway.episode_calls import EpisodeCalls
    from tidemill.gateway.gateway_server import GatewayServer

LOCAL = "127.0.0.1,localhost"  # addresses that are reached without a proxy
MODEL = "policy"  # the model's name, for clients that need one; any other name is answered as well
_servers: WeakKeyDictionary[asyncio.AbstractEventLoop, GatewayServer] = WeakKeyDictionary()


class Gateway:
    """Address and key of an episode's chat, and what was asked of it."""

    def __init__(self, server: GatewayServer, calls: EpisodeCalls, key: str) -> None:
        self.key, self.model = key, MODEL
        self.anthropic_url = server.url  # whose clients add /v1 themselves
        self.url = f"{server.url}/v1"
        self._calls = calls

    @property
    def counts(self) -> dict[str, int]:
        """Calls; retries that got an earlier answer; calls that were abandoned; refused ones; faulty calls; tokens."""
        return {str(name): count for name, count in self._calls.counts.items()}

    @property
    def refused(self) -> str:
        """The status and the message of the latest refused call."""
        return self._calls.refused

    @property
    def failure(self) -> Exception | None:
        """The chat's exception that is no fault of the agent."""
        return self._calls.failure

    @property
    def failing(self) -> asyncio.Future[None]:
        """Done when there is such an exception."""
        return self._calls.failing

    @property
    def asked(self) -> asyncio.Future[None]:
        """Done when the policy has been asked for the first time."""
        return self._calls.asked

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables by which usual clients find the gateway."""
        return {
            "OPENAI_BASE_URL": self.url,
            "OPENAI_API_BASE": self.url,
            "OPENAI_API_KEY": self.key,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.anthropic_url,
            "ANTHROPIC_API_KEY": self.key,
            "ANTHROPIC_MODEL": self.model,
            "TIDEMILL_MODEL": self.model,
        } | {name: ",".join(filter(None, [os.environ.get(name), LOCAL])) for name in ("NO_PROXY", "no_proxy")}


def expect_packages() -> None:
    """Raise ConfigError where a package that a gateway needs is not installed."""
    if missing := [name for name in ("starlette", "uvicorn", "h11") if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"a gateway for agents needs {' and '.join(missing)}: pip install 'tidemill[serve]'")


@asynccontextmanager
async def serve_chat(chat: Chat, *, tokens: int | None = None, deadline_s: float | None = None) -> AsyncIterator[Gateway]:
    """Serve an episode's chat by HTTP on this machine, to whoever has the key, until the block ends.

    tokens: that all replies together may have. deadline_s: seconds until there are no further replies.
    At the end, calls under way are cancelled. Raises ConfigError where a package is missing, and the chat's own exception
    that is no fault of the agent, such as an engine's.
    """
    expect_packages()
    from tidemill.gateway.episode_calls import EpisodeCalls
    from tidemill.gateway.gateway_server import GatewayServer

    loop = asyncio.get_running_loop()
    server = _servers.get(loop) or _servers.setdefault(loop, GatewayServer(MODEL))
    server.users += 1
    calls = EpisodeCalls(chat, tokens)
    key = server.admit(calls)
    late = f"the episode's {deadline_s:g} s are over" if deadline_s is not None else ""
    timer = None if deadline_s is None else loop.call_later(deadline_s, calls.close, late)
    try:
        await server.started()
        yield Gateway(server, calls, key)
        if calls.failure is not None:
            raise calls.failure
    finally:
        if timer is not None:
            timer.cancel()
        server.dismiss(key)
        calls.close("the episode is over")
        await calls.closed()
        server.users -= 1
        if not server.users:
            del _servers[loop]
            await server.stop()
