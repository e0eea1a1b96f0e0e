"""The process that tokenizes prompts and renders chats, for `prompt_reader`.

    LoadTokenizer, then Text | ChatToRender -> Tokens | PromptRefused

Start it with `python -m tidemill.engine.server.reader_process MEMORY_MB PARENT`. A chat template comes from the model's
folder and may loop for ever; a text may take a minute and a gigabyte. So each request is done by a fork of this process with
a memory limit, which is killed when it is late. A fork that stayed small serves the next request, too; one that grew is
ended, and its memory goes back to the system.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import jinja2
import msgspec
import numpy as np
import psutil

from tidemill.core import serialization
from tidemill.core.errors import ConfigError
from tidemill.core.types import Array
from tidemill.models.chat_template import Tools, arguments_form, with_arguments, with_known_roles
from tidemill.models.conversations import prompt_tokens
from tidemill.models.token_bounds import Reach, reach_of
from tidemill.models.tokenizer import Tokenizer, load_tokenizer
from tidemill.models.tool_calls import takes_tools, told
from tidemill.runtime.workers import serve_calls, worker_setup
from tidemill.runtime.workers.worker_setup import Channel

MOST_REPLY = 64 << 20  # bytes
MEMORY_MB = 1024  # memory that one request may take
GROWN_MB = 16  # a fork that has grown by more is not used again


class LoadTokenizer(msgspec.Struct, frozen=True, tag=True):
    """First message: the tokenizer to load, and the limits."""

    folder: str
    of_class: str | None
    context: int
    limit_s: float  # seconds of one request


class Text(msgspec.Struct, frozen=True, tag=True):
    """Request to tokenize a text."""

    text: str
    special: bool  # the tokenizer adds its special tokens
    bounded: bool  # refuse what the context cannot hold


class ChatToRender(msgspec.Struct, frozen=True, tag=True):
    """Request to render and tokenize a chat."""

    messages: list[dict[str, Any]]
    options: dict[str, Any]  # further names for the template
    tools: list[dict[str, Any]] = []  # that it offers


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """Reply with the tokens."""

    tokens: np.ndarray  # [P] int32


class PromptRefused(msgspec.Struct, frozen=True, tag=True):
    """Reply that a request cannot be done, with the reason."""

    why: str
    too_long: bool = False


Request = Text | ChatToRender
Chat = Sequence[Mapping[str, Any]]
Reply = Tokens | PromptRefused


def too_long(what: str, least: int, context: int) -> str:
    return (
        f"{what} is at least {least} tokens, and the context holds {context}, reply included: shorten it, "
        "or serve the model with a longer context"
    )


class ReaderFork:
    """A copy of this process that answers requests until it is late or ended."""

    def __init__(self, answer: Callable[[Request], Reply]) -> None:
        self._socket, theirs = socket.socketpair()
        parent = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            self._socket.close()
            _be_fork(theirs, answer, parent)
        theirs.close()
        self._replies, self._requests = self._socket.makefile("rb"), self._socket.makefile("wb", buffering=0)

    def ask(self, frame: bytes, limit_s: float) -> Reply:
        """Answer a request. Raises TimeoutError, or EOFError or OSError when the fork has ended."""
        self._socket.settimeout(limit_s)
        worker_setup.write(self._requests, frame)
        if not (reply := worker_setup.read(self._replies)):
            raise EOFError
        return serialization.decode(reply, Reply)

    def grown(self) -> bool:
        held = psutil.Process().memory_info().rss + (GROWN_MB << 20)
        return psutil.Process(self._pid).memory_info().rss > held

    def end(self) -> None:
        self._socket.close()
        os.kill(self._pid, signal.SIGKILL)


class ReaderHandler:
    """`worker_setup.Handler` of this process."""

    requests, notes = LoadTokenizer | Request, None
    _answer: Callable[[Request], Reply]
    _limit_s: float
    _fork: ReaderFork | None = None

    def load(self, request: LoadTokenizer | Request) -> None:
        if isinstance(request, LoadTokenizer):
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks need not be reaped
            try:
                tokenizer = load_tokenizer(request.folder, request.of_class)
            except ValueError as error:
                raise ConfigError(str(error)) from None
            self._answer = partial(answer, tokenizer, reach_of(tokenizer), request.context)
            self._limit_s = request.limit_s

    def call(self, request: LoadTokenizer | Request, channel: Channel) -> Reply | None:
        if isinstance(request, LoadTokenizer):
            return None
        self._fork = self._fork or ReaderFork(self._answer)
        reply, self._fork = _reply(self._fork, serialization.encode(request), self._limit_s)
        return reply


def answer(tokenizer: Tokenizer, reach: Reach | None, context: int, request: Request) -> Reply:
    if isinstance(request, Text):
        if request.bounded and reach is not None and reach.exceeds(request.text, context):
            return PromptRefused(too_long("the prompt", reach.least(request.text), context), too_long=True)
        return Tokens(np.array(tokenizer.encode(request.text, add_special_tokens=request.special), np.int32))
    try:
        if reach is not None and tokenizer.chat_template and reach.exceeds(_texts(request.messages), context):
            # A template may leave out most of a long chat. Only the rendered text must fit the context.
            text = rendered(tokenizer, request.messages, request.options, request.tools)
            if reach.exceeds(text, context):
                return PromptRefused(too_long("the chat", reach.least(text), context), too_long=True)
        return Tokens(chat_tokens(tokenizer, request.messages, request.options, request.tools))
    except ValueError as error:  # the template's own message
        return PromptRefused(str(error))
    except Exception as error:  # a template may produce anything
        return PromptRefused(f"the chat cannot be tokenized: {type(error).__name__}: {error!s:.500}")


def chat_tokens(tokenizer: Tokenizer, messages: Chat, options: Mapping[str, Any], tools: Tools = ()) -> Array:
    """The tokens of a chat, ready for the reply: [P] int32, as from `apply_chat_template`.

    options: further names for the template. Raises ValueError with the template's own message where it fails.
    """
    if not tokenizer.chat_template:
        return prompt_tokens(tokenizer, [dict(message) for message in messages], tools)
    text = rendered(tokenizer, messages, options, tools)
    return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)


def rendered(tokenizer: Tokenizer, messages: Chat, options: Mapping[str, Any], tools: Tools = ()) -> str:
    """The text of a chat.

    If the template has no developer role, its messages become the system's. If it takes no tools, they are told in the
    system's message, as in training.
    """
    given = [*with_known_roles(tokenizer, [with_arguments(message, arguments_form) for message in messages])]
    tries = [(given, {**options, "tools": list(tools)} if tools else options)]
    if tools and not takes_tools(tokenizer):
        tries = [(told(given, tools), options), (told(given, tools, system=False), options)]
    elif any(message.get("tool_calls") for message in given):
        tries.append(([dict(message) for message in messages], tries[0][1]))  # some templates take arguments as text
    for chat, names in tries[:-1]:
        with suppress(Exception):
            return _render(tokenizer, chat, names)
    try:
        return _render(tokenizer, *tries[-1])
    except jinja2.TemplateError as error:
        roles = ", ".join(message["role"] for message in given[:20])
        raise ValueError(f"the chat template refuses roles {roles:.200}: {error!s:.500}") from None
    except Exception as error:  # a template may raise anything: it is a program that came with the model
        raise ValueError(f"the chat template failed: {type(error).__name__}: {error!s:.500}") from None


def _render(tokenizer: Tokenizer, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **options})


def _reply(fork: ReaderFork, frame: bytes, limit_s: float) -> tuple[Reply, ReaderFork | None]:
    try:
        reply = fork.ask(frame, limit_s)
        if not fork.grown():
            return reply, fork
    except TimeoutError:
        reply = PromptRefused(f"it could not be rendered and tokenized within {limit_s:g} s: shorten it")
    except (EOFError, OSError, psutil.NoSuchProcess):
        reply = PromptRefused(f"rendering and tokenizing it took more than {MEMORY_MB} MB, or crashed: shorten it")
    fork.end()
    return reply, None


def _be_fork(channel: socket.socket, answer: Callable[[Request], Reply], parent: int) -> None:
    """Serve requests in the fork. Never returns, because the caller belongs to the parent process."""
    try:
        worker_setup.die_with(parent)
        if sys.platform == "linux":
            limit = psutil.Process().memory_info().vms + (MEMORY_MB << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        requests, replies = channel.makefile("rb"), channel.makefile("wb", buffering=0)
        while frame := worker_setup.read(requests):
            worker_setup.write(replies, serialization.encode(answer(serialization.decode(frame, Request))))
    finally:
        os._exit(0)


def _texts(messages: list[dict[str, Any]]) -> str:
    return "".join(text for message in messages for text in message.values() if isinstance(text, str))


if __name__ == "__main__":
    serve_calls.serve(ReaderHandler(), MOST_REPLY, forks=True)
