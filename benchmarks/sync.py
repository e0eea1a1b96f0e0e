"""How long weights take from a trainer to an engine, by transport and size, and what generation notices of it.

    python benchmarks/sync.py [--sizes S M L] [--dtype float32] [--repeats 7]

Copying is held against the machine's own memcpy of as many bytes, in the same run, and a checkpoint besides against a plain
file of as many bytes that is written to the same folder and synced; making and checking the fingerprints is reported apart.
Then an engine that generates all the time gets new versions from a sender in another process: the longest of its steps
beside an update is shown beside the longest of as many steps without one, and beside the median. Prints tables and writes
`results/sync.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import save, table, wait_until_quiet
from workloads import SIZES, decoder, kv_mb, prompts

from tidemill.core.types import GenerateRequest, SamplingParams, Version
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.models.hf_weights import empty_decoder, load_slices, serving_slices
from tidemill.models.served_weights import Contents
from tidemill.weight_sync.sync_settings import SyncSettings
from tidemill.weight_sync.transport import make_receiver, make_sender

TARGET_COPY, TARGET_PAUSE_S = 0.5, 0.005
WARM = 4  # versions: a transport has two slots, whose memory is new the first time that they are written, and then mapped
STEPS = 12  # without an update before the first one; then as many as the last one took
ROWS, MOST = 32, 1800  # that generate, and tokens of each
UPDATES = {"S": 12, "M": 12, "L": 3}


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def written(path: Path, data: np.ndarray) -> None:
    """A new file of these bytes, on the medium: what a checkpoint cannot be quicker than."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def carry(size: str, transport: str, dtype: torch.dtype, repeats: int, folder: Path) -> dict[str, Any]:
    source = decoder(size)
    target = empty_decoder(source.arch, dtype, torch.device("cpu")).requires_grad_(False)
    sender = make_sender(SyncSettings(transport=transport), folder)  # pyright: ignore
    receiver = make_receiver(transport)
    count = sum(p.numel() for p in source.parameters())
    flat = torch.ones(count * dtype.itemsize, dtype=torch.uint8)
    other = torch.zeros_like(flat)
    times: dict[str, list[float]] = {}
    for number in range(repeats + WARM):
        fingerprint_s, own = timed(lambda: Contents.of(source, dtype))
        version = Version(number, fingerprint=own.fingerprint)
        send_s, published = timed(lambda v=version: sender.send(v, serving_slices(source, dtype)))
        receive_s, _ = timed(lambda p=published: load_slices(target, receiver.receive(p)))
        memcpy_s, _ = timed(lambda: other.copy_(flat))
        taken = {"memcpy": memcpy_s, "fingerprint": fingerprint_s, "send": send_s, "receive": receive_s}
        if transport == "checkpoint":
            taken["disk"], _ = timed(lambda f=folder / f"plain-{number}": written(f, flat.numpy()))
            (folder / f"plain-{number - 2}").unlink(missing_ok=True)  # as many stay as of versions
        assert Contents.of(target, dtype).fingerprint == own.fingerprint
        if number >= WARM:
            for name, seconds in taken.items():
                times.setdefault(name, []).append(seconds)
    sender.close()
    receiver.close()
    middle = {name: statistics.median(values) for name, values in times.items()}
    gb = count * dtype.itemsize / 1e9
    row: dict[str, Any] = {"transport": transport, "model": size, "M params": count / 1e6, "MB": gb * 1e3}
    row |= {f"{name} ms": 1e3 * seconds for name, seconds in middle.items()}
    row |= {f"{name} GB/s": gb / middle[name] for name in ("memcpy", "send", "receive")}
    row |= {f"{name} / memcpy": middle["memcpy"] / middle[name] for name in ("send", "receive")}
    row["target"] = TARGET_COPY
    # Of the quickest: files are written to memory first, and a virtual machine may have to ask for it, which takes longer.
    return row | {"send / disk": min(times["disk"]) / min(times["send"])} if "disk" in times else row


def send_on_request(asked: Any, size: str, dtype: torch.dtype, folder: str) -> None:
    """The process of the sender: numbers of versions come, what was published goes back; None ends it."""
    torch.set_num_threads(1)
    source, sender = decoder(size), make_sender(SyncSettings(), Path(folder))
    while (number := asked.recv()) is not None:
        own = Contents.of(source, dtype)
        asked.send(sender.send(Version(number, fingerprint=own.fingerprint), serving_slices(source, dtype)))
    sender.close()


