"""Tools, `/v1/responses` and `/v1/messages` of the server: prompts as transformers renders them, replies as they read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving_cases import CHATML, Running, chat_model

from tidemill.api_formats.replies import TextPiece
from tidemill.engine.server import service
from tidemill.engine.server.choices import Asked
from tidemill.models.tool_calls import told

pytestmark = pytest.mark.runs

HERMES = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}{# </think> #}"
)
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks.", "parameters": SCHEMA}}
FLAT = {"type": "function", "strict": None} | TOOL["function"]
ANTHROPIC = {"name": "look_up", "description": "Looks.", "input_schema": SCHEMA}
HELLO = [{"role": "user", "content": "hello"}]
CALL = '<tool_call>{"name": "look_up", "arguments": {"word": "tide"}}</tool_call>'


def post(url: str, **given: Any) -> httpx.Response:
    return httpx.post(url, timeout=60, **given)


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model whose template takes tools and opens thoughts."""
    folder = chat_model(tmp_path_factory.mktemp("tools") / "hermes", context=2048)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": HERMES}))
    for each in folder.glob("*.jinja"):
        each.write_text(HERMES)
    with Running(folder) as running:
        yield running


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The text of every reply, in pieces of three characters. `asked` holds the requests."""
    script: dict[str, Any] = {"text": "", "finish": "stop", "asked": [], "stop": None}

    async def sample(engine: Any, vocabulary: Any, asked: Asked, clock: Any, *, live: bool) -> AsyncIterator[TextPiece]:
        script["asked"].append(asked)
        text = script["text"]
        for i in range(0, len(text), 3):
            yield TextPiece(text[i : i + 3])
        yield TextPiece("", finish=script["finish"], sampled=len(text), stop=script["stop"])

    monkeypatch.setattr(service, "sample", sample)
    return script


def test_prompts_with_tools_are_those_of_transformers(hermes: Running, chats: Running) -> None:
    call = {"id": "c00001000", "type": "function", "function": {"name": "look_up", "arguments": '{"word":  "tide"}'}}
    history = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c00001000", "content": "rise"},
    ]
    parsed = json.loads(json.dumps(history))
    parsed[1]["tool_calls"][0]["function"]["arguments"] = {"word": "tide"}  # as templates take them
    for messages, meant in ((HELLO, HELLO), (history, parsed)):
        reply = post(f"{hermes.url}/tokenize", json={"messages": messages, "tools": [TOOL]})
        expected = hermes.tokenizer.apply_chat_template(meant, tools=[TOOL], add_generation_prompt=True)["input_ids"]
        assert reply.json()["tokens"] == expected
    alone = post(f"{hermes.url}/tokenize", json={"messages": HELLO, "tools": [TOOL], "tool_choice": "none"})
    assert alone.json()["tokens"] == hermes.tokenizer.apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]
    untold = post(f"{chats.url}/tokenize", json={"messages": HELLO, "tools": [TOOL]})  # its template takes none
    assert "tools" not in CHATML.partition("raise")[0]
    expected = chats.tokenizer.apply_chat_template(told(HELLO, [TOOL]), add_generation_prompt=True)["input_ids"]
    assert untold.json()["tokens"] == expected


def test_calls_are_read_whole_and_streamed(hermes: Running, says: dict[str, Any]) -> None:
    says["text"] = f"I think.\n</think>\n\nI look. {CALL}{CALL.replace('tide', 'mill')}"
    asked: dict[str, Any] = {"model": hermes.name, "messages": HELLO, "tools": [TOOL]}
    choice = hermes.client.chat.completions.create(**asked).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert choice.message.model_extra == {"reasoning_content": "I think."}
    calls = [(call.id, call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or []]
    assert [call[1:] for call in calls] == [("look_up", {"word": "tide"}), ("look_up", {"word": "mill"})]
    assert len({call[0] for call in calls}) == 2
    assert says["asked"][0].shown, "a special token may begin a call"
    with hermes.client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    assert (streamed.finish_reason, streamed.message.content) == ("tool_calls", "I look.")
    assert [(c.id, c.function.name, json.loads(c.function.arguments)) for c in streamed.message.tool_calls or []] == calls
    two = hermes.client.chat.completions.create(**asked, n=2, stream=True)
    finishes = [chunk.choices[0].finish_reason for chunk in two]
    assert finishes.count("tool_calls") == 2


def test_without_tools_a_chat_is_its_text(hermes: Running, says: dict[str, Any]) -> None:
    says["text"] = f"I think.\n</think>\n\n{CALL}"
    for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        choice = hermes.client.chat.completions.create(model=hermes.name, messages=HELLO, **more).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("stop", says["text"])


def test_a_call_that_cannot_be_read_stays_text(hermes: Running, says: dict[str, Any]) -> None:
    says["text"] = "</think><tool_call>{not json</tool_call>"
    choice = hermes.client.chat.completions.create(model=hermes.name, messages=HELLO, tools=[TOOL]).choices[0]
    assert choice.finish_reason == "stop" and not choice.message.tool_calls
    assert "not json" in (choice.message.content or "")


def test_responses(hermes: Running, says: dict[str, Any]) -> None:
    says["text"] = f"hm</think>so {CALL}"
    asked: dict[str, Any] = {
        "model": hermes.name,
        "input": "hello",
        "instructions": "brief",
        "tools": [FLAT],
        "temperature": 0,
    }
    reply = hermes.client.responses.create(**asked)
    assert [item.type for item in reply.output] == ["reasoning", "message", "function_call"]
    assert reply.output_text == "so" and reply.store is False and reply.usage is not None
    messages = [{"role": "system", "content": "brief"}, *HELLO]
    expected = hermes.tokenizer.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True)["input_ids"]
    assert says["asked"][0].tokens.tolist() == expected and says["asked"][0].params.temperature == 0
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(expected), len(says["text"]))
    with hermes.client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_response()
    assert [item.type for item in streamed.output] == ["reasoning", "message", "function_call"]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    held = {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}, "tools": []}
    again = hermes.client.responses.create(**asked | held)
    assert says["asked"][-1].constraint is not None and again.text is not None
    assert again.text.model_dump(by_alias=True)["format"]["schema"] == schema
    for given in (
        {"previous_response_id": "resp_1"},
        {"text": {"verbosity": "low"}},
        {"reasoning": {"effort": "high"}},
    ):
        with pytest.raises(openai.BadRequestError, match=next(iter(given))):
            hermes.client.responses.create(**asked | given)


@pytest.mark.parametrize(
    ("path", "tool", "choices"),
    [
        ("chat/completions", TOOL, ["required", {"type": "function", "function": {"name": "look_up"}}]),
        ("responses", FLAT, ["required", {"type": "function", "name": "look_up"}]),
        ("messages", ANTHROPIC, [{"type": "any"}, {"type": "tool", "name": "look_up"}]),
    ],
)
def test_a_call_that_is_asked_for_counts_as_auto(
    hermes: Running, says: dict[str, Any], path: str, tool: Any, choices: list[Any]
) -> None:
    """As in the gateway, so that an agent is served as it was trained: the prompt is the same, and a text is a reply."""
    says["text"] = "</think>no call"
    body = {"model": hermes.name, "tools": [tool], "max_tokens": 50, "messages": HELLO}
    if path == "responses":
        body = {"model": hermes.name, "tools": [tool], "input": "hello"}
    for choice in choices:
        reply = post(f"{hermes.url}/v1/{path}", json=body | {"tool_choice": choice})
        assert reply.status_code == 200 and "no call" in reply.text, reply.text
    expected = hermes.tokenizer.apply_chat_template(HELLO, tools=[TOOL], add_generation_prompt=True)["input_ids"]
    assert [each.tokens.tolist() for each in says["asked"]] == [expected] * len(choices)


@pytest.mark.parametrize("path", ["responses", "messages"])
def test_text_alone_is_streamed_as_it_comes(chats: Running, says: dict[str, Any], path: str) -> None:
    """Where a template knows no thoughts, and no tools are offered, nothing waits for the end."""
    says |= {"text": "some words here", "finish": "length"}
    body: dict[str, Any] = {"model": chats.name, "stream": True}
    body |= {"input": "hello"} if path == "responses" else {"messages": HELLO, "max_tokens": 5}
    raw = post(f"{chats.url}/v1/{path}", json=body).text
    events = [json.loads(line.removeprefix("data: ")) for line in raw.split("\n") if line.startswith("data: ")]
    assert [f"event: {event['type']}" for event in events] == [line for line in raw.split("\n") if line.startswith("event")]
    deltas = [event["delta"] for event in events if event["type"] in ("response.output_text.delta", "content_block_delta")]
    assert "".join(delta if isinstance(delta, str) else delta["text"] for delta in deltas) == says["text"]
    assert len(deltas) == 5 and "DONE" not in raw
    end = events[-1] if path == "responses" else events[-2]
    assert end["response"]["status"] == "incomplete" if path == "responses" else end["delta"]["stop_reason"] == "max_tokens"
    whole = post(f"{chats.url}/v1/{path}", json=body | {"stream": False}).json()
    content = whole["output"][0]["content"] if path == "responses" else whole["content"]
    assert content[0]["text"] == says["text"]


def test_messages(hermes: Running, says: dict[str, Any]) -> None:
    says["text"] = f"hm</think>so {CALL}"
    body = {"model": hermes.name, "messages": HELLO, "max_tokens": 50, "tools": [ANTHROPIC], "top_k": 3}
    told_ = post(f"{hermes.url}/v1/messages", json=body).json()
    assert [block["type"] for block in told_["content"]] == ["thinking", "text", "tool_use"]
    assert told_["stop_reason"] == "tool_use" and told_["content"][2]["input"] == {"word": "tide"}
    asked = says["asked"][0]
    expected = hermes.tokenizer.apply_chat_template(HELLO, tools=[TOOL], add_generation_prompt=True)["input_ids"]
    assert asked.tokens.tolist() == expected and (asked.params.top_k, asked.params.max_tokens) == (3, 50)
    counted = post(f"{hermes.url}/v1/messages/count_tokens", json={k: body[k] for k in ("model", "messages", "tools")})
    assert counted.json() == {"input_tokens": len(expected)} and told_["usage"]["input_tokens"] == len(expected)
    says |= {"text": "</think>one", "stop": "END"}
    stopped = post(f"{hermes.url}/v1/messages", json=body | {"stop_sequences": ["END"]}).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "END")
    wrong = post(f"{hermes.url}/v1/messages", json=body | {"model": "other"})
    assert wrong.status_code == 404 and wrong.json()["error"]["type"] == "not_found_error"


def test_a_stop_string_is_named_as_it_was_asked_for(chats: Running) -> None:
    """By the real engine: the first byte that it samples stops it."""
    body = {"model": chats.name, "messages": HELLO, "max_tokens": 30, "temperature": 0.0}
    whole = post(f"{chats.url}/v1/messages", json=body).json()
    text = whole["content"][0]["text"]
    stop = text[len(text) // 2 :][:2]
    cut = post(f"{chats.url}/v1/messages", json=body | {"stop_sequences": [stop]}).json()
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", stop)
    assert "".join(block["text"] for block in cut["content"]) == text[: text.index(stop)]


def test_keys_of_both_kinds_are_taken(tmp_path: Path) -> None:
    with Running(chat_model(tmp_path / "model"), api_key="secret") as running:
        body = {"model": running.name, "messages": HELLO, "max_tokens": 2}
        for headers, status in (({"x-api-key": "secret"}, 200), ({"authorization": "Bearer secret"}, 200), ({}, 401)):
            assert post(f"{running.url}/v1/messages", json=body, headers=headers).status_code == status
        refused = post(f"{running.url}/v1/messages", json=body, headers={"x-api-key": "wrong"}).json()
        assert refused["type"] == "error" and refused["error"]["type"] == "authentication_error"
