"""`batch_invariant`: a request's bits are the same whatever else runs, whenever, and however the engine is cut."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_cases import BASE, FAMILIES, MemoryReceiver, decoder, engine, prompts, with_pages

import tidemill.engine.native.native_engine as core
from tidemill.core.errors import ConfigError
from tidemill.core.types import Completion, GenerateRequest, SamplingParams, Scored, Version
from tidemill.engine.native.batch_invariant import BLOCK
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.models.attention import packed_attention, packed_positions
from tidemill.models.logprobs import token_logprobs

ODD = replace(BASE, heads=1, kv_heads=1, head_dim=10, hidden=27, intermediate=37, vocab=601)  # nothing fills a cache line
MODELS = FAMILIES | {"odd": ODD}


@dataclass(frozen=True)
class Ask:
    """A request: `params` None is a score."""

    tokens: np.ndarray
    params: SamplingParams | None = None
    temperature: float = 1.0
    top_k: int = 0


def asks(seed: int, count: int = 14, longest: int = 44) -> list[Ask]:
    """Random requests of every kind. A third of the prompts begin alike, and two are the same."""
    rng = np.random.default_rng(seed)
    texts = prompts(count, 2, longest, seed)
    texts[1::3] = [np.concatenate([texts[0][:13], t])[:longest] for t in texts[1::3]]
    texts[2] = texts[1]
    kinds = [
        {},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"top_p": 0.8},
        {"top_k": 7, "temperature": 1.3},
        {"min_p": 0.05},
    ]
    found = []
    for i, text in enumerate(texts):
        if rng.random() < 0.2:
            found.append(Ask(text, None, float(rng.choice([1.0, 0.8])), int(rng.integers(0, 4))))
            continue
        kind = kinds[rng.integers(len(kinds))] | ({"top_logprobs": int(rng.integers(1, 6))} if rng.random() < 0.3 else {})
        found.append(Ask(text, SamplingParams(max_tokens=int(rng.integers(6, 24)), seed=seed * 1000 + i, **kind)))
    return found


def bits(result: Completion | Scored) -> str:
    """A digest of everything that was sampled and measured."""
    arrays = [result.logprobs, result.top_ids, result.top_logprobs]
    if isinstance(result, Completion):
        support = result.support
        arrays += [
            result.tokens,
            result.extras["model_logprobs"],
            *((support.ids, support.offsets) if support is not None else ()),
        ]
    return hashlib.sha256(b"|".join(a.tobytes() for a in arrays if a is not None)).hexdigest()


async def answer(under_test: NativeEngine, ask: Ask) -> str:
    if ask.params is None:
        return bits(await under_test.score(ask.tokens, "policy", ask.temperature, ask.top_k))
    return bits(await under_test.generate(GenerateRequest(ask.tokens, ask.params, extras=("model_logprobs",))))


async def together(under_test: NativeEngine, given: list[Ask]) -> list[str]:
    return await asyncio.gather(*(answer(under_test, a) for a in given))


async def alone(arch, given: list[Ask], **settings) -> list[str]:
    """One after another, in an engine that keeps nothing in between."""
    under_test = engine(arch, prefix_cache=False, **settings)
    found = [await answer(under_test, a) for a in given]
    await under_test.close()
    return found


async def with_company(under_test: NativeEngine, given: list[Ask]) -> list[str]:
    """Others run before, between and after, some of them greedy as an evaluation is, one aborted half-way."""
    others = [asyncio.ensure_future(answer(under_test, a)) for a in asks(777, 9)]
    doomed = asyncio.ensure_future(
        under_test.generate(GenerateRequest(given[0].tokens, SamplingParams(max_tokens=50), key="doomed"))
    )
    results = []
    for one in given:
        results.append(asyncio.ensure_future(answer(under_test, one)))
        greedy = SamplingParams(temperature=0, max_tokens=4, top_logprobs=9)
        others.append(asyncio.ensure_future(answer(under_test, Ask(one.tokens[:5], greedy))))
        for _ in range(3):
            await asyncio.sleep(0)
    await under_test.abort("doomed")
    await asyncio.gather(doomed, *others)
    return await asyncio.gather(*results)


async def backwards(under_test: NativeEngine, given: list[Ask]) -> list[str]:
    return (await together(under_test, given[::-1]))[::-1]


async def twice(under_test: NativeEngine, given: list[Ask]) -> list[str]:
    """The second time prompts are found in the cache."""
    await together(under_test, given)
    before = (await under_test.stats()).cached_tokens
    found = await together(under_test, given)
    assert (await under_test.stats()).cached_tokens >= before + 8 * len(given)
    return found


WAYS = {
    "together": (together, {"max_sequences": 16}),
    "one row": (together, {"max_sequences": 1}),
    "backwards": (backwards, {}),
    "chunked": (together, {"prefill_chunk": 5, "max_sequences": 16}),
    "preempted": (together, {"pages": 18}),
    "preempted, chunked, uncached": (together, {"pages": 18, "prefill_chunk": 16, "prefix_cache": False}),
    "cached": (twice, {}),
    "company": (with_company, {"max_sequences": 24, "kv_memory_mb": 3, "prefill_chunk": 40}),
}


async def differing(arch, given: list[Ask], expected: list[str], way: str, monkeypatch, **settings) -> int:
    """How many requests get other bits this way."""
    run, chosen = WAYS[way]
    chosen = chosen | settings
    with monkeypatch.context() as patch:
        if (pages := chosen.pop("pages", None)) is not None:
            with_pages(patch, pages)
        under_test = engine(arch, **chosen)
        found = await run(under_test, given)
        assert ((await under_test.stats()).preemptions > 0) == way.startswith("preempted")
        await under_test.close()
    return sum(a != b for a, b in zip(found, expected, strict=True))


@pytest.fixture
def threads() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    "family", [each if each in ("qwen3", "odd") else pytest.param(each, marks=pytest.mark.slow) for each in MODELS]
)
@pytest.mark.runs
async def test_bits_do_not_depend_on_company(family, monkeypatch):
    arch = MODELS[family]
    given = asks(sorted(MODELS).index(family))
    expected = await alone(arch, given, batch_invariant=True)
    found = {way: await differing(arch, given, expected, way, monkeypatch, batch_invariant=True) for way in WAYS}
    assert found == dict.fromkeys(WAYS, 0)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 4, 7, 64])
@pytest.mark.parametrize("family", MODELS)
async def test_bits_do_not_depend_on_company_at_length(family, page_size, monkeypatch):
    arch = MODELS[family]
    for seed in (100, 101):
        given = asks(seed, 30)
        settings = {"batch_invariant": True, "page_size": page_size}
        expected = await alone(arch, given, **settings)
        for way in ("together", "chunked", "backwards", "company"):
            assert not await differing(arch, given, expected, way, monkeypatch, **settings), way


@pytest.mark.parametrize("family", MODELS)
async def test_the_ordinary_path_would_fail(family, monkeypatch):
    """On a machine where this test fails the test above proves nothing."""
    arch = MODELS[family]
    given = asks(sorted(MODELS).index(family))
    expected = await alone(arch, given)
    assert await differing(arch, given, expected, "together", monkeypatch) > 0


async def test_ties_are_broken_alike_however_many_alternatives_others_ask_for():
    model = decoder()
    model.head.weight.data[30:60] = model.head.weight.data[:30]  # every token has a twin of the same logit
    settings = EngineSettings(device="cpu", batch_invariant=True, page_size=4)
    under_test = NativeEngine(model, settings, receiver=None, version=Version(0), name="engine-0", eos_ids=())
    given = [Ask(t, SamplingParams(max_tokens=9, top_logprobs=n)) for n, t in zip((1, 3, 7, 20), prompts(4), strict=True)]
    expected = [await answer(under_test, a) for a in given]
    assert await together(under_test, given) == expected
    await under_test.close()


@pytest.mark.parametrize("more", [0, 1, 3])
@pytest.mark.parametrize("length", [BLOCK, 2 * BLOCK])
async def test_a_twin_samples_from_what_its_sibling_computes_in_the_same_step(length, more):
    """Pages of four tokens: whole ones are shared, the last of `more` tokens is copied."""
    length += more
    text = prompts(1, length, length + 1)[0]
    given = [Ask(text, SamplingParams(max_tokens=6, seed=i)) for i in range(3)]
    expected = await alone(BASE, given, batch_invariant=True)
    under_test = engine(batch_invariant=True)
    assert await together(under_test, given) == expected
    assert (await under_test.stats()).cached_tokens == 2 * length
    await under_test.close()


async def test_two_threads_agree_with_themselves(monkeypatch, threads):
    torch.set_num_threads(2)
    arch = replace(BASE, layers=1, windows=(None,), hidden=64, intermediate=1100, vocab=1300)  # large enough to be divided
    params = [SamplingParams(max_tokens=5, seed=i, top_p=(1.0, 0.9)[i % 2]) for i in range(4)]
    given = [*(Ask(t, p) for t, p in zip(prompts(4), params, strict=True)), Ask(prompts(1, 40, 41)[0])]
    expected = await alone(arch, given, batch_invariant=True)
    assert not await differing(arch, given, expected, "chunked", monkeypatch, batch_invariant=True)


@pytest.mark.runs
async def test_another_process_and_an_update_give_the_same_bits():
    given = asks(5, 8)
    expected = await alone(BASE, given, batch_invariant=True)
    code = (
        "import asyncio, torch; torch.set_num_threads(1)\n"
        "from test_engine_invariant import *\n"
        "found = asyncio.run(together(engine(batch_invariant=True, max_sequences=3, prefill_chunk=9), asks(5, 8)))\n"
        "print(*found)"
    )
    here = Path(__file__).parent
    out = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], cwd=here, capture_output=True, text=True, timeout=120, check=True
    )
    assert out.stdout.split() == expected
    receiver = MemoryReceiver()
    under_test = engine(seed=1, receiver=receiver, batch_invariant=True)
    assert all(a != b for a, b in zip(await together(under_test, given), expected, strict=True))
    await under_test.update(receiver.publish(1, decoder()))
    assert await together(under_test, given) == expected
    await under_test.close()


@pytest.mark.parametrize("family", MODELS)
async def test_it_is_the_trainer_s_policy(family):
    """Logprobs equal the trainer's to 1e-4, and scoring a completion gives the very bits it was sampled with."""
    arch = MODELS[family]
    model = decoder(arch)
    under_test = engine(arch, batch_invariant=True, prefill_chunk=11)
    texts = prompts(6, 2, 50, seed=8)
    params = [SamplingParams(max_tokens=30, seed=i, temperature=(1.0, 0.7)[i % 2]) for i in range(6)]
    requests = [GenerateRequest(t, p, extras=("model_logprobs",)) for t, p in zip(texts, params, strict=True)]
    done = await asyncio.gather(*map(under_test.generate, requests))
    for text, asked, completion in zip(texts, params, done, strict=True):
        whole = np.concatenate([text, completion.tokens])
        row = torch.from_numpy(whole.astype(np.int64))
        with torch.no_grad():
            hidden = model(row[:-1], packed_positions([len(row) - 1]), packed_attention([len(row) - 1], arch.windows))
            trained, _ = token_logprobs(model, hidden, row[1:], asked.temperature)
        np.testing.assert_allclose(completion.logprobs, trained[len(text) - 1 :].numpy(), atol=1e-4)
        scores = await under_test.score(whole, "policy", 1.0, 0)
        np.testing.assert_array_equal(scores.logprobs[len(text) :], completion.extras["model_logprobs"])
    await under_test.close()


