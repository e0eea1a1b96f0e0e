"""OpenAI's own client as the agent of an episode: chats, streams, tools and completions."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from gateway.recording_chat import HELLO, TOOL, RecordingChat, calling, said
from openai import AsyncOpenAI, BadRequestError

from tidemill import ToolSet
from tidemill.core.errors import ContextFull, EpisodeOver
from tidemill.core.reply import Reply
from tidemill.core.types import Finish
from tidemill.gateway.gateway import Gateway, serve_chat


async def test_a_conversation_reaches_the_chat_as_it_was_written(client: AsyncOpenAI, chat: RecordingChat) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}], "name": "ada"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"},
    ]
    reply = await client.chat.completions.create(
        model="gpt-whatever", messages=messages, temperature=0.3, top_p=0.5, seed=7, max_completion_tokens=11
    )
    assert chat.asked == [
        {
            "messages": [*messages[:2], {"role": "user", "content": "one two", "name": "ada"}, *messages[3:]],
            "tools": [],
            "max_tokens": 11,
        }
    ]
    choice = reply.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "to four", "stop")
    assert choice.message.tool_calls is None
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (7, 7, 14)
    assert reply.usage.prompt_tokens_details.cached_tokens == 3


async def test_tools_of_a_set_are_offered_as_they_are(client: AsyncOpenAI, chat: RecordingChat) -> None:
    """Schemas of transformers have a `return`, which templates may show."""

    def high(place: str) -> int:
        """Tell how high the tide is.

        Args:
            place: Where.

        Returns:
            The height in metres.
        """
        return len(place)

    schemas: Any = ToolSet([high]).schemas
    assert schemas[0]["function"]["return"]
    await client.chat.completions.create(model="m", messages=HELLO, tools=schemas)
    assert chat.asked[0]["tools"] == schemas
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"a": deep}
    schemas[0]["function"]["return"] = deep
    with pytest.raises(BadRequestError, match="nested more than"):
        await client.chat.completions.create(model="m", messages=HELLO, tools=schemas)
    schemas[0]["function"] |= {"return": None, "bogus": 1}
    with pytest.raises(BadRequestError, match=r"function\.bogus is not supported"):
        await client.chat.completions.create(model="m", messages=HELLO, tools=schemas)


@pytest.mark.parametrize("content", [None, "I look it up."])
async def test_tools_are_offered_called_and_answered(client: AsyncOpenAI, chat: RecordingChat, content: str | None) -> None:
    said_first = calling(("look_up", '{"word":  "tide"}'), ("look_up", "{not json"), content=content, reasoning="hm")
    chat.answer = lambda messages: said("high") if messages[-1]["role"] == "tool" else said_first
    reply = await client.chat.completions.create(model="m", messages=HELLO, tools=[TOOL], parallel_tool_calls=True)
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == content
    assert [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or []] == [
        ("c00010000", "look_up", '{"word":  "tide"}'),
        ("c00010001", "look_up", "{not json"),
    ]
    assert choice.message.model_extra and choice.message.model_extra["reasoning_content"] == "hm"
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rise"} for call in choice.message.tool_calls or []]
    history = [*HELLO, choice.message.model_dump(exclude_none=True), *results]
    again = await client.chat.completions.create(model="m", messages=history, tools=[TOOL], tool_choice="auto")
    assert again.choices[0].message.content == "high"
    assert [each["tools"] for each in chat.asked] == [[TOOL], [TOOL]]
    assert chat.asked[1]["messages"] == [*HELLO, said_first.message, *results]


async def test_a_call_that_cannot_be_read_is_shown_to_the_agent(
    client: AsyncOpenAI, chat: RecordingChat, model: Gateway
) -> None:
    broken = Reply(
        "<tool_call>{</tool_call>", {"role": "assistant", "content": ""}, Finish.STOP, tokens=3, faults=("no JSON",)
    )
    chat.answer = lambda messages: broken
    reply = await client.chat.completions.create(model="m", messages=HELLO, tools=[TOOL])
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (broken.text, "stop")
    assert model.counts["faults"] == 1


async def test_a_choice_of_no_tool_offers_none(client: AsyncOpenAI, chat: RecordingChat) -> None:
    await client.chat.completions.create(model="m", messages=HELLO, tools=[TOOL], tool_choice="none")
    named = {"type": "function", "function": {"name": "look_up"}}
    await client.chat.completions.create(model="m", messages=HELLO, tools=[TOOL], tool_choice=named)
    assert [each["tools"] for each in chat.asked] == [[], [TOOL]]


async def test_a_stream_says_the_same_as_a_reply(client: AsyncOpenAI, chat: RecordingChat) -> None:
    """The client's own accumulator puts the deltas together."""
    for answer in (
        said("some text"),
        calling(("look_up", '{"word": "a"}'), ("look_up", "{}"), content="so", reasoning="because"),
    ):
        chat.answer = lambda messages, answer=answer: answer
        asked = {"model": "m", "messages": HELLO, "tools": [TOOL]}
        whole = await client.chat.completions.create(**asked)
        async with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_completion()
        told, meant = (reply.choices[0].model_dump(exclude_none=True) for reply in (streamed, whole))
        for each in (told, meant):
            for call in each["message"].get("tool_calls", []):
                call.pop("index", None)
                call["function"].pop("parsed_arguments", None)
        assert told == meant
        assert streamed.usage == whole.usage


