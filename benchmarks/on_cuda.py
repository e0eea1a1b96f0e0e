"""Decoding on a CUDA device against what its memory can deliver, on Qwen3's own shapes with random bfloat16 weights.

    python benchmarks/on_cuda.py [--sizes 0.6B 1.7B 8B] [--sequences 256] [--prompt 128] [--tokens 256] [--peer] [--profile]

The roofline of a decode step: every weight that it multiplies with read once, and every key and value that its rows see, at
the rate at which this device copies memory (bytes read and written, measured here). A step is the wall time between two
tokens, everything included: the plan, the kernels, sampling from the whole vocabulary, the record. "Steady": every row that
ends is followed at once by one with a new prompt, so that nearly every step has a prompt to compute. --peer: Hugging Face
`generate` of as many rows, by random weights of the same shapes. Prints a table and writes `results/on_cuda.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import save, table

from tidemill.core.types import GenerateRequest, LossSpec, Sample, SamplingParams, Version
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.models.architecture import Architecture
from tidemill.models.decoder import Decoder
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings
from tidemill.weight_sync.shared_memory_transport import SharedMemoryReceiver, SharedMemorySender

VOCAB, SIZE_OF_HEAD = 151_936, 128
SIZES = {  # layers, hidden, heads, key/value heads, intermediate, whether head and embedding are one
    "0.6B": (28, 1024, 16, 8, 3072, True),
    "1.7B": (28, 2048, 16, 8, 6144, True),
    "8B": (36, 4096, 32, 8, 12288, False),
}
STEADY_S = 3.0
TARGET = 0.6  # of the roofline, at 256 sequences


def description(size: str, context: int) -> dict[str, Any]:
    layers, hidden, heads, kv_heads, intermediate, tied = SIZES[size]
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": SIZE_OF_HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
    }


@torch.no_grad()
def decoder(size: str, context: int, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    with torch.device("cuda"):
        torch.set_default_dtype(dtype)
        model = Decoder(Architecture.from_dict(description(size, context)))
        torch.set_default_dtype(torch.float32)
        generator = torch.Generator("cuda").manual_seed(0)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
    return model


def copy_rate() -> float:
    """Bytes a second, read and written, of a copy that no cache holds."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    into = torch.empty_like(source)
    seconds = []
    for _ in range(12):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        into.copy_(source)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return 2 * source.nbytes / statistics.median(seconds)


def step_bytes(model: Decoder, rows: int, length: float) -> float:
    """What a decode step must read: matrices once (of the embedding only its rows), and keys and values once a row."""
    arch, width = model.arch, model.embed.weight.element_size()
    read = sum(p.numel() for p in model.layers.parameters()) + model.head_weight.numel() + rows * arch.hidden
    return width * (read + rows * length * arch.layers * arch.kv_heads * 2 * arch.head_dim)


async def ours(model: Decoder, args: argparse.Namespace, profile: str | None) -> dict[str, Any]:
    settings = EngineSettings(
        dtype="bfloat16", device="cuda", max_sequences=args.sequences, context=args.prompt + args.tokens, prefill_chunk=8192
    )
    begin = time.perf_counter()
    engine = NativeEngine(model, settings, receiver=None, version=Version(0), name="cuda", eos_ids=())
    built = time.perf_counter() - begin
    rng = np.random.default_rng(0)

    async def all_at_once(tokens: int, seed: int) -> tuple[float, list[tuple[float, int]]]:
        times: list[tuple[float, int]] = []
        prompts = rng.integers(0, VOCAB, (args.sequences, args.prompt)).astype(np.int32)
        each = [SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed + i) for i in range(args.sequences)]

        async def watch() -> None:
            before = -1.0
            while True:
                if (now := engine.progress()) != before:
                    stats = await engine.stats()
                    times.append((time.perf_counter(), stats.generated))
                    before = now
                await asyncio.sleep(0)

        watcher = asyncio.create_task(watch())
        start = time.perf_counter()
        done = await asyncio.gather(
            *(
                engine.generate(GenerateRequest(p, how, key=f"{seed}/{i}"))
                for i, (p, how) in enumerate(zip(prompts, each, strict=True))
            )
        )
        seconds = time.perf_counter() - start
        watcher.cancel()
        assert all(np.isfinite(c.logprobs).all() and len(c.tokens) == tokens for c in done)
        return seconds, times

    first, _ = await all_at_once(8, 0)  # compiles and warms up
    if profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as traced:
            await all_at_once(24, 10_000)
        print(kernels(traced))
    seconds, times = await all_at_once(args.tokens, 20_000)
    steady, counts = list[list[float]](), list[float]()
    decoding = asyncio.create_task(_decode_on(engine, args, steady, fresh=True))
    for _ in range(2):  # the first one is until all are under way, and the shapes of steps recorded
        await asyncio.sleep(STEADY_S)
        counts.append((await engine.stats()).generated)
        steady.append([])
    decoding.cancel()
    await asyncio.wait([decoding])
    gaps = [
        1e3 * (b[0] - a[0]) for a, b in itertools.pairwise(times) if b[1] - a[1] == args.sequences
    ]  # of steps in which every row decodes
    await engine.close()
    return {
        "seconds": seconds,
        "step ms": statistics.median(gaps),
        "steps": len(gaps),
        "first s": first,
        "built s": built,
        "steady tok/s": (counts[1] - counts[0]) / STEADY_S,
        "steady step ms": statistics.median(steady[1]),
        "length": args.prompt + args.tokens - len(gaps) / 2,
    }


