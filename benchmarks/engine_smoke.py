"""Tokens per second of the native engine alone on a small random model, and where the time goes: for work on it.

    python benchmarks/engine_smoke.py [--threads 1 2] [--dtypes float32 bfloat16] [--profile]

16 prompts x 8 samples, 64 + 128 tokens, temperature 1, ignoring the end of sequence. "steady": as many at a time, of half as
many tokens to all of them, each followed at once by one with a prompt of its own, as in a run whose rollouts never stop.
Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

import numpy as np
import torch
from workloads import SIZES, VOCAB, decoder

from tidemill.core.types import GenerateRequest, SamplingParams, Version
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine


async def generate(engine: NativeEngine, prompts: list[np.ndarray], samples: int, tokens: int, seed: int) -> float:
    def request(row: int, sample: int) -> GenerateRequest:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed + row * samples + sample)
        return GenerateRequest(prompts[row], params, key=f"{seed}/{row}/{sample}")

    start = time.perf_counter()
    await asyncio.gather(*(engine.generate(request(i, j)) for i in range(len(prompts)) for j in range(samples)))
    return len(prompts) * samples * tokens / (time.perf_counter() - start)


async def steady(engine: NativeEngine, args: argparse.Namespace, vocab: int) -> float:
    """Tokens per second of so many turns, the first of which are shorter, so that not all end at once."""
    total = 0

    async def one(row: int) -> None:
        nonlocal total
        rng = np.random.default_rng(row)
        for turn in range(args.turns):
            count = int(rng.integers(max(1, args.tokens // 2) if turn else 1, args.tokens + 1))
            prompt = rng.integers(0, vocab, args.prompt).astype(np.int32)
            params = SamplingParams(max_tokens=count, ignore_eos=True, seed=row * 1000 + turn)
            await engine.generate(GenerateRequest(prompt, params, key=f"{row}/{turn}"))
            total += count

    start = time.perf_counter()
    await asyncio.gather(*(one(row) for row in range(args.prompts * args.samples)))
    return total / (time.perf_counter() - start)


async def measure(args: argparse.Namespace, size: str, dtype: str, threads: int) -> dict:
    torch.set_num_threads(threads)
    sizes = {"max_sequences": args.prompts * args.samples, "context": args.prompt + args.tokens}  # a cache that is used soon
    settings = EngineSettings(dtype=dtype, device=args.device, page_size=args.page_size, **sizes)
    engine = NativeEngine(decoder(size, context=1024), settings, receiver=None, version=Version(0), name="smoke", eos_ids=())
    rng = np.random.default_rng(0)
    speeds = []
    for repeat in range(args.repeats + 1 + args.profile):  # the first warms up; prompts are new each time
        prompts = [rng.integers(0, VOCAB[size], args.prompt).astype(np.int32) for _ in range(args.prompts)]
        if repeat > args.repeats:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                await generate(engine, prompts, args.samples, args.tokens, repeat * 1000)
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=22, max_name_column_width=40))
        else:
            speeds.append(await generate(engine, prompts, args.samples, args.tokens, repeat * 1000))
    stats, telemetry = await engine.stats(), await engine.telemetry()
    going = await steady(engine, args, VOCAB[size])
    await engine.close()
    counters = telemetry.counters
    return {
        "model": size,
        "dtype": dtype,
        "threads": threads,
        "tokens_per_second": round(max(speeds[1:])),
        "median": round(float(np.median(speeds[1:]))),
        "steady": round(going),
        "ms_per_step": round(1000 * counters["busy_s"] / counters["steps"], 2),
        "cached_share": round(stats.cached_tokens / stats.prompt_tokens, 2),
        "memory_mb": telemetry.memory_bytes >> 20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["S"], choices=SIZES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--page-size", type=int, default=EngineSettings().page_size)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3, help='of each row, one after the other, for "steady"')
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path, help="write the table there")
    args = parser.parse_args()
    rows = [asyncio.run(measure(args, s, d, t)) for s in args.sizes for d in args.dtypes for t in args.threads]
    print("  ".join(f"{name:>17}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value!s:>17}" for value in row.values()))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