def place(x: torch.Tensor) -> torch.Tensor:
    """What a loop does whose remainder is computed by another formula: the last element differs in its last place."""
    out = torch.sigmoid(x) * x
    out[-1, -1] = torch.nextafter(out[-1, -1], torch.tensor(torch.inf))
    return out


def company(x: torch.Tensor) -> torch.Tensor:
    """Every row alike, wherever it stands, but by what the block holds."""
    return torch.sigmoid(x) * x * (1 + 1e-3 * x.flatten().sort().values.sum().sin())


@pytest.mark.parametrize("kernel", [place, company])
def test_a_machine_that_does_not_compute_rows_alike_is_refused(kernel, monkeypatch):
    def gated(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return kernel(gate) * up

    monkeypatch.setattr("tidemill.models.decoder.gated", gated)
    with pytest.raises(ConfigError, match="on this machine, with 1 threads"):
        engine(batch_invariant=True)
    engine()


def test_only_for_float32_on_the_cpu(monkeypatch):
    for settings in ({"dtype": "bfloat16"}, {"device": "cuda"}):
        with pytest.raises(ValueError, match="it is for float32 on the CPU"):
            EngineSettings(batch_invariant=True, **settings)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="'cuda' here: it is for float32 on the CPU"):
        engine(batch_invariant=True, device="auto")


async def test_off_costs_nothing(monkeypatch):
    def never(*_: object) -> None:
        raise AssertionError("not asked for")

    monkeypatch.setattr(core, "check_machine", never)
    monkeypatch.setattr(core, "run_invariant", never)
    under_test = engine()
    await under_test.generate(GenerateRequest(prompts(1)[0], SamplingParams(max_tokens=3)))
    await under_test.close()
