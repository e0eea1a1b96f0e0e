"""OpenAI's own client."""

from __future__ import annotations

import asyncio

from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from trials import KEY, MODEL, URL, trial

client = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60)
HELLO = [{"role": "user", "content": "Spell tide backward."}]


@trial("models: list and retrieve")
def _() -> None:
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@trial("completions: logprobs, echo, streamed = whole")
def _() -> None:
    asked = {"model": MODEL, "prompt": "The tide", "max_tokens": 24, "seed": 7, "logprobs": 3}
    whole = client.completions.create(**asked, echo=True).choices[0]
    assert whole.text.startswith("The tide") and len(whole.logprobs.tokens) == len(whole.logprobs.text_offset)
    alone = client.completions.create(**asked).choices[0]
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(pieces) == alone.text and whole.text.removeprefix("The tide") == alone.text


@trial("chat: whole, streamed with usage, logprobs, n, developer")
def _() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *HELLO]
    asked = {"model": MODEL, "messages": messages, "max_completion_tokens": 24, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert len(whole.choices) == 2 and whole.usage.completion_tokens <= 48
    for choice in whole.choices:
        joined = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
        assert joined.decode("utf-8", "replace") == choice.message.content
    texts, usage = ["", ""], None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices] and usage == whole.usage


@trial("chat without max_tokens ends")
def _() -> None:
    reply = client.chat.completions.create(model=MODEL, messages=HELLO, extra_body={"ignore_eos": True})
    assert reply.choices[0].finish_reason == "length" and reply.usage.total_tokens < 1000


@trial("vLLM's extras: min_tokens, stop_token_ids, penalties, bias, token ids")
def _() -> None:
    extra = {
        "min_tokens": 8,
        "stop_token_ids": [5],
        "repetition_penalty": 1.2,
        "return_token_ids": True,
        "use_beam_search": False,
    }
    reply = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=16,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={"9": -100},
        tool_choice="none",
        extra_body=extra,
    )
    ids = reply.choices[0].model_extra["token_ids"]
    assert 8 <= len(ids) == reply.usage.completion_tokens <= 16 and 9 not in ids
    assert len(reply.model_extra["prompt_token_ids"]) == reply.usage.prompt_tokens


@trial("AsyncOpenAI: 32 at a time")
def _() -> None:
    async def ask() -> None:
        async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60) as many:
            calls = (many.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=16, seed=i) for i in range(32))
            assert len(await asyncio.gather(*calls)) == 32

    asyncio.run(ask())


@trial("errors are the client's own classes")
def _() -> None:
    for kind, asked in (
        (BadRequestError, {"model": MODEL, "messages": HELLO, "top_p": 0}),
        (NotFoundError, {"model": "other", "messages": HELLO}),
    ):
        try:
            client.chat.completions.create(**asked)
        except kind as error:
            assert error.body["message"]
        else:
            raise AssertionError(f"no {kind.__name__}")
