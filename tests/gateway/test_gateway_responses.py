"""OpenAI's client as the agent, by its Responses API: items, calls, streams, and conversations by their ids."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from gateway.recording_chat import RecordingChat, calling, said
from openai import AsyncOpenAI

from tidemill.core.constraints import JSON_OBJECT, json_schema, regex
from tidemill.core.types import Finish
from tidemill.gateway import stored_responses

TOOL = {
    "type": "function",
    "name": "look_up",
    "description": "Looks a word up.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    "strict": False,
}
OFFERED = {"type": "function", "function": {key: TOOL[key] for key in ("name", "description", "parameters")}}


async def test_a_text_and_instructions(client: AsyncOpenAI, chat: RecordingChat) -> None:
    reply = await client.responses.create(
        model="m",
        input="hello",
        instructions="be brief",
        max_output_tokens=5,
        temperature=0.1,
        reasoning={"effort": "low"},
        text={"verbosity": "low"},
    )
    assert reply.output_text == "to hello" and reply.status == "completed"
    assert chat.asked[0]["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert chat.asked[0]["max_tokens"] == 5
    assert reply.usage is not None
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.total_tokens) == (7, 8, 15)
    assert reply.usage.input_tokens_details.cached_tokens == 3


async def test_a_turn_of_thoughts_text_and_calls_comes_back_as_one_message(client: AsyncOpenAI, chat: RecordingChat) -> None:
    first = calling(("look_up", '{"word":  "a"}'), ("look_up", "{}"), content="I look.", reasoning="hm")
    chat.answer = lambda messages: first if messages[-1]["role"] == "user" else said("done")
    items: list[Any] = [
        {"role": "developer", "content": "brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
    ]
    reply = await client.responses.create(model="m", input=items, tools=[TOOL])
    assert [item.type for item in reply.output] == ["reasoning", "message", "function_call", "function_call"]
    calls = [item for item in reply.output if item.type == "function_call"]
    assert [(call.call_id, call.name, call.arguments) for call in calls] == [
        ("c00010000", "look_up", '{"word":  "a"}'),
        ("c00010001", "look_up", "{}"),
    ]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "x"} for call in calls]
    await client.responses.create(model="m", input=[*items, *reply.output, *results], tools=[TOOL])
    assert chat.asked[1]["messages"] == [
        {"role": "developer", "content": "brief"},
        {"role": "user", "content": "go"},
        first.message,
        *({"role": "tool", "tool_call_id": call.call_id, "content": "x"} for call in calls),
    ]
    assert [each["tools"] for each in chat.asked] == [[OFFERED], [OFFERED]]


async def test_a_conversation_goes_on_by_the_reply_id(
    client: AsyncOpenAI, chat: RecordingChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await client.responses.create(model="m", input="one", instructions="only now")
    second = await client.responses.create(model="m", input="two", previous_response_id=first.id)
    branch = await client.responses.create(model="m", input="three", previous_response_id=first.id)
    assert second.previous_response_id == branch.previous_response_id == first.id
    begun = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "to one"}]
    assert [each["messages"] for each in chat.asked[1:]] == [
        [*begun, {"role": "user", "content": text}] for text in ("two", "three")
    ]
    alone = await client.responses.create(model="m", input="four", store=False)
    monkeypatch.setattr(stored_responses, "MOST", 1)
    await client.responses.create(model="m", input="five")
    for gone in (alone.id, first.id, "resp_none"):
        with pytest.raises(openai.NotFoundError, match="send the whole conversation"):
            await client.responses.create(model="m", input="six", previous_response_id=gone)


@pytest.mark.parametrize(
    "answer",
    [
        said("some text"),
        said("cut", Finish.LENGTH),
        said(""),
        calling(("look_up", '{"word": "a"}'), ("look_up", "{"), content="so", reasoning="because"),
        calling(("look_up", "{}")),
    ],
    ids=["text", "cut", "empty", "all", "call"],
)
async def test_a_stream_says_the_same_as_a_reply(client: AsyncOpenAI, chat: RecordingChat, answer: Any) -> None:
    """The client's own accumulator reads the events; their numbers have no gap, and the deltas make up the items."""
    chat.answer = lambda messages: answer
    whole = await client.responses.create(model="m", input="hello", tools=[TOOL])
    async with client.responses.stream(model="m", input="hello", tools=[TOOL]) as stream:
        events = [event async for event in stream]
    streamed = events[-1].response if answer.finish is Finish.LENGTH else await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == ("response.incomplete" if answer.finish is Finish.LENGTH else "response.completed")
    told, meant = (json.loads(each.model_dump_json(warnings=False)) for each in (streamed, whole))

    def plain(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for item in output:
            item.pop("parsed_arguments", None)
            for part in item.get("content") or []:
                part.pop("parsed", None)
            item["id"] = item["id"][:3]
        return output

    assert plain(told["output"]) == plain(meant["output"]) and told["usage"] == meant["usage"]
    assert whole.status == streamed.status == ("incomplete" if answer.finish is Finish.LENGTH else "completed")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == (answer.message["content"] or "") == whole.output_text
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert arguments == [call["function"]["arguments"] for call in answer.message.get("tool_calls", [])]


async def test_a_schema_holds_the_reply(client: AsyncOpenAI, chat: RecordingChat) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    held = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}
    reply = await client.responses.create(model="m", input="a", text=held)
    assert chat.schemas == [json_schema(schema)] and reply.text is not None
    await client.responses.create(model="m", input="a", text={"format": {"type": "json_object"}, "verbosity": "low"})
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    hello: Any = [{"role": "user", "content": "a"}]
    await client.chat.completions.create(model="m", messages=hello, response_format=form)  # type: ignore[arg-type]
    await client.completions.create(model="m", prompt="a", extra_body={"guided_regex": "a+"})
    assert chat.schemas[1:] == [JSON_OBJECT, json_schema(schema), regex("a+")]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "content"),
        ({"input": [{"role": "user"}]}, "role and content"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "xml"}, "verbosity": "low"}}, "response_format"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"tool_choice": "required"}, "tools"),
        ({"extra_body": {"temprature": 1}}, "did you mean 'temperature'"),
    ],
)
async def test_what_cannot_be_done_is_refused(client: AsyncOpenAI, chat: RecordingChat, given: dict, told: str) -> None:
    with pytest.raises(openai.BadRequestError, match=told):
        await client.responses.create(**{"model": "m", "input": "a", **given})
    assert not chat.asked
