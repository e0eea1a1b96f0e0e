"""Prompts and chats that take too long, too much memory, or are too long: refused, and the next one is served."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from serving_cases import byte_tokenizer

from tidemill.core.errors import ApiError
from tidemill.engine.server import prompt_reader
from tidemill.engine.server.prompt_reader import SHORT, Reader
from tidemill.models.conversations import prompt_tokens
from tidemill.models.tokenizer import load_tokenizer

CONTEXT = 1 << 16
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BIG = "{% set n = 1100000000 %}{{ 'a' * n }}"
BAD = {
    "loop": (LOOP, "could not be rendered and tokenized within 1 s"),
    "memory": (BIG, "took more than 1024 MB|MemoryError"),
    "huge": ("{{ 'abcdefgh' * 200000 }}", "tokens, and the context holds 65536|more than 1024 MB|within 1 s"),
    "range": ("{% for i in range(10 ** 9) %}{% endfor %}", "the chat template failed: OverflowError"),
    "type": ("{{ 1 + 'a' }}", "the chat template failed: TypeError"),
    "zero": ("{{ 1 / 0 }}", "the chat template failed: ZeroDivisionError"),
    "refused": ("{{ raise_exception('not these roles') }}", "not these roles"),
    "sandbox": ("{{ ''.__class__.__mro__ }}", "refuses roles|the chat template failed"),
}


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def resident() -> list[int]:
    """Resident megabytes of each process below this one that still lives."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(process.memory_info().rss >> 20)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose template does what the first message names."""
    tokenizer, folder = byte_tokenizer(), tmp_path_factory.mktemp("reading")
    cases = "".join(f"{{% elif messages[0].content.startswith('{name}:') %}}{code}" for name, (code, _) in BAD.items())
    last = "{% elif messages[0].content.startswith('last:') %}{{ messages[-1].content }}"
    tokenizer.chat_template = f"{{% if false %}}{cases}{last}{{% else %}}{tokenizer.chat_template}{{% endif %}}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(params=[None])
async def reader(request: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Reader]:
    """Its parameter: a limit in seconds."""
    monkeypatch.setattr(prompt_reader, "LIMIT_S", request.param or prompt_reader.LIMIT_S)
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    reader = Reader(load_tokenizer(folder, "TokenizersBackend"), CONTEXT)
    yield reader
    await reader.close()
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before, "nothing is left"


async def refused(reader: Reader, messages: list[dict[str, str]], **more: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await reader.chat(messages, **more)
    return caught.value


@pytest.mark.parametrize("reader", [1.0], indirect=True)
async def test_a_template_that_misbehaves_is_a_400_and_the_next_chat_is_rendered(reader: Reader) -> None:
    good, tokenizer = said("hello"), reader._tokenizer
    for name, (_, words) in BAD.items():
        error = await refused(reader, said(f"{name}:"))
        assert error.status == 400 and error.param == "messages", name
        assert any(word in str(error) for word in words.split("|")), f"{name}: {error}"
        np.testing.assert_array_equal(await reader.chat(good), prompt_tokens(tokenizer, good))


async def test_what_is_long_keeps_nobody_waiting_and_no_memory(reader: Reader) -> None:
    short, text = said("hello"), "the tide " * 40_000
    await reader.chat(short)
    forks = psutil.Process(*reader._short.pool.pids).children()
    await reader.chat(short)
    assert psutil.Process(*reader._short.pool.pids).children() == forks and len(forks) == 1, "what behaved stays"
    held = sum(resident())
    late = asyncio.ensure_future(refused(reader, said("loop:" + "a" * SHORT)))
    for _ in range(3):
        await reader.chat(short)
        assert not late.done(), "the short one was answered while the long one looped"
    while not (pids := reader._long.pool.pids) or not psutil.Process(*pids).children():
        await asyncio.sleep(0.01)
    os.kill(pids[0], signal.SIGKILL)  # sooner than at its limit
    assert (await late).status == 503
    assert len(await reader.chat(said(text))) > len(text), "not provably too long: it has to be tokenized to know"
    assert sum(resident()) < held + 100, "a second process, and nothing of what it did"


async def test_lengths_are_bounded_before_anything_is_tokenized(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a" * 8_000_000
    monkeypatch.setattr(reader, "_ask", None)  # no process is asked
    with pytest.raises(ApiError, match=r"at least \d+ tokens, and the context holds 65536") as caught:
        await reader.text(text)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    monkeypatch.undo()
    error = await refused(reader, said(text))
    assert error.code == "context_length_exceeded" and "at least" in str(error)
    assert len(await reader.chat([*said("last:" + text), *said("ab")])) == 2, "what a template leaves out does not count"


@pytest.mark.parametrize("reader", [1.0], indirect=True)
async def test_turns_and_ends(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are the tokenizer's; a process that was killed is replaced; who waits too long is told so."""
    for text in ("", "tide", "a" * prompt_reader.HERE, "tide\n" * prompt_reader.HERE):
        np.testing.assert_array_equal(await reader.text(text), reader._tokenizer.encode(text))
    first, pids = await reader.chat(said("hello")), reader._short.pool.pids
    os.kill(pids[0], signal.SIGKILL)
    np.testing.assert_array_equal(await reader.chat(said("hello")), first)
    assert reader._short.pool.pids != pids

    monkeypatch.setattr(prompt_reader, "QUEUE_S", 0.05)
    late = asyncio.ensure_future(refused(reader, said("loop:")))
    while not reader._short._turn.locked():
        await asyncio.sleep(0)
    assert (await refused(reader, said("hello"))).status == 503
    late.cancel()  # its client leaves; the turn comes back all the same
    monkeypatch.setattr(prompt_reader, "QUEUE_S", 30.0)
    np.testing.assert_array_equal(await reader.chat(said("hello")), first)


async def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.name_or_path = str(tmp_path)
    other = Reader(tokenizer, CONTEXT)
    try:
        error = await refused(other, said("hello"))
        assert error.status == 503 and "no tokenizer there" in str(error)
    finally:
        await other.close()
