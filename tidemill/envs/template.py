"""From messages to tokens, append-only: what was sampled is never encoded again (I7).

A turn adds to the record; it never rewrites it. With a chat template the tokens to add are found as follows. `sent` is
the text rendered for the turn before (it ended in the generation prompt), `reply` the text the policy answered with.

    full = template(all messages, reply included) + generation prompt
    full must be   sent + reply + tail         else the template rewrites history: refused, by name
    added tokens = encode(tail without the stop token's text, when the policy sampled that token itself)

The reply in `full` may lack outer whitespace (templates trim it); the record keeps what was sampled. Without a template
a message is its text and a newline, and the reply follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jinja2
import numpy as np

from tidemill.errors import ConfigError
from tidemill.models.tokenizer import Tokenizer
from tidemill.types import Array, Task

Messages = list[dict[str, str]]
Turn = tuple[Messages, str]
"""Messages, and the reply to them."""


class TemplateRewritesHistory(ConfigError):
    """The chat template does not render an earlier turn as it was sent, so that a second turn cannot be appended."""


class Renderer(Protocol):
    """One conversation's way into tokens."""

    def begin(self, messages: Messages) -> Array:
        """Tokens of the first turn, ready for the policy's reply. [P] int32"""
        ...

    def follow(self, reply: str, stop: int | None, messages: Messages) -> Array:
        """Tokens to append after the reply, ready for the next. `stop`: the stop id that ended it, if one did. [n] int32"""
        ...


def renderer(tokenizer: Tokenizer) -> Renderer:
    """By the tokenizer's template, or plain where it has none."""
    return TemplateRenderer(tokenizer) if tokenizer.chat_template else PlainRenderer(tokenizer)


def prompt_tokens(tokenizer: Tokenizer, prompt: str | Sequence[dict[str, str]]) -> Array:
    """The tokens of a task's prompt, exactly as an episode's first turn sends them. [P] int32"""
    return renderer(tokenizer).begin(as_messages(prompt))


def conversation(tokenizer: Tokenizer, turns: Sequence[Turn]) -> tuple[Array, Array]:
    """A conversation that is known to its end, exactly as an episode would send it: tokens [T] int32, and which of them are
    replies [T] bool, the end token after each included."""
    render, end, before = renderer(tokenizer), tokenizer.eos_token_id, None
    pieces = list[Array]()
    for messages, reply in turns:
        pieces.append(render.begin(messages) if before is None else render.follow(before, end, messages))
        pieces.append(np.array([*tokenizer.encode(reply, add_special_tokens=False), end], np.int32))
        before = reply
    replied = np.repeat(np.arange(len(pieces)) % 2 == 1, [len(piece) for piece in pieces])
    return np.concatenate(pieces), replied


def check_prompts(tasks: Sequence[Task], tokenizer: Tokenizer, context: int) -> int:
    """The length of the longest prompt in tokens. Raises ConfigError when one leaves no room for a reply."""
    lengths = [len(prompt_tokens(tokenizer, task.prompt)) for task in tasks]
    longest = max(range(len(tasks)), key=lengths.__getitem__)
    if lengths[longest] >= context:
        raise ConfigError(too_long(lengths[longest], context, f"the prompt of task {tasks[longest].id}"))
    return lengths[longest]


def too_long(length: int, context: int, what: str) -> str:
    return f"{what} is {length} tokens, and the context holds {context}, reply included: shorten it or use a longer context"


def as_messages(message: str | Sequence[dict[str, str]]) -> Messages:
    messages = [{"role": "user", "content": message}] if isinstance(message, str) else [dict(m) for m in message]
    if not messages or any("role" not in m or "content" not in m for m in messages):
        raise ValueError(f"message {message!r:.80}: expected a text, or a list of messages with role and content")
    return messages


class TemplateRenderer:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._messages: Messages = []
        self._sent = ""

    def begin(self, messages: Messages) -> Array:
        self._messages, self._sent = messages, self._render(messages)
        return _encode(self._tokenizer, self._sent)

    def follow(self, reply: str, stop: int | None, messages: Messages) -> Array:
        every = [*self._messages, {"role": "assistant", "content": reply}, *messages]
        full = self._render(every)
        tail = self._after(full.removeprefix(self._sent), reply) if full.startswith(self._sent) else None
        if tail is None:
            raise TemplateRewritesHistory(
                f"the chat template of {self._tokenizer.name_or_path!r} rewrites history: with a further turn it renders "
                f"the turns before differently, so turn {self._turns(every)} cannot be appended to what was sampled; "
                "use a single turn, or a template that only appends"
            )
        if stop is not None:
            tail = tail.removeprefix(self._tokenizer.decode([stop], skip_special_tokens=False))
        self._messages, self._sent = every, full
        return _encode(self._tokenizer, tail)

    def _render(self, messages: Messages) -> str:
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            roles = ", ".join(m["role"] for m in messages)
            raise ConfigError(
                f"the chat template of {self._tokenizer.name_or_path!r} refuses roles {roles}: {error}"
            ) from None

    @staticmethod
    def _after(rest: str, reply: str) -> str | None:
        """What follows the reply; None where `rest` does not begin with it."""
        for kept in (reply, reply.rstrip(), reply.lstrip(), reply.strip()):
            if rest.startswith(kept):
                return rest.removeprefix(kept)
        return None

    @staticmethod
    def _turns(messages: Messages) -> int:
        return 1 + sum(m["role"] == "assistant" for m in messages)


class PlainRenderer:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def begin(self, messages: Messages) -> Array:
        tokens = _encode(self._tokenizer, _lines(messages))
        bos = self._tokenizer.bos_token_id
        if bos is not None and self._tokenizer.encode("", add_special_tokens=True)[:1] == [bos]:
            tokens = np.concatenate([np.array([bos], np.int32), tokens])
        return tokens

    def follow(self, reply: str, stop: int | None, messages: Messages) -> Array:
        return _encode(self._tokenizer, ("\n" if stop is None else "") + _lines(messages))


def _lines(messages: Messages) -> str:
    return "".join(f"{m['content']}\n" for m in messages)


def _encode(tokenizer: Tokenizer, text: str) -> Array:
    return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