async def pause(size: str, dtype: torch.dtype, updates: int, asked: Any) -> dict[str, Any]:
    """The ends of the steps of an engine that is updated while it generates, by what happens beside them."""
    name = str(dtype).removeprefix("torch.")
    settings = EngineSettings(device="cpu", dtype=name, kv_memory_mb=kv_mb(size, name, (ROWS + 1) * 2048))
    first = Version(0, fingerprint=Contents.of(decoder(size), dtype).fingerprint)
    engine = NativeEngine(
        decoder(size), settings, receiver=make_receiver("shared_memory"), version=first, name="engine-0", eos_ids=()
    )
    assert engine._cache is not None
    engine._cache.kv.zero_()  # the pages of a run that goes on have been used before
    ends: list[float] = []
    step = engine._step

    def noted(cache: Any) -> None:
        step(cache)
        ends.append(time.perf_counter())

    engine._step = noted  # pyright: ignore
    params = SamplingParams(max_tokens=MOST, ignore_eos=True, seed=0)
    texts = [np.array(prompt, np.int32) for prompt in prompts(size, ROWS, 32, 0)]
    running = [
        asyncio.create_task(engine.generate(GenerateRequest(t, replace(params, seed=i), key=str(i))))
        for i, t in enumerate(texts)
    ]

    async def steps(count: int) -> None:
        until = len(ends) + count
        while len(ends) < until:
            if any(task.done() for task in running):
                raise RuntimeError(f"a sequence ended before the last update: {MOST} tokens are too few")
            await asyncio.sleep(0)

    gc.collect()
    gc.freeze()  # as a role does with what it has when it starts
    await steps(60)
    quiet: list[float] = []
    beside: list[list[float]] = []
    alone: list[float] = []
    count = STEPS
    for number in range(1, updates + WARM + 1):
        await steps(2)
        begin = len(ends)
        await steps(count)
        without = np.diff(ends[begin - 1 :])
        asked.send(number)
        while not asked.poll():
            await asyncio.sleep(0)
        published = asked.recv()
        await steps(2)
        begin = len(ends)
        await engine.update(published)
        await steps(1)
        during = np.diff(ends[begin - 1 :])
        count = len(during)
        if number > WARM:
            quiet.extend(without)
            alone.append(max(without))
            beside.append(during.tolist())
    commits = [span.end - span.start for span in (await engine.telemetry()).spans if span.name == "commit"]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await engine.close()
    usual, longest = statistics.median(quiet), [max(each) for each in beside]
    row: dict[str, Any] = {"model": size, "dtype": settings.dtype, "step ms": 1e3 * usual}
    row |= {"beside an update": 1e3 * statistics.median(gap for each in beside for gap in each)}
    row |= {
        "steps beside": statistics.median(map(len, beside)),
        "longest of as many": 1e3 * statistics.median(alone),
        "most": 1e3 * max(alone),
    }
    row |= {"longest beside an update": 1e3 * statistics.median(longest), "most then": 1e3 * max(longest)}
    row |= {"target": 1e3 * (usual + TARGET_PAUSE_S), "commit ms": 1e3 * statistics.median(commits)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", default=["S", "M", "L"], choices=SIZES)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    dtype, rows = getattr(torch, args.dtype), list[dict[str, Any]]()
    wait_until_quiet()
    for transport in ("shared_memory", "checkpoint"):
        for size in args.sizes:
            with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".sync-") as folder:
                rows.append(carry(size, transport, dtype, args.repeats, Path(folder)))
        print(table([row for row in rows if row["transport"] == transport]))
    pauses = []
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs = multiprocessing.Pipe()
            given = (theirs, size, dtype, folder)
            sender = multiprocessing.get_context("spawn").Process(target=send_on_request, args=given)
            sender.start()
            try:
                pauses.append(asyncio.run(pause(size, dtype, UPDATES[size], ours)))
            finally:
                ours.send(None)
                sender.join()
    print(table(pauses))
    print(f"written to {save('sync', {'transports': rows, 'pauses': pauses}, {'torch': torch.__version__})}")


if __name__ == "__main__":
    main()