def kernels(traced: torch.profiler.profile) -> str:
    """What took the device's time, the longest first."""
    found = sorted(traced.key_averages(), key=lambda each: -each.self_device_time_total)[:30]
    return table(
        [
            {
                "ms": e.self_device_time_total / 1e3,
                "calls": e.count,
                "us each": e.self_device_time_total / e.count,
                "": e.key[:90],
            }
            for e in found
        ]
    )


async def training(model: Decoder, args: argparse.Namespace, checkpointing: bool) -> dict[str, Any]:
    """One optimizer step over groups that share a prompt, in bfloat16 autocast with float32 weights."""
    settings = TrainerSettings(
        device="cuda", dtype="bfloat16", micro_batch_tokens=args.micro_batch, checkpointing=checkpointing, lr=1e-6
    )
    trainer = NativeTrainer(model, settings, steps=100)
    rng = np.random.default_rng(0)
    total = args.prompt + args.tokens
    samples = []
    for group in range(args.sequences // 8):
        prompt = rng.integers(0, VOCAB, args.prompt)
        for _ in range(8):
            sampled = np.arange(total) >= args.prompt
            samples.append(
                Sample(
                    tokens=np.concatenate((prompt, rng.integers(0, VOCAB, args.tokens))).astype(np.int32),
                    mask=sampled,
                    logprobs=np.where(sampled, -11.9, 0.0).astype(np.float32),
                    versions=np.where(sampled, 0, -1).astype(np.int32),
                    advantages=np.where(sampled, rng.normal(), 0.0).astype(np.float32),
                    weights=sampled.astype(np.float32),
                    group=group,
                )
            )
    seconds = []
    for _ in range(args.repeats + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        await trainer.forward_backward(samples, {"policy": LossSpec("reinforce")})
        await trainer.apply(1e-4)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    if args.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as traced:
            await trainer.forward_backward(samples, {"policy": LossSpec("reinforce")})
            await trainer.apply(1e-4)
            torch.cuda.synchronize()
        print(kernels(traced))
    await trainer.close()
    run = len(samples) * args.tokens + len(samples) // 8 * args.prompt
    took = statistics.median(seconds[1:])
    return {
        "step s": took,
        "tok/s": run / took,
        "TFLOP/s": 6 * sum(p.numel() for p in model.parameters()) * run / took / 1e12,
        "peak GB": torch.cuda.max_memory_allocated() / 1e9,
    }


@torch.inference_mode()
def theirs(size: str, args: argparse.Namespace) -> dict[str, Any]:
    import transformers

    config = transformers.Qwen3Config(**description(size, args.prompt + args.tokens))
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.Qwen3ForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    batch = torch.randint(0, VOCAB, (args.sequences, args.prompt), device="cuda")
    tokens = min(args.tokens, 64)

    def run(count: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model.generate(batch, attention_mask=torch.ones_like(batch), do_sample=True, top_k=0, max_new_tokens=count,
                       min_new_tokens=count)  # fmt: skip
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    run(2)
    return {"step ms": 1e3 * (run(tokens) - run(1)) / (tokens - 1)}


async def updating(size: str, args: argparse.Namespace) -> dict[str, Any]:
    """New weights from a trainer to an engine in this process, through shared memory, each proven by both."""
    model = decoder(size, args.prompt + args.tokens, torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainerSettings(device="cuda", serving_dtype="bfloat16")
        trainer = NativeTrainer(model, settings, steps=100, sender=SharedMemorySender(Path(folder)))
        served = decoder(size, args.prompt + args.tokens)
        engine_settings = EngineSettings(
            dtype="bfloat16", device="cuda", max_sequences=64, context=args.prompt + args.tokens
        )
        engine = NativeEngine(
            served, engine_settings, receiver=SharedMemoryReceiver(), version=Version(0), name="cuda", eos_ids=()
        )
        sent, staged, size_of, gaps = [], [], 0, list[list[float]]()
        decoding = asyncio.create_task(_decode_on(engine, args, gaps))
        for step in range(1, args.repeats + 2):
            await asyncio.sleep(0.5)
            with torch.no_grad():
                model.norm.weight.mul_(1.25)
            gaps.append([])  # those while the trainer, in this one process, publishes
            begin = time.perf_counter()
            published = await trainer.publish(Version(step))
            sent.append(time.perf_counter() - begin)
            await asyncio.sleep(0.1)  # what waited for that has its step
            gaps.append([])  # those during this update
            begin = time.perf_counter()
            await engine.update(published)
            staged.append(time.perf_counter() - begin)
            gaps.append([])
            size_of = published.bytes
        decoding.cancel()
        await asyncio.wait([decoding])
        spans = [span for span in (await engine.telemetry()).spans if span.name in ("stage", "commit")]
        await trainer.close()
        await engine.close()
    pauses = [1e3 * (span.end - span.start) for span in spans if span.name == "commit"]
    return {
        "GB": size_of / 1e9,
        "publish s": statistics.median(sent[1:]),
        "update s": statistics.median(staged[1:]),
        "stage s": statistics.median([span.end - span.start for span in spans if span.name == "stage"][1:]),
        "commit ms": statistics.median(pauses[1:]),
        "decode step ms": statistics.median([gap for part in gaps[0::3] for gap in part]),
        "longest beside an update ms": statistics.median([max(part) for part in gaps[2::3] if part][1:]),
        "longest of others ms": statistics.median([max(part) for part in gaps[0::3] if part][1:]),
    }


async def _decode_on(engine: NativeEngine, args: argparse.Namespace, gaps: list[list[float]], fresh: bool = False) -> None:
    """Rows that decode while this runs, and do not end together; times between two steps go to the last of `gaps`. They all
    begin with one prompt, or each with a `fresh` one."""
    gaps.append([])
    rng, prompt = np.random.default_rng(1), np.arange(args.prompt, dtype=np.int32)

    async def row(number: int) -> None:
        for again in itertools.count():
            tokens = args.tokens if again else 1 + args.tokens * number // engine.settings.max_sequences
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=again * 1000 + number)
            given = rng.integers(0, VOCAB, args.prompt).astype(np.int32) if fresh else prompt
            await engine.generate(GenerateRequest(given, params, key=f"{number}/{again}"))

    rows = [asyncio.create_task(row(number)) for number in range(engine.settings.max_sequences)]
    try:
        before, since = engine.progress(), time.perf_counter()
        while True:
            await asyncio.sleep(0)
            if (now := engine.progress()) != before:
                gaps[-1].append(1e3 * (time.perf_counter() - since))
                before, since = now, time.perf_counter()
    finally:
        for each in rows:
            each.cancel()


def train(args: argparse.Namespace) -> None:
    rows = []
    args.sequences = args.sequences[0]
    for size in args.sizes:
        for checkpointing in (False, True):
            torch.cuda.reset_peak_memory_stats()
            model = decoder(size, args.prompt + args.tokens, torch.float32)
            row = {"model": size, "checkpointing": checkpointing}
            rows.append(row | asyncio.run(training(model, args, checkpointing)))
            print(table([rows[-1]]), flush=True)
            del model
            gc.collect()
            torch.cuda.empty_cache()
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "given": vars(args)}
    print(table(rows))
    print(f"written to {save('on_cuda-train', rows, about)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--sequences", nargs="+", type=int, default=[256])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--peer", action="store_true", help="Hugging Face generate beside it")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--train", action="store_true", help="a trainer's step instead")
    parser.add_argument("--sync", action="store_true", help="an update of the weights instead")
    parser.add_argument("--micro-batch", type=int, default=16384, help="tokens, of a trainer's step")
    parser.add_argument("--repeats", type=int, default=3, help="of a trainer's step")
    args = parser.parse_args()
    if args.train:
        return train(args)
    if args.sync:
        rows = [{"model": size} | asyncio.run(updating(size, args)) for size in args.sizes]
        print(table(rows))
        print(
            f"written to {save('on_cuda-sync', rows, {'device': torch.cuda.get_device_name(), 'torch': torch.__version__})}"
        )
        return None
    rate = copy_rate()
    rows = []
    counts = args.sequences
    for size in args.sizes:
        for args.sequences in counts:
            model = decoder(size, args.prompt + args.tokens)
            found = asyncio.run(ours(model, args, "cuda" if args.profile else None))
            floor = 1e3 * step_bytes(model, args.sequences, found["length"]) / rate
            row: dict[str, Any] = {"model": size, "rows": args.sequences, "step ms": found["step ms"], "roofline ms": floor}
            row |= {"share": floor / found["step ms"], "target": TARGET if args.sequences == 256 else ""}
            row |= {"tok/s": args.sequences * args.tokens / found["seconds"], "first s": found["first s"]}
            row |= {name: found[name] for name in ("steady tok/s", "steady step ms")}
            del model
            gc.collect()
            torch.cuda.empty_cache()
            if args.peer:
                row["transformers step ms"] = theirs(size, args)["step ms"]
                gc.collect()
                torch.cuda.empty_cache()
            rows.append(row)
            print(table([row]), flush=True)
    about = {"device": torch.cuda.get_device_name(), "copy GB/s": rate / 1e9, "torch": torch.__version__}
    print(about)
    print(table(rows))
    print(f"written to {save('on_cuda', rows, about)}")


if __name__ == "__main__":
    main()
