"""Sampling with Tidemill's engine. See `harness.py`."""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import time
from dataclasses import replace

import numpy as np
import torch
from serve import given, serve

from tidemill.core.types import Completion, GenerateRequest, SamplingParams, Version
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.models.hf_weights import load_folder
from tidemill.models.kernels.library import why_not

wanted = given()
torch.set_num_threads(wanted["threads"])
loop = asyncio.new_event_loop()


async def make() -> NativeEngine:
    settings = EngineSettings(device="cpu", dtype=wanted["dtype"], **wanted.get("engine", {}))
    return NativeEngine(
        load_folder(wanted["model"]), settings, receiver=None, version=Version(0), name="engine-0", eos_ids=()
    )


engine = loop.run_until_complete(make())
gc.collect()
gc.freeze()  # as a run's roles do with what they have imported


TAIL = 8  # sequences that are left


def counters() -> dict[str, float]:
    return loop.run_until_complete(engine.telemetry()).counters


def answer(prompts: list[list[int]], samples: int, tokens: int | list[int], seed: int, replies: bool = False) -> dict:
    """tokens: of every sample, or of each. replies: whether they are wanted."""
    texts = [np.array(prompt, np.int32) for prompt in prompts for _ in range(samples)]
    counts = [tokens] * len(texts) if isinstance(tokens, int) else tokens

    params = SamplingParams(ignore_eos=True)

    tail = {"begin": 0.0, "cpu": 0.0, "tokens": 0}  # since when few are left, and what had been sampled by then
    left = len(texts)

    async def one(text: np.ndarray, how: SamplingParams, key: str) -> Completion:
        nonlocal left
        reply = await engine.generate(GenerateRequest(text, how, key=key))
        left -= 1
        if left == TAIL:
            tail.update(begin=time.perf_counter(), cpu=time.process_time(), tokens=(await engine.stats()).generated)
        return reply

    async def run() -> list[list[int]]:
        each = [replace(params, max_tokens=n, seed=seed * 100_000 + i) for i, n in enumerate(counts)]
        calls = enumerate(zip(texts, each, strict=True))
        done = await asyncio.gather(*(one(text, how, f"{seed}/{i}") for i, (text, how) in calls))
        assert all(np.isfinite(each.logprobs).all() for each in done)
        return [each.tokens.tolist() for each in done]

    before, steps, drafts = loop.run_until_complete(engine.stats()), engine.progress(), counters()
    begin, cpu = time.perf_counter(), time.process_time()
    made = loop.run_until_complete(run())
    seconds, after = time.perf_counter() - begin, loop.run_until_complete(engine.stats())
    computed = (after.prompt_tokens - after.cached_tokens) - (before.prompt_tokens - before.cached_tokens)
    found = {"seconds": seconds, "tokens": sum(map(len, made)), "prompt_tokens_computed": computed}
    found["cpu_seconds"] = (ended := time.process_time()) - cpu
    if tail["begin"]:
        found["tail_cpu_seconds"] = ended - tail["cpu"]
        found |= {"tail_seconds": begin + seconds - tail["begin"], "tail_tokens": after.generated - tail["tokens"]}
    found |= {name: counters()[name] - drafts[name] for name in ("drafted_tokens", "accepted_tokens")}
    return found | {"steps": engine.progress() - steps} | ({"replies": made} if replies else {})


serve(
    {"tidemill": importlib.metadata.version("tidemill"), "torch": torch.__version__, "kernels": why_not() or "compiled"},
    answer,
)
