"""Gradients and updates by one or several ranks, in their processes. See `harness.py`. A request is a number of steps."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from serve import given, serve

from tidemill.core.config import build
from tidemill.core.types import LossSpec, Sample
from tidemill.run.roles import start_trainer
from tidemill.runtime.local import Local
from tidemill.runtime.placement import Liveness, Resources
from tidemill.trainer.trainer_kinds import TRAINERS, TrainerSpec
from tidemill.weight_sync.sync_settings import SyncSettings

wanted = given()
HERE = Path(__file__).with_name("counted_trainer.py")
TRAINERS.register("counted", f"{HERE}:CountedSettings", f"{HERE}:build")
LOSSES = {"policy": LossSpec("ppo_clip", {"clip_low": 0.2, "clip_high": 0.2})}


def batch(seed: int) -> list[Sample]:
    """Groups of replies to one prompt each, as in a step of GRPO."""
    rng, found = np.random.default_rng(seed), []
    for group in range(wanted["groups"]):
        prompt = rng.integers(0, wanted["vocab"], wanted["prompt"])
        for attempt in range(wanted["samples"]):
            tokens = np.concatenate([prompt, rng.integers(0, wanted["vocab"], wanted["tokens"])]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt)
            some = mask.astype(np.float32)
            logprobs, advantages = -some * np.float32(np.log(wanted["vocab"])), some * np.float32(rng.normal())
            versions = np.where(mask, 0, -1).astype(np.int32)
            found.append(Sample(tokens, mask, logprobs, versions, advantages, some, group=group, attempt=attempt))
    return found


class Trained:
    """A trainer in processes of its own, in an event loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._placement = Local(self._folder / "logs", liveness=Liveness())
        self._handle = self._loop.run_until_complete(self._start())

    async def _start(self) -> Any:
        settings = {"kind": "counted", "device": "cpu"} | {key: wanted[key] for key in ("dtype", "ranks", "shard")}
        common: dict[str, Any] = {
            "model": wanted["model"],
            "trainer": settings | {"micro_batch_tokens": wanted["micro_batch"], "lr": 1e-6},
            "steps": 10_000,
            "checkpoints": False,
            "sync": SyncSettings(),
            "folder": self._folder / "weights",
            "threads": wanted["threads"] if wanted["ranks"] == 1 else 1,
        }
        names = ["trainer", *(f"trainer-{rank}" for rank in range(1, wanted["ranks"]))]
        specs = [build(TrainerSpec, common | {"name": name}) for name in names]
        return await start_trainer(self._placement, specs, [Resources(wanted["threads"])] * len(specs))

    def answer(self, steps: int) -> dict[str, float]:
        return self._loop.run_until_complete(self._answer(steps))

    async def _answer(self, steps: int) -> dict[str, float]:
        trainer, samples = self._handle.proxy, batch(steps)
        before = (await trainer.telemetry()).counters.get("sent_bytes", 0.0)
        begin = time.perf_counter()
        for _ in range(steps):
            result = await trainer.forward_backward(samples, LOSSES)
            await trainer.apply(1 / result.metrics["tokens"])
        seconds = time.perf_counter() - begin
        sent = (await trainer.telemetry()).counters.get("sent_bytes", 0.0) - before
        return {"seconds": seconds, "tokens": result.metrics["tokens"] * steps, "sent": sent / steps / wanted["ranks"]}


serve({}, Trained().answer)
