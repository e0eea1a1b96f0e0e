"""What grows with what: cost against context, group size, queued requests, engines, and trajectories in the ledger.

    python benchmarks/scaling.py [--only context groups queue engines ledger] [--quick]

    context   microseconds of a decoded token at 256 to 8,192 tokens of context, 16 sequences
    groups    tokens a second for groups of 1 to 64 samples, 64 sequences in all, prompts of 512 tokens
    queue     milliseconds of a step beside computing (schedule, record, callers) with 128 sequences and 10,000 queued
    engines   tokens a second of 1 and of 2 engines, each a process with one thread
    ledger    milliseconds of a step of 16 groups of 8 when up to 100,000 trajectories are recorded already, and of a resume

Prints a table of each, writes `results/scaling.json` and a plot, `results/scaling.png`.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from harness import RESULTS, save, table, wait_until_quiet
from workloads import VOCAB, decoder, write_model

from tidemill.core.interfaces import Engine
from tidemill.core.types import Finish, GenerateRequest, Group, SamplingParams, Score, Task, Trajectory, Version
from tidemill.engine.native import native_engine
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.ledger import SqliteLedger
from tidemill.runtime.local import Local

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SIZE = "S"
TARGET_QUEUE = 0.05  # of a step, at 10,000 queued
Rows = list[dict[str, Any]]


def engine(context: int, sequences: int) -> NativeEngine:
    settings = EngineSettings(device="cpu", max_sequences=sequences, context=context, kv_memory_mb=2048)
    return NativeEngine(decoder(SIZE, context), settings, receiver=None, version=Version(0), name="engine", eos_ids=())


def prompt(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB[SIZE], length).astype(np.int32)


def ask(tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed)


async def sampled(served: Any, prompts: list[np.ndarray], tokens: int) -> float:
    """Seconds for one completion of each."""
    begin = time.perf_counter()
    await asyncio.gather(*(served.generate(GenerateRequest(p, ask(tokens, i), key=str(i))) for i, p in enumerate(prompts)))
    return time.perf_counter() - begin


def context(quick: bool) -> Rows:
    async def measure(length: int) -> dict[str, Any]:
        served = engine(8192 + 64, 16)
        prompts = [prompt(length - 64, seed) for seed in range(16)]
        await sampled(served, prompts, 1)  # the prompts are in the cache from here on
        seconds = await sampled(served, prompts, 64)
        await served.close()
        return {"context": length, "us a token": 1e6 * seconds / (16 * 64), "tok/s": 16 * 64 / seconds}

    return [asyncio.run(measure(length)) for length in ([256, 1024] if quick else [256, 512, 1024, 2048, 4096, 8192])]


def groups(quick: bool) -> Rows:
    async def measure(size: int) -> dict[str, Any]:
        served = engine(1024, 64)
        await sampled(served, [prompt(512, 999)], 4)
        prompts = [prompt(512, seed) for seed in range(64 // size) for _ in range(size)]
        seconds = await sampled(served, prompts, 64)
        computed = served._activity.counters
        await served.close()
        share = computed["cached_tokens"] / max(1, computed["prompt_tokens"])
        return {"group": size, "tok/s": 64 * 64 / seconds, "of prompts cached": share}

    return [asyncio.run(measure(size)) for size in ([1, 8] if quick else [1, 2, 4, 8, 16, 32, 64])]


def queue(quick: bool) -> Rows:
    async def measure(queued: int) -> dict[str, Any]:
        served = engine(512, 128)
        spent = {"computing": 0.0}

        def run(*args: Any) -> Any:
            begin = time.perf_counter()
            output = computed(*args)
            spent["computing"] += time.perf_counter() - begin
            return output

        prompts = [prompt(32, seed) for seed in range(128 + queued)]
        native_engine.run = run
        calls = [
            asyncio.ensure_future(served.generate(GenerateRequest(p, ask(64, i), key=str(i)))) for i, p in enumerate(prompts)
        ]
        while served.progress() < 8:
            await asyncio.sleep(0)
        spent["computing"] = 0.0
        first, begin = served.progress(), time.perf_counter()
        while served.progress() < first + 120 and served._requests.under_way:  # some end, others are admitted
            await asyncio.sleep(0)
        seconds, steps = time.perf_counter() - begin, served.progress() - first
        rest = seconds - spent["computing"]  # now: steps go on while calls are cancelled
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await served.close()
        native_engine.run = computed
        row: dict[str, Any] = {"queued": queued, "ms a step": 1e3 * seconds / steps, "ms of bookkeeping": 1e3 * rest / steps}
        return row | {"of a step": rest / seconds, "at most": TARGET_QUEUE if queued == 10_000 else ""}

    computed = native_engine.run
    return [asyncio.run(measure(queued)) for queued in ([0, 1000] if quick else [0, 100, 1000, 10_000])]


def engines(quick: bool) -> Rows:
    async def measure(count: int, model: Path, place: Path) -> dict[str, Any]:
        placement = Local(place)
        handles: list[Any] = []
        spec = {"model": str(model), "engine": {"device": "cpu", "max_sequences": 64}, "transport": None}
        try:
            for i in range(count):
                handles.append(await placement.start(Engine, "engine", f"engine-{i}", spec, 1))
            parts = [[prompt(64, 64 * i + seed) for seed in range(64)] for i in range(count)]
            await asyncio.gather(*(sampled(h.proxy, p[:4], 4) for h, p in zip(handles, parts, strict=True)))
            begin = time.perf_counter()
            await asyncio.gather(*(sampled(h.proxy, p, 128) for h, p in zip(handles, parts, strict=True)))
            seconds = time.perf_counter() - begin
        finally:
            await placement.close()
        return {"engines": count, "tok/s": count * 64 * 128 / seconds}

    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name) / "model", SIZE, torch.float32)
        rows = [asyncio.run(measure(count, Path(name) / "model", Path(name))) for count in (1, 2)]
    for row in rows:
        row["x of one"] = row["tok/s"] / rows[0]["tok/s"]
    return rows


def ledger(quick: bool) -> Rows:
    tokens, mask = np.arange(256, dtype=np.int32), np.arange(256) >= 64
    zeros, version = np.zeros(256, np.float32), Version(0, fingerprint="f0")
    each = Trajectory(tokens, mask, zeros, np.where(mask, 0, -1).astype(np.int32), Finish.STOP, Score(1.0), (version,))
    attempts, rows = [replace(each, sample=sample) for sample in range(8)], list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".scaling-") as name:
        record, at, step = SqliteLedger(name), 0, 0
        record.publish(version)
        for total in [1000, 4000] if quick else [1000, 10_000, 30_000, 100_000]:
            times: list[float] = []
            while at * 8 < total:
                begin = time.perf_counter()
                ids = list(range(at, at + 16))
                for i in ids:
                    task = Task(f"task-{i % 5000}", f"question {i % 5000}", {"answer": "yes"}, "virtual")
                    record.admit(i, task)
                    record.finish(Group(i, task, attempts))
                record.begin_step(step, 0, ids)
                record.end_step(step, 0, {"loss": 0.0})
                times.append(time.perf_counter() - begin)
                at, step = at + 16, step + 1
            begin = time.perf_counter()
            assert record.counts().conserved
            counted = time.perf_counter() - begin
            record.close()
            begin = time.perf_counter()
            record = SqliteLedger(name, mode="open")
            opened = time.perf_counter() - begin
            row: dict[str, Any] = {"trajectories": total, "ms a step": 1e3 * float(np.median(times[-50:]))}
            rows.append(row | {"ms to open": 1e3 * opened, "ms to count": 1e3 * counted})
        record.close()
    return rows


PLOTTED = {"queue": "ms of bookkeeping"}  # instead of what stands second
KINDS: dict[str, Callable[[bool], Rows]] = {f.__name__: f for f in (context, groups, queue, engines, ledger)}


def plot(found: dict[str, Rows], path: Path) -> None:
    figure, axes = plt.subplots(1, len(found), figsize=(3.4 * len(found), 3), squeeze=False)
    for axis, (kind, rows) in zip(axes[0], found.items(), strict=True):
        x, y = list(rows[0])[:2]
        y = PLOTTED.get(kind, y)
        axis.plot([row[y] for row in rows], "o-")
        axis.set(xlabel=x, ylabel=y, title=kind, ylim=(0, 1.1 * max(row[y] for row in rows)))
        axis.set_xticks(range(len(rows)), [f"{row[x]:,}" for row in rows], fontsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--quick", action="store_true", help="the first few sizes of each")
    args = parser.parse_args()
    found: dict[str, Rows] = {}
    wait_until_quiet()
    for kind in args.only:
        found[kind] = KINDS[kind](args.quick)
        print(f"{kind}\n{table(found[kind])}\n", flush=True)
    path = save("scaling", found, {})
    plot(found, RESULTS / "scaling.png")
    print(f"target: bookkeeping <= {TARGET_QUEUE:.0%} of a step at 10,000 queued\nwritten to {path}")


if __name__ == "__main__":
    main()