async def test_a_stream_tells_that_its_reply_was_cut_off(client: AsyncOpenAI, chat: RecordingChat) -> None:
    chat.answer = lambda messages: said("cut off", Finish.LENGTH)
    stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "cut off"
    assert [chunk.finish_reason for chunk in chunks][-1] == "length"


async def test_several_choices_are_several_replies(client: AsyncOpenAI, chat: RecordingChat) -> None:
    numbers = iter("abc")
    chat.answer = lambda messages: said(next(numbers))
    reply = await client.chat.completions.create(model="m", messages=HELLO, n=3)
    assert [choice.message.content for choice in reply.choices] == ["a", "b", "c"]
    assert reply.usage is not None and (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (7, 3)


async def test_a_reply_is_cut_at_a_stop_string(client: AsyncOpenAI, chat: RecordingChat) -> None:
    chat.answer = lambda messages: said("Thought: go\nObservation: made up. Final", Finish.LENGTH)
    reply = await client.chat.completions.create(model="m", messages=HELLO, stop=["Final", "\nObservation"])
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("Thought: go", "stop")


async def test_completions_are_conversations_of_one_message(client: AsyncOpenAI, chat: RecordingChat) -> None:
    reply = await client.completions.create(model="m", prompt=["one", "two"], max_tokens=5)
    assert [choice.text for choice in reply.choices] == ["to one", "to two"]
    assert [each["messages"] for each in chat.asked] == [[{"role": "user", "content": text}] for text in ("one", "two")]
    stream = await client.completions.create(model="m", prompt="three", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "to three"


async def test_models_are_listed(client: AsyncOpenAI, model: Gateway) -> None:
    assert [each.id for each in (await client.models.list()).data] == [model.model]


@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [
        (ContextFull(Finish.CONTEXT, "the conversation is 99 tokens"), 400, "context_length_exceeded"),
        (EpisodeOver(Finish.CANCELLED, "the episode was cancelled"), 410, "episode_over"),
        (ValueError("the message is too long"), 400, None),
    ],
)
async def test_the_agent_reads_why_there_is_no_reply(
    client: AsyncOpenAI, chat: RecordingChat, model: Gateway, raised: Exception, status: int, code: str | None
) -> None:
    chat.answer = lambda messages: raised
    with pytest.raises(openai.APIStatusError, match=str(raised)) as refused:
        await client.chat.completions.create(model="m", messages=HELLO)
    assert (refused.value.status_code, refused.value.code) == (status, code)
    assert model.failure is None and model.counts["refused"] == 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"logprobs": True}, "logprobs is not available to an agent"),
        ({"extra_body": {"return_token_ids": True}}, "return_token_ids is not available"),
        ({"extra_body": {"temprature": 1}}, "did you mean 'temperature'"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}, "tools": [TOOL]}, "'other'"),
        ({"tool_choice": "required"}, "without tools"),
        ({"max_tokens": 0}, "max_tokens = 0"),
    ],
)
async def test_what_cannot_be_done_is_refused(client: AsyncOpenAI, chat: RecordingChat, given: dict, told: str) -> None:
    with pytest.raises(openai.BadRequestError, match=told):
        await client.chat.completions.create(model="m", messages=HELLO, **given)
    assert not chat.asked


async def test_a_failing_engine_ends_the_episode_and_not_by_the_agents_fault(chat: RecordingChat) -> None:
    chat.answer = lambda messages: RuntimeError("the engine burns")
    with pytest.raises(RuntimeError, match="burns"):
        async with serve_chat(chat) as model, AsyncOpenAI(base_url=model.url, api_key=model.key, timeout=60) as client:
            with pytest.raises(openai.InternalServerError, match="burns"):
                await client.chat.completions.create(model="m", messages=HELLO)
            assert model.failing.done() and str(model.failure) == "the engine burns"
    assert len(chat.asked) == 1  # a library does not try again
