"""Replies that are held to a grammar: what is sampled, what is recorded, and that nothing else in the engine changes."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
from engine_cases import kept, log_softmax, reference, reference_logprobs, with_pages
from schema_cases import (
    CONTEXT,
    END,
    PROMPT,
    SHAPES,
    Schema,
    architecture,
    asked,
    bytes_of,
    make_engine,
    model,
    replies,
    schemas,
    spelling,
    text_of,
)

from tidemill.core.constraints import JSON_OBJECT, choice, json_schema, regex
from tidemill.core.serialization import encode
from tidemill.core.types import Completion, Finish, GenerateRequest, SamplingParams
from tidemill.engine.native.engine_settings import SpeculationSettings
from tidemill.engine.native.native_engine import NativeEngine

VOCAB = architecture().vocab
FORMATS = jsonschema.FormatChecker(["date", "ipv4", "uuid"])
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_p": 0.6},
    {"top_k": 4, "temperature": 1.4},
    {"min_p": 0.2},
    {"top_p": 0.9, "top_k": 300},
]
SMALL: Schema = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 6}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["word", "count"],
    "additionalProperties": False,
}


def expect_valid(done: Completion, schema: Schema) -> None:
    value = json.loads(text_of(done.tokens))
    jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(value)


def expect_recorded(done: Completion, prompt: np.ndarray = PROMPT, temperature: float = 1.0) -> None:
    """The recorded logprobs are those over the recorded support, by NumPy."""
    assert done.support is not None
    done.support.check(len(done.tokens))
    rows = reference(model(), np.concatenate([prompt, done.tokens])[:-1])[len(prompt) - 1 :] / temperature
    for t, token in enumerate(done.tokens.tolist()):
        ids = done.support.at(t, VOCAB)
        assert token in ids
        expected = log_softmax(rows[t][ids])[ids.tolist().index(token)]
        np.testing.assert_allclose(done.logprobs[t], expected, rtol=1e-5, atol=1e-5)


async def follow(seed: int, count: int, at_once: int) -> None:
    """Sample a reply to each of some schemas, and check it whole. One that is cut goes on under a higher limit."""
    engine, cut = make_engine(max_sequences=at_once, kv_memory_mb=32), 0
    every = schemas(seed, count)
    done = await replies(engine, [asked(json_schema(each), i, max_tokens=240) for i, each in enumerate(every)])
    longer = {
        i: asked(json_schema(every[i]), i, max_tokens=CONTEXT) for i, d in enumerate(done) if d.finish is Finish.LENGTH
    }
    whole = dict(zip(longer, await replies(engine, [*longer.values()]), strict=True))
    await engine.close()
    for i, (schema, reply) in enumerate(zip(every, done, strict=True)):
        jsonschema.Draft202012Validator.check_schema(schema)
        expect_recorded(reply)
        if i in whole:
            assert np.array_equal(whole[i].tokens[: len(reply.tokens)], reply.tokens)
            cut += whole[i].finish is not Finish.STOP
            reply = whole[i]
        if reply.finish is Finish.STOP:
            assert reply.tokens[-1] == END
            expect_valid(reply, schema)
    assert cut <= count // 50


async def test_every_shape_of_schema_is_followed() -> None:
    await follow(seed=0, count=len(SHAPES), at_once=len(SHAPES))


@pytest.mark.slow
async def test_five_hundred_schemas_are_followed() -> None:
    for seed in range(1, 5):
        await follow(seed, count=126, at_once=32)


async def accepts(engine: NativeEngine, schema: Schema, text: str) -> bool:
    """True if the text may be sampled as a whole reply."""
    constraint = json_schema(schema)
    await engine.grammars.compiled(constraint)
    held, tokens = engine.grammars.begin(constraint, (END,)), [spelling().index(bytes([byte])) for byte in text.encode()]
    assert held is not None
    whole = enumerate([*tokens, END])
    return all(held.allowed(np.array(tokens[:count], np.int32))[token] for count, token in whole)


@pytest.mark.parametrize("where", ["alone", "const"])
async def test_bounds_of_numbers_hold_at_their_edges(where: str) -> None:
    """Of random bounds, the numbers on them and beside them; also in a property that is named as a keyword is."""
    rng, engine, seen = np.random.default_rng(0), make_engine(), {True: 0, False: 0}
    for _ in range(40):
        low = float(rng.integers(-60, 60)) / float(rng.choice([1, 1, 4, 10]))
        high = round(low + float(rng.integers(1, 90)) / float(rng.choice([1, 10, 100])), 4)
        least, most = rng.choice(["exclusiveMinimum", "minimum"]), rng.choice(["exclusiveMaximum", "maximum"])
        number: Schema = {"type": "number", least: low, most: high}
        schema = number if where == "alone" else {"properties": {"const": number}, "required": ["const"]}
        validator = jsonschema.Draft202012Validator(schema)
        for value in (low, high, int(low), int(high), (low + high) / 2, low - 0.125, high + 0.125):
            text = json.dumps(value if where == "alone" else {"const": value})
            valid = validator.is_valid(json.loads(text))
            seen[valid] += 1
            assert await accepts(engine, schema, text) <= valid, (schema, text)
    assert min(seen.values()) > 50
    draft_4 = {"type": "number", "minimum": 4, "exclusiveMinimum": True, "maximum": 4.5}
    assert await accepts(engine, draft_4, "4.1") and not await accepts(engine, draft_4, "4")
    await engine.close()


async def test_a_constant_is_left_as_it_is() -> None:
    """What looks like a bound in a constant is none."""
    engine = make_engine()
    schema: Schema = {"const": {"exclusiveMinimum": 4, "exclusiveMaximum": 5}}
    assert await accepts(engine, schema, json.dumps(schema["const"], separators=(",", ":")))
    await engine.close()


WORDS = ["tide", "tidemill", "mill", 'say "é"', "a\nb"]


def may_follow(words: list[str], text: bytes, stops: tuple[int, ...]) -> np.ndarray:
    """[V] bool: the ids after which one of the words can still come, without any library."""
    wanted, ends = [word.encode() for word in words], [word.encode() for word in words]
    found = np.array([bool(part) and any(word.startswith(text + part) for word in wanted) for part in spelling()])
    found[[*stops]] = text in ends
    return found


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_the_distribution_is_the_models_over_what_may_follow(sampling: dict[str, Any]) -> None:
    """Against a plain list of words: the allowed ids, and on them the distribution that the parameters ask for."""
    engine, stop = make_engine(), 7
    params = SamplingParams(**sampling)
    requests = [asked(choice(WORDS), seed, stop_ids=(stop,), **sampling) for seed in range(6)]
    for done in await replies(engine, requests):
        assert done.finish is Finish.STOP and done.support is not None and text_of(done.tokens[:-1]) in WORDS
        rows = reference(model(), np.concatenate([PROMPT, done.tokens])[:-1])[len(PROMPT) - 1 :]
        for t, token in enumerate(done.tokens.tolist()):
            allowed = may_follow(WORDS, bytes_of(done.tokens[:t]), (END, stop))
            expected = kept(np.where(allowed, rows[t], -1e9), params)
            expected = np.where(allowed, expected, -np.inf)
            assert set(done.support.at(t, VOCAB).tolist()) == set(np.flatnonzero(expected > -np.inf).tolist())
            assert abs(float(done.logprobs[t]) - expected[token]) < 1e-5
    await engine.close()


async def test_the_greedy_reply_takes_the_likeliest_of_what_may_follow() -> None:
    engine = make_engine()
    done = await engine.generate(asked(choice(WORDS), temperature=0.0))
    assert done.support is None and not done.logprobs.any() and text_of(done.tokens[:-1]) in WORDS
    rows = reference(model(), np.concatenate([PROMPT, done.tokens])[:-1])[len(PROMPT) - 1 :]
    for t, token in enumerate(done.tokens.tolist()):
        allowed = may_follow(WORDS, bytes_of(done.tokens[:t]), (END,))
        assert token == int(np.where(allowed, rows[t], -np.inf).argmax())
    await engine.close()


async def test_the_support_is_small_inside_of_long_texts() -> None:
    """Nearly all ids may stand there: the few others are listed, and once for all positions."""
    engine = make_engine()
    done = await engine.generate(asked(regex('[^"]{300,}'), max_tokens=200))
    assert done.finish is Finish.LENGTH and done.support is not None and done.support.positions == 200
    listed = np.diff(done.support.offsets)
    assert len(listed) < 20 and done.support.lacking.any() and listed.max() <= VOCAB // 2
    assert len(encode(done.support)) < 20 * VOCAB
    expect_recorded(done)
    await engine.close()


async def test_model_logprobs_and_alternatives_are_the_unmodified_models() -> None:
    engine = make_engine()
    done = await engine.generate(replace(asked(json_schema(SMALL), top_logprobs=3), extras=("model_logprobs",)))
    expected = reference_logprobs(model(), PROMPT, done.tokens)
    np.testing.assert_allclose(done.extras["model_logprobs"], expected, atol=1e-4)
    rows = log_softmax(reference(model(), np.concatenate([PROMPT, done.tokens])[:-1])[len(PROMPT) - 1 :])
    assert done.top_logprobs is not None
    np.testing.assert_allclose(done.top_logprobs, -np.sort(-rows, axis=-1)[:, :3], atol=1e-4)
    await engine.close()


def requests_of_all_kinds() -> list[GenerateRequest]:
    """Replies with and without grammars, whose prompts begin alike; two are twins."""
    found = []
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.6}, {"top_k": 4, "temperature": 1.4}, {"temperature": 0.0}]
    for i, sampling in enumerate(kinds):
        prompt = np.concatenate([PROMPT, np.arange(i % 3, dtype=np.int32)])
        found += [
            asked(json_schema(SMALL), i, prompt, **sampling),
            asked(None, i, prompt, max_tokens=20, **sampling),
            asked(choice(WORDS), i, prompt, **sampling),
        ]
    return [*found, found[0]]


def same(a: Completion, b: Completion) -> bool:
    supports = [
        None if done.support is None else [done.support.at(t, VOCAB).tolist() for t in range(len(done.tokens))]
        for done in (a, b)
    ]
    close = np.allclose(a.logprobs, b.logprobs, atol=2e-6)
    return np.array_equal(a.tokens, b.tokens) and close and supports[0] == supports[1] and a.finish is b.finish


ALONE = list[Completion]()


async def alone() -> list[Completion]:
    """What an engine says that answers one request after another, and keeps nothing in between."""
    if not ALONE:
        engine = make_engine(prefix_cache=False)
        ALONE.extend([await engine.generate(request) for request in requests_of_all_kinds()])
        await engine.close()
    return ALONE


@pytest.mark.parametrize("path", ["batch", "chunks", "few pages", "speculation", "sleep"])
async def test_every_path_samples_the_same(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches, in chunks of a prompt, preempted, beside drafts, and prefilled again after a sleep."""
    expected = await alone()
    settings: dict[str, Any] = {"chunks": {"prefill_chunk": 4}}.get(path, {})
    if path == "few pages":
        with_pages(monkeypatch, 2 + max(len(PROMPT) + len(each.tokens) for each in expected) // 4)
    if path == "speculation":
        settings = {"speculation": SpeculationSettings(method="rollouts"), "max_sequences": 32}
    engine = make_engine(**settings)
    under_way = [asyncio.ensure_future(engine.generate(request)) for request in requests_of_all_kinds()]
    if path == "sleep":
        while (await engine.stats()).generated < 30:
            await asyncio.sleep(0)
        await engine.sleep()
        await engine.wake()
    done = await asyncio.gather(*under_way)
    stats = await engine.stats()
    assert all(same(a, b) for a, b in zip(done, expected, strict=True))
    if path == "few pages":
        assert stats.preemptions > 0
    if path == "speculation":
        for request, before in zip(requests_of_all_kinds(), expected, strict=True):  # one at a time: all may be drafted
            assert same(await engine.generate(request), before)
        assert (await engine.stats()).accepted_tokens > 0
    await engine.close()


async def test_batch_invariance_holds_with_grammars() -> None:
    """Bit for bit the same, alone and beside others."""
    requests = requests_of_all_kinds()
    engine = make_engine(batch_invariant=True)
    one_by_one = [await engine.generate(request) for request in requests]
    together = await replies(engine, requests)
    await engine.close()
    for a, b in zip(one_by_one, together, strict=True):
        assert a.tokens.tobytes() == b.tokens.tobytes() and a.logprobs.tobytes() == b.logprobs.tobytes()


async def test_a_stream_says_the_same() -> None:
    engine = make_engine()
    request = asked(json_schema(SMALL), 3)
    with pytest.raises(ValueError, match="not compiled"):
        engine.stream(request)
    whole = await engine.generate(request)
    stream = engine.stream(request)
    tokens = [token async for token, *_ in stream]
    assert tokens == whole.tokens.tolist() and stream.completion is not None and same(stream.completion, whole)
    await engine.close()


async def test_where_a_grammar_ends_only_stop_ids_follow() -> None:
    """Whatever else the parameters ask for; and a stop id that has a text ends the reply nowhere else."""
    engine = make_engine()
    letter = spelling().index(b"a")
    for more in ({"min_tokens": 50}, {"logit_bias": ((END, -100.0),)}, {"stop_ids": (letter, 10**6, -5)}):
        done = await engine.generate(asked(regex("[ab]{2}[bc]"), 1, **more))
        text = text_of(done.tokens[:-1])
        assert done.finish is Finish.STOP and re.fullmatch("[ab]{2}[bc]", text)
        if "stop_ids" in more:
            assert "a" not in text and done.tokens[-1] in (END, letter)
    ignoring = await engine.generate(asked(regex("[ab]{2}"), 1, ignore_eos=True, stop_ids=(5,)))
    assert ignoring.tokens[-1] == 5 and len(text_of(ignoring.tokens[:-1])) == 2
    with pytest.raises(ValueError, match="leave ignore_eos out"):
        await engine.generate(asked(JSON_OBJECT, ignore_eos=True))
    await engine.close()


async def test_a_grammar_that_gets_stuck_fails_its_own_reply_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary has no token for what must come third. Others, before and behind it, go on."""
    lacking = [b"" if b"z" in part else part for part in spelling()]
    engine = make_engine(max_sequences=4)
    monkeypatch.setattr(engine.grammars, "_spelling", lambda: lacking)
    others = [asyncio.ensure_future(engine.generate(asked(None, i, max_tokens=30))) for i in range(2)]
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be held to the pattern: no token of the model may come next"):
            await engine.generate(asked(regex("(ab|ac)z"), 1))
    await engine.grammars.compiled(regex("(ab|ac)z"))
    stream = engine.stream(asked(regex("(ab|ac)z"), 2))
    with pytest.raises(ValueError, match="no token of the model"):
        _ = [token async for token in stream]
    assert all(len(done.tokens) == 30 or done.finish is Finish.STOP for done in await asyncio.gather(*others))
    assert (await engine.generate(asked(regex("(ab|ac)y"), 1))).finish is Finish.STOP
    assert (await engine.stats()).running == 0 and engine.alive
    await engine.close()
