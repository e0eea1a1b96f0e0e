"""The chat of an episode: everything that an environment can ask of the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from tidemill.core.reply import Reply, Worked


class ServedChat(Protocol):
    """A chat as an API for other programs."""

    @property
    def url(self) -> str:
        """Base URL for OpenAI's clients."""
        ...

    @property
    def anthropic_url(self) -> str:
        """Base URL for Anthropic's clients."""
        ...

    @property
    def key(self) -> str:
        """API key, of this episode alone."""
        ...

    @property
    def model(self) -> str:
        """A name of the model, for clients that need one."""
        ...

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables by which usual clients find it."""
        ...

    @property
    def counts(self) -> dict[str, int]:
        """Counts of what was asked so far, by name."""
        ...


class Chat(Protocol):
    """One seat's conversation with the policy. It owns template, tokens, logprobs, versions and masks."""

    async def reply(
        self,
        message: str | Sequence[Mapping[str, Any]],
        *,
        schema: Any = None,
        max_tokens: int | None = None,
        last: bool = False,
    ) -> str:
        """Add `message` (a user turn, or several messages), sample the policy's answer and return its text.

        message: a text, or messages with `role`, `content` and whatever else the chat template reads. schema: holds the
        reply to JSON of this schema (a dict, or a pydantic model) or to `constraints.regex(...)`. last: that no further one
        will be asked for, so that engines need not remember this one; one that is asked for all the same is only slower.
        """
        ...

    async def complete(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        schema: Any = None,
        max_tokens: int | None = None,
        last: bool = False,
    ) -> Reply:
        """Sample the policy's answer to a whole conversation, as chat completions do.

        A conversation that begins with a recorded one goes on in it; any other one, of a history that was rewritten or
        begun anew, becomes a branch of the attempt. All replies are trained with the attempt's outcome, each token once.
        Several may be under way at a time. tools: JSON schemas of the tools that the policy is told of, as chat completions
        take them. schema: see `reply`. Raises ValueError when the last message is the policy's own reply.
        """
        ...

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
        """Let the policy work on a message with tools: run what it calls and tell it the results, until it answers.

        tools: a list of functions (see `tidemill.tool`), or a ToolSet. max_turns: replies. max_calls: calls of tools. What
        goes wrong in a call is told to the policy. Raises ToolUnavailable when a tool says that it cannot work.
        """
        ...

    def serve(
        self, *, tokens: int | None = None, deadline_s: float | None = None
    ) -> AbstractAsyncContextManager[ServedChat]:
        """Serve this chat by HTTP, as OpenAI's and Anthropic's APIs, to programs on this machine: `async with` it.

        tokens: that all replies together may have. deadline_s: seconds until there are no further replies.
        """
        ...

    async def ask(self, policy: str, message: str | Sequence[Mapping[str, Any]], *, max_tokens: int | None = None) -> str:
        """Ask a frozen policy of the run in a conversation of its own, and return its reply.

        It is sampled as the episode's replies are, greedily in an evaluation. Nothing of it is recorded in the trajectory or
        trained. Raises ValueError for a policy that the run does not serve, or that it trains.
        """
        ...
