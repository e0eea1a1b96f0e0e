"""The unmodified `openai` client against a running server: what it gets is what the engine says."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import numpy as np
import pytest
from serving_cases import Running, generate, score

from tidemill.api_formats.vocabulary import BROKEN
from tidemill.core.seeding import derive_seed
from tidemill.core.types import SamplingParams
from tidemill.models.conversations import prompt_tokens


def complete(running: Running, prompt: Any = "the tide", **more: Any) -> Any:
    return running.client.completions.create(model=running.name, prompt=prompt, **{"max_tokens": 12, "seed": 5, **more})


def chat(running: Running, content: Any = "hello", **more: Any) -> Any:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    asked = {"max_completion_tokens": 24, "seed": 5, **more}
    return running.client.chat.completions.create(model=running.name, messages=messages, **asked)


def part_of(running: Running, token: int) -> int:
    """The byte of a token of a byte-level vocabulary."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letter = running.tokenizer.convert_ids_to_tokens(int(token))
    return next(byte for byte, other in bytes_to_unicode().items() if other == letter)


def streamed(chunks: Any) -> tuple[dict[int, str], dict[int, str], list[Any]]:
    """(texts, finish reasons, all chunks) of a stream, by choice."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    every = list(chunks)
    for chunk in every:
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content or ""
            assert choice.index not in reasons, "a choice goes on after its end"
            texts[choice.index] = texts.get(choice.index, "") + text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, every


def test_models(characters: Running) -> None:
    assert [m.id for m in characters.client.models.list()] == [characters.name]
    assert characters.client.models.retrieve(characters.name).owned_by == "tidemill"


@pytest.mark.parametrize("logprobs", [None, 0, 3])
@pytest.mark.parametrize("temperature", [0, 0.7, 1.0])
def test_completion_is_the_engines(chats: Running, temperature: float, logprobs: int | None) -> None:
    reply = complete(chats, temperature=temperature, top_p=0.9, logprobs=logprobs, extra_body={"top_k": 50, "min_p": 0.01})
    tokens = chats.tokenizer.encode("the tide", add_special_tokens=True)
    params = SamplingParams(
        temperature=temperature,
        top_p=0.9,
        top_k=50,
        min_p=0.01,
        max_tokens=12,
        seed=derive_seed(5, "choice", 0),
        top_logprobs=logprobs or 0,
    )
    expected = generate(chats.folder, tokens, params)
    choice = reply.choices[0]
    assert choice.text == chats.tokenizer.decode(expected.tokens, skip_special_tokens=True)
    assert reply.usage.prompt_tokens == len(tokens) and reply.usage.completion_tokens == len(expected.tokens)
    assert choice.finish_reason == ("stop" if expected.tokens[-1] == 2 else "length")
    if logprobs is None:
        assert choice.logprobs is None
        return
    names = choice.logprobs.tokens
    for token, name in zip(expected.tokens, names, strict=True):
        shown = chats.tokenizer.decode([token])
        assert name == (f"bytes:\\x{part_of(chats, token):02x}" if BROKEN in shown else shown)
    np.testing.assert_allclose(choice.logprobs.token_logprobs, expected.extras["model_logprobs"], atol=1e-5)
    for i, (name, found) in enumerate(zip(names, choice.logprobs.top_logprobs, strict=True)):
        assert found[name] == choice.logprobs.token_logprobs[i]
        if logprobs:
            assert max(found.values()) == pytest.approx(float(expected.top_logprobs[i, 0]), abs=1e-5)


def test_chat_is_the_engines(chats: Running, characters: Running) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "good "}, {"type": "text", "text": "tide"}]},
    ]
    plain = [messages[0], {"role": "user", "content": "good tide"}]
    for running in (chats, characters):
        reply = chat(running, messages, logprobs=True, top_logprobs=2, temperature=0.8)
        tokens = prompt_tokens(running.tokenizer, plain)
        params = SamplingParams(temperature=0.8, max_tokens=24, seed=derive_seed(5, "choice", 0), top_logprobs=2)
        expected = generate(running.folder, tokens, params)
        message, entries = reply.choices[0].message, reply.choices[0].logprobs.content
        assert message.role == "assistant"
        assert message.content == running.tokenizer.decode(expected.tokens, skip_special_tokens=True)
        assert reply.usage.prompt_tokens == len(tokens)
        np.testing.assert_allclose([e.logprob for e in entries], expected.extras["model_logprobs"], atol=1e-5)
        tops = [[t.logprob for t in e.top_logprobs] for e in entries]
        np.testing.assert_allclose(tops, expected.top_logprobs, atol=1e-5)
        assert b"".join(bytes(e.bytes) for e in entries).decode("utf-8", "replace") == message.content
    assert "<|im_start|>user\ngood tide<|im_end|>" in chats.tokenizer.decode(prompt_tokens(chats.tokenizer, plain))


def test_every_form_of_a_prompt(characters: Running) -> None:
    row = characters.tokenizer.encode("the tide")
    other = characters.tokenizer.encode("a mill")
    text = complete(characters).choices[0].text
    assert complete(characters, row).choices[0].text == text
    second = complete(characters, other).choices[0].text
    for both in (["the tide", "a mill"], [row, other]):
        reply = complete(characters, both, n=2, logprobs=0)
        assert [c.index for c in reply.choices] == [0, 1, 2, 3]
        assert [reply.choices[0].text, reply.choices[2].text] == [text, second]
        assert len({c.text for c in reply.choices}) == 4
        assert reply.usage.prompt_tokens == len(row) + len(other)
        assert reply.usage.completion_tokens == sum(len(c.logprobs.tokens) for c in reply.choices)


def test_a_seed_repeats_and_another_does_not(characters: Running) -> None:
    first, again, other, free, free2 = (
        [c.text for c in complete(characters, n=3, seed=seed).choices] for seed in (7, 7, -8, None, None)
    )
    assert first == again and first != other and free != free2
    greedy = {complete(characters, temperature=0, seed=seed).choices[0].text for seed in (1, 2)}
    assert len(greedy) == 1


def test_echo_scores_the_prompt(characters: Running) -> None:
    tokens = characters.tokenizer.encode("the tide")
    expected = score(characters.folder, tokens, 2)
    alone = complete(characters, max_tokens=0, echo=True, logprobs=2)
    assert alone.choices[0].text == "the tide" and alone.usage.completion_tokens == 0
    logprobs = alone.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    np.testing.assert_allclose(logprobs.token_logprobs[1:], expected.logprobs[1:], atol=1e-5)
    assert logprobs.text_offset == list(range(8)) and "".join(logprobs.tokens) == "the tide"
    longer = complete(characters, echo=True, logprobs=2).choices[0]
    reply = complete(characters, logprobs=2).choices[0]
    assert longer.text == "the tide" + reply.text
    assert longer.logprobs.token_logprobs == logprobs.token_logprobs + reply.logprobs.token_logprobs
    assert longer.logprobs.text_offset == logprobs.text_offset + [8 + at for at in reply.logprobs.text_offset]
    texts, reasons, chunks = streamed(complete(characters, tokens, echo=True, stream=True, logprobs=2))
    assert texts[0] == longer.text and reasons == {0: "length"}
    assert [at for c in chunks for at in c.choices[0].logprobs.text_offset] == longer.logprobs.text_offset
    texts, reasons, _ = streamed(complete(characters, echo=True, stream=True, max_tokens=0))
    assert texts == {0: "the tide"} and reasons == {0: "length"}


@pytest.mark.parametrize("kind", ["characters", "chats"])
def test_streamed_and_whole_say_the_same(kind: str, request: pytest.FixtureRequest) -> None:
    running: Running = request.getfixturevalue(kind)
    for seed in range(8):
        common = {"n": 2, "seed": seed, "stop": ["e", "\x00", "zz"] if seed % 2 else None}
        for ask in (complete, chat):
            reply = ask(running, **common)
            said = [c.text if hasattr(c, "text") else c.message.content for c in reply.choices]
            options = {"stream": True, "stream_options": {"include_usage": True}}
            texts, reasons, chunks = streamed(ask(running, **common, **options))
            assert [texts[i] for i in range(2)] == said
            assert [reasons[i] for i in range(2)] == [c.finish_reason for c in reply.choices]
            assert chunks[-1].usage == reply.usage and not chunks[-1].choices
            assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks[:-1])


def test_streamed_logprobs_come_with_their_text(characters: Running) -> None:
    whole = complete(characters, logprobs=1, stop="qu").choices[0].logprobs
    parts = [c.choices[0].logprobs for c in complete(characters, logprobs=1, stop="qu", stream=True)]
    assert [t for p in parts for t in p.tokens] == whole.tokens
    assert [t for p in parts for t in p.text_offset] == whole.text_offset
    assert [t for p in parts for t in p.token_logprobs] == whole.token_logprobs
    entries = [
        e for c in chat(characters, logprobs=True, stream=True) for x in c.choices if x.logprobs for e in x.logprobs.content
    ]
    assert entries == chat(characters, logprobs=True).choices[0].logprobs.content


def test_stop_strings_are_cut_across_tokens(characters: Running) -> None:
    asked: dict[str, Any] = {"max_tokens": 24, "extra_body": {"ignore_eos": True}}
    texts = ((seed, complete(characters, seed=seed, **asked).choices[0].text) for seed in range(100))
    seed, free = next((seed, text) for seed, text in texts if len(text) == 24)  # not one special token among them
    for begin, end in ((0, 1), (0, 3), (6, 9), (11, 18), (22, 24)):
        stop = free[begin:end]
        for given in (stop, [stop, "zzzzzz"]):
            whole = complete(characters, seed=seed, stop=given, **asked)
            assert whole.choices[0].text == free[: free.find(stop)] and whole.choices[0].finish_reason == "stop"
            assert whole.usage.completion_tokens == free.find(stop) + len(stop)
            said, reasons, _ = streamed(complete(characters, seed=seed, stop=given, stream=True, **asked))
            assert said.get(0, "") == whole.choices[0].text and reasons == {0: "stop"}
    before = characters.call(characters.engine.stats()).generated
    complete(characters, seed=seed, stop=free[6:9], **asked | {"max_tokens": 2000})
    after = characters.call(characters.engine.stats())
    assert after.generated - before < 100 and not after.running, "the engine went on behind the stop string"
    logprobs = complete(characters, seed=seed, stop=free[6:9], logprobs=0, **asked).choices[0].logprobs
    assert "".join(logprobs.tokens) == free[: free.find(free[6:9])]


def test_ends(chats: Running, characters: Running) -> None:
    replies = [complete(chats, seed=seed, max_tokens=200, logprobs=0) for seed in range(6)]
    ended = [r for r in replies if r.choices[0].finish_reason == "stop"]
    assert ended, "no completion sampled its end: choose another model"
    assert ended[0].choices[0].logprobs.tokens[-1] == "<|im_end|>"
    assert "<|im_end|>" not in ended[0].choices[0].text
    seed = replies.index(ended[0])
    on = complete(chats, seed=seed, max_tokens=200, extra_body={"ignore_eos": True})
    assert on.choices[0].finish_reason == "length" and on.usage.completion_tokens == 200
    full = chat(chats, seed=seed, max_completion_tokens=256, extra_body={"ignore_eos": True})  # the context's end
    assert full.choices[0].finish_reason == "length" and full.usage.total_tokens == 256
    unasked = chat(chats, seed=seed, max_completion_tokens=None, extra_body={"ignore_eos": True})
    assert unasked.choices[0].finish_reason == "length" and unasked.usage.completion_tokens == 128, "half the context"


@pytest.mark.slow
def test_two_hundred_at_a_time(chats: Running) -> None:
    """Completions and chats, whole and streamed, with every option, all at once; each reply is the one it gets alone."""

    async def ask(client: Any, i: int) -> tuple[str, int]:
        common: dict[str, Any] = {"model": chats.name, "seed": i % 10, "temperature": (0, 0.8, 1)[i % 3]}
        common |= {"stop": "e"} if i % 5 == 0 else {}
        streaming = {"stream": True, "stream_options": {"include_usage": True}} if i % 2 else {}
        if i % 4 < 2:
            reply = await client.completions.create(
                prompt=f"{i % 20}: tell", max_tokens=24, logprobs=i % 3, **common, **streaming
            )
        else:
            messages = [{"role": "user", "content": f"{i % 20}"}]
            reply = await client.chat.completions.create(messages=messages, max_tokens=24, **common, **streaming)
        if not streaming:
            choice = reply.choices[0]
            return (choice.text if i % 4 < 2 else choice.message.content), reply.usage.completion_tokens
        text, count = "", 0
        async for chunk in reply:
            for choice in chunk.choices:
                text += choice.text if i % 4 < 2 else choice.delta.content or ""
            count = chunk.usage.completion_tokens if chunk.usage else count
        return text, count

    async def everything() -> list[tuple[str, int]]:
        async with chats.asynchronous() as client:
            together = await asyncio.gather(*(ask(client, i) for i in range(200)))
            alone = [await ask(client, i) for i in range(0, 200, 11)]
        assert alone == list(together)[::11]
        return list(together)

    results = asyncio.run(everything())
    assert len(results) == 200 and all(1 <= count <= 24 for _, count in results)
    stats = chats.call(chats.engine.stats())
    assert stats.running == stats.waiting == 0
    chats.engine._scheduler.check_integrity()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_work(characters: Running, stream: bool) -> None:
    import http.client

    import httpx

    before = characters.call(characters.engine.stats()).generated
    body = {"model": characters.name, "prompt": "a", "max_tokens": 2000, "n": 2, "ignore_eos": True, "stream": stream}
    url = f"{characters.url}/v1/completions"
    if stream:
        with httpx.stream("POST", url, json=body, timeout=30) as response:
            assert next(response.iter_lines()).startswith("data: ")
    else:
        leaving = http.client.HTTPConnection(httpx.URL(url).netloc.decode(), timeout=30)
        leaving.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        deadline = time.monotonic() + 20
        while characters.call(characters.engine.stats()).generated == before:
            assert time.monotonic() < deadline
        leaving.close()
    deadline = time.monotonic() + 20
    while (stats := characters.call(characters.engine.stats())).running + stats.waiting:
        assert time.monotonic() < deadline
    assert 0 < stats.generated - before < 2 * 2000 - 200, "it went on to the end"
    assert complete(characters).choices[0].text
