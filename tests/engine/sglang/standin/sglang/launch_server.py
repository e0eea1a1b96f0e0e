"""The fake server as a process, by the command that starts the real one. Unknown options end it, as there."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser
from pathlib import Path

from engine.sglang.fake_sglang import running

VALUES = ("grammar-backend", "attention-backend", "sampling-backend", "host", "dtype", "device", "tp-size")
FLAGS = (
    *("disable-prefill-cuda-graph", "disable-decode-cuda-graph", "disable-radix-cache", "skip-tokenizer-init"),
    *("disable-overlap-schedule", "incremental-streaming-output"),
)


async def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--model-path", type=Path, required=True)
    for name in ("port", "context-length", "max-running-requests", "max-total-tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in VALUES:
        parser.add_argument(f"--{name}")
    for name in FLAGS:
        parser.add_argument(f"--{name}", action="store_true")
    given = parser.parse_args()
    async with running(
        given.model_path,
        given.port,
        context=given.context_length,
        running=given.max_running_requests,
        incremental=given.incremental_streaming_output,
        overlap=not given.disable_overlap_schedule,
        disable_radix_cache=given.disable_radix_cache,
    ):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
