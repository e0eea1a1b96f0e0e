"""Whatever is sent: a reply or a clear refusal in OpenAI's format, never a failure; and the server goes on."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_cases import Running

from tidemill.core.errors import ConfigError
from tidemill.web_server import exchange
from tidemill.web_server.http_server import address_of, bind

pytestmark = pytest.mark.runs

HELLO = [{"role": "user", "content": "hello"}]


def post(running: Running, path: str, **more: Any) -> httpx.Response:
    return httpx.post(f"{running.url}/v1/{path}", timeout=30, **more)


REFUSED: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "unknown model": ("completions", {"model": "gpt-9"}, 404, "gpt-9"),
    "misspelt": ("completions", {"temprature": 1}, 400, "did you mean 'temperature'"),
    "wrong type": ("completions", {"max_tokens": "many"}, 400, "max_tokens = 'many'"),
    "a truth is no number": ("completions", {"n": True}, 400, "n = True"),
    "range": ("completions", {"temperature": -1}, 400, "temperature = -1"),
    "nearly greedy": ("completions", {"temperature": 1e-30}, 400, "greedy"),
    "top_p": ("completions", {"top_p": 0}, 400, "top_p = 0"),
    "huge": ("completions", {"n": 10**400}, 400, "n = 1000"),
    "n": ("completions", {"n": 0}, 400, "n = 0"),
    "many choices": ("completions", {"prompt": ["a"] * 100, "n": 100}, 400, "choices"),
    "nothing to do": ("completions", {"max_tokens": 0}, 400, "max_tokens = 0"),
    "penalty": ("completions", {"presence_penalty": 2.5}, 400, "presence_penalty = 2.5"),
    "repetition": ("completions", {"repetition_penalty": 0}, 400, "repetition_penalty = 0"),
    "least": ("completions", {"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens = 9"),
    "least of a chat": ("chat/completions", {"min_tokens": 9, "max_completion_tokens": 8}, 400, "min_tokens = 9"),
    "stop id": ("completions", {"stop_token_ids": [259]}, 400, "stop_token_ids: token id 259"),
    "beam search": ("completions", {"use_beam_search": True}, 400, "use_beam_search"),
    "own template": ("chat/completions", {"chat_template": "a"}, 400, "chat_template"),
    "template in disguise": ("chat/completions", {"chat_template_kwargs": {"chat_template": "a"}}, 400, "chat_template"),
    "not tokenized": ("chat/completions", {"chat_template_kwargs": {"tokenize": True}}, 400, "tokenize"),
    "both ends": ("chat/completions", {"continue_final_message": True}, 400, "continue_final_message"),
    "suffix": ("completions", {"suffix": "end"}, 400, "suffix"),
    "best of": ("completions", {"best_of": 3}, 400, "best_of = 3"),
    "bias": ("completions", {"logit_bias": {"5": 101}}, 400, "logit_bias"),
    "bias of a word": ("completions", {"logit_bias": {"five": 1}}, 400, "logit_bias: expected token ids"),
    "bias of nothing": ("completions", {"logit_bias": {"259": 1}}, 400, "logit_bias: token id 259"),
    "logprobs": ("completions", {"logprobs": 21}, 400, "logprobs = 21"),
    "empty stop": ("completions", {"stop": ""}, 400, "stop"),
    "stop types": ("completions", {"stop": [1]}, 400, "stop"),
    "stream options": ("completions", {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    "prompt type": ("completions", {"prompt": {"a": 1}}, 400, "prompt = an object"),
    "no prompt": ("completions", {"prompt": None}, 400, "'prompt' is required"),
    "mixed prompt": ("completions", {"prompt": ["a", 1]}, 400, "prompt"),
    "empty prompt": ("completions", {"prompt": ""}, 400, "no tokens"),
    "token id": ("completions", {"prompt": [5, 10**30]}, 400, "this model knows 0 to"),
    "negative id": ("completions", {"prompt": [-1]}, 400, "token id -1"),
    "long prompt": ("completions", {"prompt": "a" * 300}, 400, "300 tokens, and the context holds 256"),
    "full prompt": ("completions", {"prompt": "a" * 256}, 400, "context"),
    "one of two": ("completions", {"prompt": ["a", "a" * 300]}, 400, "300 tokens"),
    "half a pair": ("completions", {"prompt": "\ud800"}, 400, "Unicode"),
    "tools": ("chat/completions", {"tools": [{"type": "function"}]}, 400, "tools"),
    "json mode": ("chat/completions", {"response_format": {"type": "json"}}, 400, "response_format"),
    "alternatives": ("chat/completions", {"top_logprobs": 2}, 400, "logprobs to true"),
    "limits": ("chat/completions", {"max_tokens": 2, "max_completion_tokens": 3}, 400, "differ"),
    "no messages": ("chat/completions", {"messages": []}, 400, "messages"),
    "role": ("chat/completions", {"messages": [{"role": "robot", "content": "a"}]}, 400, "role = 'robot'"),
    "content": ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    "image": ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content"),
    "calls": ("chat/completions", {"messages": [HELLO[0] | {"tool_calls": [{}]}]}, 400, "tool_calls"),
    "the template": ("chat/completions", {"messages": [{"role": "tool", "content": "a"}]}, 400, "no tools here"),
    "long chat": ("chat/completions", {"messages": [{"role": "user", "content": "a" * 300}]}, 400, "context"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_reason(chats: Running, case: str) -> None:
    path, change, status, words = REFUSED[case]
    body = {"model": chats.name} | ({"prompt": "a"} if path == "completions" else {"messages": HELLO}) | change
    for stream in ({}, {"stream": True}):
        if stream and case == "stream options":
            continue
        response = post(chats, path, content=json.dumps(body | stream))
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert words in error["message"] and error["type"] and set(error) == {"message", "type", "param", "code"}


def test_what_changes_nothing_is_accepted(chats: Running) -> None:
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "best_of": 2,
        "n": 2,
        "user": "me",
        "suffix": None,
        "stop": None,
        "temperature": None,
        "stream_options": None,
    }
    assert post(chats, "completions", json={"model": chats.name, "prompt": "a"} | neutral).status_code == 200
    message = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None}
    neutral = {"tools": [], "response_format": {"type": "text"}, "store": False, "max_tokens": 4}
    body = {"model": chats.name, "messages": [*HELLO, message, *HELLO]} | neutral
    assert post(chats, "chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[1]", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b"9" * 5000, b'"\\ud800"']
)
def test_bodies_that_are_no_object(chats: Running, raw: bytes) -> None:
    response = post(chats, "completions", content=raw)
    assert response.status_code == 400 and response.json()["error"]["message"].startswith("the body is")


def test_a_body_is_bounded(chats: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_BODY", 1 << 10)
    body = json.dumps({"model": chats.name, "prompt": "a" * 2000}).encode()
    for content in (body, iter([body[:600], body[600:]])):  # its length announced, and in chunks
        response = post(chats, "completions", content=content)
        assert response.status_code == 413 and "larger than" in response.json()["error"]["message"]
    assert post(chats, "completions", content=b"{", headers={"content-length": "1"}).status_code == 400


def test_paths_and_methods(chats: Running) -> None:
    for method, path, status in (
        ("GET", "v1/completions", 405),
        ("POST", "v1/embeddings", 404),
        ("GET", "v1/models/x", 404),
    ):
        response = httpx.request(method, f"{chats.url}/{path}")
        assert response.status_code == status and response.json()["error"]["message"]
    with pytest.raises(openai.NotFoundError, match="not served here"):
        chats.client.models.retrieve("nothing/like/it")
    with pytest.raises(openai.BadRequestError, match="context holds 256"):
        chats.client.completions.create(model=chats.name, prompt="a" * 999)


def test_the_key(chats: Running) -> None:
    with Running(chats.folder, api_key="sesame") as running:
        assert running.client.models.list().data[0].id == running.name
        for given in ("", "Bearer wrong", "sesame", "Bearer sesam", "Bearer sesame1"):
            response = httpx.get(f"{running.url}/v1/models", headers={"authorization": given} if given else {})
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            running.openai("wrong").completions.create(model=running.name, prompt="a")


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:80"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"host": ""},
        {"host": "[::1"},
        {"host": "localhost.evil.example"},
        {"host": "10.0.0.1"},
        {"origin": "http://127.0.0.1@evil.example"},
    ],
)
def test_pages_of_other_sites(chats: Running, headers: dict[str, str]) -> None:
    """A browser would send these for them, to a server without a key; with one, they would lack it."""
    response = post(chats, "completions", json={"model": chats.name, "prompt": "a"}, headers=headers)
    assert response.status_code == 403 and "is not this machine" in response.json()["error"]["message"]
    with Running(chats.folder, api_key="sesame") as running:
        allowed = httpx.get(f"{running.url}/v1/models", headers={"authorization": "Bearer sesame"} | headers)
        assert allowed.status_code == 200


@pytest.mark.parametrize("headers", [{"host": "localhost:1"}, {"host": "[::1]:8"}, {"origin": "http://localhost:3000"}])
def test_pages_of_this_machine(chats: Running, headers: dict[str, str]) -> None:
    assert httpx.get(f"{chats.url}/v1/models", headers=headers).status_code == 200


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**25, -1, 0, 1, 2**63]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
likely = {
    "prompt": st.text(max_size=20) | st.lists(st.integers(0, 258), min_size=1, max_size=9) | st.just(["a", "b"]),
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "x"]), "content": st.text()}), max_size=3
    ),
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 3),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 300),
    "min_p": st.floats(0, 1),
    "seed": st.integers(),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True}),
    "logprobs": st.integers(0, 5) | st.booleans(),
    "top_logprobs": st.integers(0, 5),
    "echo": st.booleans(),
    "ignore_eos": st.booleans(),
}


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    keys = draw(st.lists(st.sampled_from(sorted(likely)), unique=True, max_size=7))
    body = {key: draw(likely[key]) for key in {*keys, draw(st.sampled_from(["prompt", "messages"]))}}
    for key in draw(st.lists(st.sampled_from([*sorted(likely), "model", "extra"]), max_size=draw(st.integers(0, 2)))):
        body[key] = draw(junk)
    return {"model": "bytes", "max_tokens": draw(st.integers(0, 6))} | body


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(body=bodies(), path=st.sampled_from(["completions", "chat/completions"]))
def test_no_body_makes_it_fail(chats: Running, body: dict[str, Any], path: str) -> None:
    response = CLIENT.post(f"{chats.url}/v1/{path}", content=json.dumps(body))
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]
    elif body.get("stream") is True:
        assert response.text.endswith("data: [DONE]\n\n") and '"error"' not in response.text


CLIENT = httpx.Client(timeout=30)


def test_addresses() -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    with taken, pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
        bind("127.0.0.1", port, api_key=None)
    with pytest.raises(ConfigError, match="give a key"):
        bind("0.0.0.0", 0, api_key=None)
    with pytest.raises(ConfigError, match="not an address"):
        bind("no such host", 0, api_key=None)
    with bind("0.0.0.0", 0, api_key="k") as sock:
        assert sock.getsockname()[1]
    with bind("localhost", 0, api_key=None) as sock:
        assert address_of(sock).startswith("http://127.0.0.1:")
