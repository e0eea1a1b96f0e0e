"""How long weights take from a trainer to an engine, by carrier and size, and what generation notices of it.

    python benchmarks/sync.py [--sizes S M L] [--dtype float32] [--repeats 7]

Copying is held against the machine's own memcpy of as many bytes, in the same run; making and checking the fingerprints is
reported apart. Then an engine that generates all the time gets new versions: the longest pause between two of its steps is
shown beside the median. Prints tables and writes `results/sync.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import save, table
from workloads import SIZES, decoder, prompts

from tidemill.engine.core import NativeEngine
from tidemill.engine.settings import EngineSettings
from tidemill.models.served import Contents
from tidemill.models.weights import empty_decoder, load_slices, serving_slices
from tidemill.sync.carriers import make_receiver, make_sender
from tidemill.sync.settings import SyncSettings
from tidemill.types import SamplingParams, Version

TARGET_COPY, TARGET_PAUSE_S = 0.5, 0.005


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def carry(size: str, carrier: str, dtype: torch.dtype, repeats: int, folder: Path) -> dict[str, Any]:
    source = decoder(size)
    target = empty_decoder(source.arch, dtype, torch.device("cpu")).requires_grad_(False)
    sender = make_sender(SyncSettings(carrier=carrier), folder)  # pyright: ignore
    receiver = make_receiver(carrier)
    count = sum(p.numel() for p in source.parameters())
    flat = torch.ones(count * dtype.itemsize, dtype=torch.uint8)
    other = torch.zeros_like(flat)
    times: dict[str, list[float]] = {"memcpy": [], "fingerprint": [], "send": [], "receive": []}
    for number in range(repeats + 2):  # the first two warm up: a carrier has two slots
        fingerprint_s, own = timed(lambda: Contents.of(source, dtype))
        version = Version(number, fingerprint=own.fingerprint)
        send_s, published = timed(lambda v=version: sender.send(v, serving_slices(source, dtype)))
        receive_s, _ = timed(lambda p=published: load_slices(target, receiver.receive(p)))
        memcpy_s, _ = timed(lambda: other.copy_(flat))
        assert Contents.of(target, dtype).fingerprint == own.fingerprint
        if number >= 2:
            for name, seconds in zip(times, (memcpy_s, fingerprint_s, send_s, receive_s), strict=True):
                times[name].append(seconds)
    sender.close()
    receiver.close()
    middle = {name: statistics.median(values) for name, values in times.items()}
    gb = count * dtype.itemsize / 1e9
    row: dict[str, Any] = {"carrier": carrier, "model": size, "M params": count / 1e6, "MB": gb * 1e3}
    row |= {f"{name} ms": 1e3 * seconds for name, seconds in middle.items()}
    row |= {f"{name} GB/s": gb / middle[name] for name in ("memcpy", "send", "receive")}
    return row | {"send / memcpy": middle["memcpy"] / middle["send"], "target": TARGET_COPY}


async def pause(size: str, dtype: torch.dtype, updates: int, folder: Path) -> dict[str, Any]:
    """Between the ends of two steps of an engine that is updated while it generates."""
    source = decoder(size)
    sender = make_sender(SyncSettings(), folder)
    settings = EngineSettings(device="cpu", dtype=str(dtype).removeprefix("torch."))
    first = Contents.of(source, dtype).fingerprint
    engine = NativeEngine(
        decoder(size),
        settings,
        receiver=make_receiver("shared_memory"),
        version=Version(0, fingerprint=first),
        name="engine-0",
        eos_ids=(),
    )
    ends: list[float] = []
    step = engine._step

    def noted(cache: Any) -> None:
        step(cache)
        ends.append(time.perf_counter())

    engine._step = noted  # pyright: ignore
    params = SamplingParams(max_tokens=1500, ignore_eos=True, seed=0)
    texts = [np.array(prompt, np.int32) for prompt in prompts(size, 32, 32, 0)]
    running = [
        asyncio.create_task(engine.generate(t, replace(params, seed=i), "policy", str(i))) for i, t in enumerate(texts)
    ]
    while len(ends) < 30:
        await asyncio.sleep(0)
    spans: list[tuple[float, float]] = []
    for number in range(1, updates + 1):
        own = Contents.of(source, dtype)
        published = sender.send(Version(number, fingerprint=own.fingerprint), serving_slices(source, dtype))
        begin = time.perf_counter()
        await engine.update(published)
        spans.append((begin, time.perf_counter()))
        for _ in range(20):
            await asyncio.sleep(0)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await engine.close()
    sender.close()
    gaps = np.diff(ends)
    during = np.array([any(a <= end and begin <= b for a, b in spans) for begin, end in pairwise(ends)])
    quiet, worst = float(np.median(gaps[~during])), float(gaps[during].max())
    row = {"model": size, "step ms": 1e3 * quiet, "step while staging ms": 1e3 * float(np.median(gaps[during]))}
    return row | {"longest pause ms": 1e3 * worst, "target": 1e3 * (quiet + TARGET_PAUSE_S)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", default=["S", "M", "L"], choices=SIZES)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    dtype, rows = getattr(torch, args.dtype), []
    for carrier in ("shared_memory", "checkpoint"):
        for size in args.sizes:
            with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".sync-") as folder:
                rows.append(carry(size, carrier, dtype, args.repeats, Path(folder)))
    print(table(rows))
    pauses = []
    for size in args.sizes[:2]:
        with tempfile.TemporaryDirectory() as folder:
            pauses.append(asyncio.run(pause(size, dtype, 8, Path(folder))))
    print(table(pauses))
    print(f"written to {save('sync', {'carriers': rows, 'pauses': pauses}, {'torch': torch.__version__})}")


if __name__ == "__main__":
    main()
