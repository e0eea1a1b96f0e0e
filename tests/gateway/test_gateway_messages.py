"""Anthropic's API at a gateway: by plain HTTP always, and by Anthropic's client where it is installed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from gateway.recording_chat import RecordingChat, calling, said

from tidemill.core.constraints import json_schema
from tidemill.core.errors import ContextFull, EpisodeOver
from tidemill.core.reply import Reply
from tidemill.core.types import Finish
from tidemill.gateway.gateway import Gateway

PATH = "/v1/messages"
BODY = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
TOOL = {"name": "look_up", "description": "Looks a word up.", "input_schema": {"type": "object", "properties": {}}}
OFFERED = {
    "type": "function",
    "function": {"name": "look_up", "description": "Looks a word up.", "parameters": TOOL["input_schema"]},
}


@pytest.fixture
async def plain(model: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"x-api-key": model.key, "anthropic-version": "2023-06-01"}
    async with httpx.AsyncClient(base_url=model.anthropic_url, headers=headers, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture
async def client(model: Gateway) -> AsyncIterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    async with anthropic.AsyncAnthropic(base_url=model.anthropic_url, api_key=model.key, max_retries=0) as client:
        yield client


async def test_a_message_reaches_the_chat(plain: httpx.AsyncClient, chat: RecordingChat) -> None:
    told = (
        await plain.post(
            PATH,
            json=BODY
            | {
                "system": "be brief",
                "temperature": 0.1,
                "thinking": {"type": "adaptive"},
                "output_config": {"effort": "low"},
            },
        )
    ).json()
    assert chat.asked == [
        {
            "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
            "tools": [],
            "max_tokens": 9,
        }
    ]
    assert told.pop("id").startswith("msg_")
    assert told == {
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [{"type": "text", "text": "to hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 4, "output_tokens": 8, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 0},
    }


async def test_blocks_become_messages(plain: httpx.AsyncClient, chat: RecordingChat) -> None:
    first = calling(("look_up", '{"word":  "a"}'), ("look_up", "[1]"), content="I look.", reasoning="hm")
    chat.answer = lambda messages: first
    system = [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "two"}]
    body = BODY | {"system": system, "tools": [TOOL], "tool_choice": {"type": "auto"}}
    told = (await plain.post(PATH, json=body)).json()
    assert told["stop_reason"] == "tool_use"
    assert told["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "c00010000", "name": "look_up", "input": {"word": "a"}},
        {"type": "tool_use", "id": "c00010001", "name": "look_up", "input": {"arguments": "[1]"}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "c00010000", "content": [{"type": "text", "text": "x"}]},
        {"type": "tool_result", "tool_use_id": "c00010001", "is_error": True, "content": "no"},
        {"type": "text", "text": "go"},
        {"type": "text", "text": "on"},
    ]
    history = [*BODY["messages"], {"role": "assistant", "content": told["content"]}, {"role": "user", "content": results}]
    await plain.post(PATH, json=body | {"messages": history})
    system_message, user, reply, *rest = chat.asked[1]["messages"]
    assert [system_message, user] == [{"role": "system", "content": "one\n\ntwo"}, {"role": "user", "content": "hello"}]
    assert reply | {"tool_calls": None} == first.message | {"tool_calls": None}
    calls = [(each["id"], json.loads(each["function"]["arguments"])) for each in reply["tool_calls"]]
    assert calls == [("c00010000", {"word": "a"}), ("c00010001", {"arguments": "[1]"})]
    assert rest == [
        {"role": "tool", "tool_call_id": "c00010000", "content": "x"},
        {"role": "tool", "tool_call_id": "c00010001", "content": "no"},
        {"role": "user", "content": "go\non"},
    ]
    assert [each["tools"] for each in chat.asked] == [[OFFERED], [OFFERED]]


def events_of(raw: str) -> list[dict[str, Any]]:
    found = []
    for event in raw.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


ANSWERS = {
    "text": said("some text"),
    "cut": said("cut", Finish.LENGTH),
    "empty": said(""),
    "all": calling(("look_up", '{"word": "a"}'), ("look_up", "{}"), content="so", reasoning="because"),
    "call": calling(("look_up", "{}")),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
async def test_the_events_of_a_stream_make_up_the_message(
    plain: httpx.AsyncClient, chat: RecordingChat, answer: Reply
) -> None:
    chat.answer = lambda messages: answer
    whole = (await plain.post(PATH, json=BODY | {"tools": [TOOL]})).json()
    events = events_of((await plain.post(PATH, json=BODY | {"tools": [TOOL], "stream": True})).text)
    assert events[0]["type"] == "message_start" and [each["type"] for each in events[-2:]] == [
        "message_delta",
        "message_stop",
    ]
    message, raw = events[0]["message"], dict[int, str]()
    for event in events[1:]:
        match event:
            case {"type": "content_block_start"}:
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": part}}:
                raw[event["index"]] = raw.get(event["index"], "") + part
            case {"type": "content_block_delta", "delta": delta}:
                for key in ("text", "thinking", "signature"):
                    message["content"][event["index"]] |= {key: delta[key]} if key in delta else {}
            case {"type": "message_delta"}:
                message |= event["delta"] | {"usage": event["usage"]}
    for index, text in raw.items():
        message["content"][index]["input"] = json.loads(text)
    assert message | {"id": ""} == whole | {"id": ""}


async def test_a_schema_holds_the_reply(plain: httpx.AsyncClient, chat: RecordingChat) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    held = {"output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}}
    assert (await plain.post(PATH, json=BODY | held)).status_code == 200
    assert chat.schemas == [json_schema(schema)]


async def test_stop_sequences_are_told(plain: httpx.AsyncClient, chat: RecordingChat) -> None:
    chat.answer = lambda messages: said("a END b")
    told = (await plain.post(PATH, json=BODY | {"stop_sequences": [" END", "b"]})).json()
    assert (told["content"][0]["text"], told["stop_reason"], told["stop_sequence"]) == ("a", "stop_sequence", " END")


@pytest.mark.parametrize(
    ("given", "status", "kind", "told"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "'max_tokens' is required"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "content"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, 400, "invalid_request_error", "tool_use"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, 400, "invalid_request_error", "tools[0].type"),
        ({"tool_choice": {"type": "tool", "name": "other"}, "tools": [TOOL]}, 400, "invalid_request_error", "other"),
        ({"output_config": {"format": {"type": "xml"}}}, 400, "invalid_request_error", "output_config.format.type"),
        ({"mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error", "mcp_servers"),
    ],
)
async def test_refusals_are_in_anthropics_form(
    plain: httpx.AsyncClient, chat: RecordingChat, given: dict[str, Any], status: int, kind: str, told: str
) -> None:
    refused = await plain.post(PATH, json=BODY | given)
    body = refused.json()
    assert (refused.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert told in body["error"]["message"] and not chat.asked


async def test_the_end_of_the_context_and_of_the_episode_are_told(plain: httpx.AsyncClient, chat: RecordingChat) -> None:
    chat.answer = lambda messages: ContextFull(Finish.CONTEXT, "the conversation is 99 tokens")
    full = await plain.post(PATH, json=BODY)
    assert full.status_code == 400
    assert full.json()["error"]["message"] == "prompt is too long: the conversation is 99 tokens"
    chat.answer = lambda messages: EpisodeOver(Finish.CANCELLED, "the episode was cancelled")
    assert (await plain.post(PATH, json=BODY)).status_code == 410
    plain.headers["x-api-key"] = "wrong"
    wrong = await plain.post(PATH, json=BODY)
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")


async def test_anthropics_client_is_an_agent(client: Any, chat: RecordingChat) -> None:
    import anthropic

    reply = await client.messages.create(**BODY)
    assert reply.content[0].text == "to hello"
    first = calling(("look_up", '{"word": "a"}'), content="so", reasoning="because")
    chat.answer = lambda messages: first if messages[-1]["role"] == "user" else said("done")
    async with client.messages.stream(**BODY, tools=[TOOL]) as stream:
        streamed = await stream.get_final_message()
    assert [block.type for block in streamed.content] == ["thinking", "text", "tool_use"]
    assert streamed.content[2].input == {"word": "a"} and streamed.stop_reason == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": streamed.content[2].id, "content": "x"}]
    history = [*BODY["messages"], {"role": "assistant", "content": streamed.content}, {"role": "user", "content": results}]
    done = await client.messages.create(**BODY | {"messages": history}, tools=[TOOL])
    assert done.content[0].text == "done" and chat.asked[-1]["messages"][1] == first.message
    with pytest.raises(anthropic.BadRequestError, match="mcp_servers"):
        await client.messages.create(**BODY, extra_body={"mcp_servers": [{"url": "x"}]})
    other = client.with_options(api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError, match="no episode has this API key"):
        await other.messages.create(**BODY)
