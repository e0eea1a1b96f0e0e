"""Bodies of very many parts: refused before they are decoded, and large ones are looked at beside the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from serving_cases import chat_model, make_engine

from tidemill.api_formats import body_decoding, parameters, requests
from tidemill.api_formats.body_decoding import HERE, LARGE, MOST_PARTS, MOST_VALUES, check_parts, read
from tidemill.api_formats.requests import MAX_BODY
from tidemill.core.errors import ApiError
from tidemill.engine.server import service as service_module
from tidemill.engine.server.app import make_app
from tidemill.engine.server.prompts import Prompts
from tidemill.engine.server.service import Service
from tidemill.run.storage.model_folder import ModelFolder

pytestmark = pytest.mark.runs

CONTEXT = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("chat"), CONTEXT)


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    model = ModelFolder.open(folder)
    service = Service(make_engine(folder), model.tokenizer, "m", context=CONTEXT, vocab=model.architecture.vocab)
    transport = httpx.ASGITransport(make_app(service, None))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as found:
        yield found
    await service.close()


def body(**more: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "ab", "max_tokens": 1} | more, separators=(",", ":")).encode()


def chat(messages: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, "max_tokens": 1}, separators=(",", ":")).encode()


def of(piece: bytes) -> bytes:
    """A body of as many of them as it may be long."""
    head, tail = b'{"model":"m","messages":[],"max_tokens":1,"prompt":[', b'"a"]}'
    return head + (piece + b",") * ((MAX_BODY - 100) // (len(piece) + 1)) + tail


MANY = [b"1", b"[1]", b"[]", b"{}", b'""', b'"\\""', b'"\\\\"', b'{"a":"b"}', b"[[[]]]", b'[1,"",{}]', b"null"]


@pytest.mark.parametrize("piece", MANY)
async def test_too_many_parts_are_refused_before_they_are_decoded(client: httpx.AsyncClient, piece: bytes, monkeypatch):
    monkeypatch.setattr(body_decoding, "json", SimpleNamespace(loads=lambda *_, **__: pytest.fail("it is decoded")))
    raw = of(piece)
    assert MAX_BODY - 200 < len(raw) <= MAX_BODY
    for path in ("v1/completions", "v1/chat/completions", "tokenize", "detokenize"):
        response = await client.post(path, content=raw)
        assert response.status_code == 413 and "send it as several requests" in response.json()["error"]["message"]


@settings(max_examples=200)
@given(
    tree=st.recursive(st.integers() | st.text(alphabet='\\"[]{},:aé\u2028', max_size=6) | st.none(),
                      lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('\\"[,a', max_size=3), inner)),
)  # fmt: skip
def test_what_stands_in_texts_is_not_counted(tree: Any):
    def parts(value: Any) -> int:
        if isinstance(value, list):
            return 1 + sum(map(parts, value))
        return 1 + sum(1 + parts(v) for v in value.values()) if isinstance(value, dict) else isinstance(value, str)

    with pytest.MonkeyPatch.context() as patch:
        for raw in (json.dumps(tree).encode(), json.dumps(tree, ensure_ascii=False).encode()):
            patch.setattr(body_decoding, "MOST_PARTS", parts(tree))
            check_parts(raw)
            patch.setattr(body_decoding, "MOST_PARTS", parts(tree) - 1)
            with pytest.raises(ApiError, match="too many parts"):
                check_parts(raw)


def test_as_much_as_may_be_is_decoded():
    assert len(read(body(prompt=[7] * (MOST_VALUES - 10)))["prompt"]) == MOST_VALUES - 10
    assert len(read(body(prompt=[[1]] * (MOST_PARTS - 20)))["prompt"]) == MOST_PARTS - 20
    for text in ("[1]," * 2_000_000, '"' * 4_000_000, "\\" * 4_000_000, "[" * 8_000_000):
        assert read(body(prompt=text))["prompt"] == text


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from([r"\ud83d", r"\uDE00", r"\\", r"\\uD83D", "u", r"\"", "a", r"\uD800", r"\udfff"]), max_size=7)
)
def test_half_pairs_are_refused_wherever_they_stand(pieces: list[str]):
    raw = f'{{"a": "{"".join(pieces)}"}}'
    try:
        json.loads(raw)["a"].encode()
    except UnicodeError:
        with pytest.raises(ApiError, match="half surrogate"):
            read(raw.encode())
    else:
        assert read(raw.encode()) == json.loads(raw)


TOO_MUCH: dict[str, tuple[str, bytes, str]] = {
    "ids": ("v1/completions", body(prompt=[1] * 100_000), "prompt is 100000 tokens, and the context holds 256"),
    "one of the rows": ("v1/completions", body(prompt=[[1], [1] * 9000]), r"prompt[1] is 9000 tokens"),
    "rows": ("v1/completions", body(prompt=[[1]] * 100_000), "100000 prompts times n = 1: expected at most 1024"),
    "texts": ("v1/completions", body(prompt=["a"] * 100_000), "100000 prompts times n = 1: expected at most 1024"),
    "bias": ("v1/completions", body(logit_bias={str(i): "x" for i in range(9000)}), "logit_bias has 9000 tokens"),
    "unknown": ("v1/completions", body(**{f"k{i}": i for i in range(9000)}), "unknown parameter 'k0'"),
    "no messages": ("v1/chat/completions", chat([1] * 100_000), "messages[0] = 1"),
    "empty messages": ("v1/chat/completions", chat([{}] * 100_000), "messages[0].role"),
    "messages": ("v1/chat/completions", chat([{"role": "user", "content": "a"}] * 20_000), "the context holds 256"),
    "fractions": ("detokenize", json.dumps({"tokens": [0.5] * 500_000}).encode(), "tokens[0] = 0.5"),
    "too many ids": ("detokenize", json.dumps({"tokens": [5] * 500_000}).encode(), "tokens: 500000 tokens, expected"),
}


@pytest.mark.parametrize("case", TOO_MUCH)
async def test_what_is_too_much_is_told_of_the_first_fault(client: httpx.AsyncClient, case: str):
    path, raw, told = TOO_MUCH[case]
    response = await client.post(path, content=raw)
    assert response.status_code == 400 and told in response.json()["error"]["message"], response.text[:300]
    assert len(response.content) < 1000


def test_only_one_fault_is_described():
    """There may be a million of them, and to describe these takes seconds."""
    for kind, tree in (
        (requests.DetokenizeBody, {"tokens": [0.5] * 9}),
        (requests.ChatBody, {"model": "m", "messages": [1] * 9}),
        (requests.CompletionBody, {"model": "m", "prompt": "a"} | {f"k{i}": i for i in range(9)}),
    ):
        with pytest.raises(ApiError) as told:
            parameters.validated(kind, tree)
        assert isinstance(told.value.__context__, ValidationError) and told.value.__context__.error_count() == 1


@pytest.mark.parametrize("path", ["v1/completions", "v1/chat/completions", "tokenize", "detokenize"])
@pytest.mark.parametrize("size", [10, HERE * 2])
async def test_a_large_body_is_looked_at_beside_the_loop(client: httpx.AsyncClient, path: str, size: int, monkeypatch):
    threads = list[int]()

    def seen(work: Any) -> Any:
        def wrapped(*given: Any, **more: Any) -> Any:
            threads.append(threading.get_ident())
            return work(*given, **more)

        return wrapped

    for kind in (requests.CompletionBody, requests.ChatBody, requests.TokenizeBody, requests.DetokenizeBody):
        monkeypatch.setattr(kind, "model_validate", seen(kind.model_validate))
    monkeypatch.setattr(body_decoding, "json", SimpleNamespace(loads=seen(json.loads)))
    given = {
        "detokenize": {"tokens": [5] * size},
        "v1/chat/completions": {"messages": [{"role": "user", "content": "a" * size}]},
    }
    await client.post(path, content=json.dumps({"model": "m"} | given.get(path, {"prompt": "a" * size})).encode())
    assert len(threads) == 2
    assert (set(threads) == {threading.get_ident()}) == (size < HERE)


async def test_others_are_served_between_two_prompts(client: httpx.AsyncClient, folder: Path, monkeypatch):
    """Each of them is short enough to be tokenized on the loop, all of them together are not."""
    turns = list[int]()
    work = asyncio.ensure_future(client.post("v1/completions", content=body(prompt=["ab"] * 200, max_tokens=0, echo=True)))
    of_text, turn = Prompts.of_text, 0

    async def counted(self: Prompts, *given: Any, **more: Any) -> Any:
        turns.append(turn)
        return await of_text(self, *given, **more)

    monkeypatch.setattr(Prompts, "of_text", counted)
    while not work.done():
        await asyncio.sleep(0)
        turn += 1
    assert work.result().status_code == 200 and len(turns) == 200 and len(set(turns)) == 200


@pytest.mark.parametrize(
    "more",
    [{}, {"echo": True, "logprobs": 1}, {"echo": True, "max_tokens": 0}, {"stop": ["zq"]}, {"n": 3}, {"prompt": ["a", "b"]}],
)
async def test_what_waits_for_a_slow_client_is_bounded_by_its_request(folder: Path, more: dict[str, Any], monkeypatch):
    waited = list[asyncio.Queue[Any]]()

    class Watched(asyncio.Queue[Any]):
        peak = 0

        def _put(self, item: Any) -> None:
            super()._put(item)
            self.peak = max(self.peak, self.qsize())

    def made(maxsize: int = 0) -> Any:
        waited.append(Watched(maxsize))
        return waited[-1]

    model = ModelFolder.open(folder)
    service = Service(make_engine(folder), model.tokenizer, "m", context=CONTEXT, vocab=model.architecture.vocab)
    letter = {str(model.tokenizer.encode("a")[0]): 100}  # each token is a piece
    try:
        prepared = await service.completion(
            body(**{"prompt": "the tide", "max_tokens": 30, "logit_bias": letter, "stream": True} | more)
        )
        pumps, create = list[Any](), asyncio.create_task

        def kept(work: Any) -> Any:
            pumps.append(create(work))
            return pumps[-1]

        with monkeypatch.context() as patch:
            patch.setattr(service_module, "asyncio", SimpleNamespace(**vars(asyncio) | {"Queue": made, "create_task": kept}))
            events = service.events(prepared)
            first = await anext(events)
            await asyncio.wait(pumps)  # the client reads nothing meanwhile
            rest = [event async for event in events]
    finally:
        await service.close()
    assert first or rest
    (queue,) = waited
    assert 0 < queue.maxsize < 3 * 40 and len(prepared.asked) <= queue.peak <= queue.maxsize


async def test_the_memory_of_a_large_body_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    returned = asyncio.Event()
    monkeypatch.setattr(body_decoding, "return_free_memory", returned.set)
    monkeypatch.setattr(body_decoding, "RETURN_S", 0)
    await body_decoding.beside(b"a" * (LARGE - 1), len, b"")
    await asyncio.sleep(0.01)
    assert not returned.is_set()
    with pytest.raises(ApiError):
        await body_decoding.beside(b"a" * LARGE, read, b"[]")
    await asyncio.wait_for(returned.wait(), 10)
