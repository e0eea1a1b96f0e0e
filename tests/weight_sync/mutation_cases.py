"""Publications broken on purpose: a trainer and an engine in this process, or a whole run around them.

Both are real, with the pool's publisher between them, and so are their steps and their transport. `Steps` calls them as the
controller does, one after the other: it costs a hundredth of `Run`, which has the controller, the ledger and all the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch

from tidemill.controller.engine_pool import EnginePool, Member, PoolPublisher
from tidemill.core.chat_interface import Chat
from tidemill.core.config import build
from tidemill.core.errors import PolicyMismatch, TransferFailed
from tidemill.core.interfaces import Capabilities
from tidemill.core.types import LossSpec, Outcome, Sample, Score, Task, Trajectory, Version
from tidemill.core.weight_update import WeightUpdate
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.engine.verified_weights import received_weights
from tidemill.ledger.ledger import SqliteLedger
from tidemill.models.adapter_config import AdapterConfig
from tidemill.models.decoder import Decoder
from tidemill.models.lora import attach
from tidemill.models.new_model import SIZES, architecture
from tidemill.models.weight_slices import Receiver
from tidemill.observability.console import ProgressDisplay
from tidemill.run.recipe import RunConfig
from tidemill.run.session import run
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings
from tidemill.weight_sync.sync_settings import SyncSettings
from tidemill.weight_sync.transport import make_receiver, make_sender

SICK, STEPS = 2, 3  # the version with which a mutation sets in, and the steps of a run without one
TRANSPORTS = ("shared_memory", "checkpoint", "collective", "direct")
VOCAB = 24


class Checksum:
    """A reward by every character, so that siblings differ and every step has a gradient."""

    name = "checksum"

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"{split}-{i}", f"{split} {i}") for i in range(8)]

    async def run(self, task: Task, chat: Chat) -> Score:
        return Score(crc32((await chat.reply(task.prompt)).encode()) % 1000 / 1000)

    async def judge(self, task: Task, attempts: list[Trajectory]) -> list[Outcome]:
        return []

    async def close(self) -> None: ...


@dataclass
class Published:
    """The course of a run up to now; a mutation sets in with version `SICK`."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    publishing: int = -1
    applied: int = 0

    @property
    def sick(self) -> bool:
        return self.publishing >= SICK

    def ended_steps(self) -> int:
        raise NotImplementedError

    def versions(self) -> list[int]:
        """The versions that are recorded as served."""
        raise NotImplementedError


class Receiving:
    """What an engine does with an update before anything is loaded: its rank's own part, without a server."""

    def __init__(self, receiver: Receiver, by: str) -> None:
        self._receiver, self._by = receiver, by

    async def capabilities(self) -> Capabilities:
        return Capabilities(48, updates=self._receiver.takes)

    async def update(self, update: WeightUpdate) -> Version:
        return await asyncio.to_thread(self._vllm if self._by == "vllm" else self._server, update)

    def _server(self, update: WeightUpdate) -> Version:  # of sglang and transformers
        received_weights(self._receiver, update, "engine-0")
        return update.version

    def _vllm(self, update: WeightUpdate) -> Version:
        from tidemill_vllm.received_weights import ReceivedUpdate

        received = ReceivedUpdate(update.for_process(0), self._receiver)
        received.wait()
        if received.error:
            raise TransferFailed(received.error) if received.lost else PolicyMismatch(received.error)
        return update.version

    async def close(self) -> None: ...


@dataclass
class Steps(Published):
    """Publish, compute a gradient, step: as the controller does, which ends with the first error."""

    served: list[int] = field(default_factory=list)
    engine: NativeEngine | None = None  # from its start on
    engines_model: Callable[[Decoder], None] = lambda model: None  # changes the model that the engine is given

    def until(
        self,
        transport: str,
        *,
        engine: dict[str, Any] | None = None,
        full_every: int = 1,
        by: str = "native",
        lora: AdapterConfig | None = None,
    ) -> int:
        """Take all steps; their number.

        by: what receives, the native engine or what engines with servers have. lora: train an adapter, and send it alone."""
        asyncio.run(self._go(transport, engine or {}, full_every, by, lora))
        return self.applied

    async def _go(
        self, transport: str, engine: dict[str, Any], full_every: int, by: str, lora: AdapterConfig | None
    ) -> None:
        arch = architecture(SIZES["0.1m"], vocab=VOCAB, context=48, ends={})
        models = [Decoder(arch), Decoder(arch)]
        for model in models:
            model.initialise(torch.Generator().manual_seed(0))
        sync = SyncSettings(transport=transport, full_every=full_every)  # type: ignore[arg-type]
        settings = TrainerSettings(device="cpu", lr=1e-2)
        sender = make_sender(sync, self.folder / "weights")
        if lora is not None:
            attach(models[0], lora, torch.Generator().manual_seed(1))
        self.engines_model(models[1])
        trainer = NativeTrainer(models[0], settings, steps=STEPS, sender=sender, lora=lora, adapter_alone=lora is not None)
        chosen, receiver = EngineSettings(device="cpu", max_sequences=4, **engine), make_receiver(transport)
        served: Any = Receiving(receiver, by)
        if by == "native":
            how: dict[str, Any] = {"version": Version(-1), "name": "engine-0", "eos_ids": (), "adapted": lora is not None}
            served = self.engine = NativeEngine(models[1], chosen, receiver=receiver, **how)
        try:
            pool = EnginePool([Member("engine-0", served, await served.capabilities())])
            publisher = PoolPublisher(trainer, pool)
            for step in range(STEPS + 1):
                self.publishing = step
                async with asyncio.timeout(60):
                    self.served.append((await publisher.publish(Version(step))).step)
                if step < STEPS:
                    await trainer.forward_backward(_rows(step), {"policy": LossSpec("cross_entropy")})
                    await trainer.apply(1.0)
                    self.applied += 1
        finally:
            await served.close()
            await trainer.close()

    def ended_steps(self) -> int:
        return self.applied

    def versions(self) -> list[int]:
        return self.served


def _rows(step: int) -> list[Sample]:
    tokens = np.random.default_rng(step).integers(0, VOCAB, 12).astype(np.int32)
    nothing = np.zeros(len(tokens), np.float32)
    return [Sample(tokens, nothing > 0, nothing, tokens * 0 - 1, nothing, (np.arange(12) > 0).astype(np.float32))]


@dataclass
class Run(Published):
    """A whole run, inline: controller, trainer, engine, transport and ledger."""

    model: Path = Path()

    def until(self, transport: str, *, full_every: int = 1, **settings: Any) -> int:
        """Train to the end; the steps done."""
        self._watch()
        tree = {
            "run_dir": str(self.folder / "run"),
            "model": str(self.model),
            "env": {"kind": "python", "path": "checksum:Checksum"},
            "steps": STEPS,
            "max_lag": 1,
            "placement": {"kind": "inline", "sync": {"transport": transport, "full_every": full_every}},
            "rollout": {"groups": 2, "group_size": 2, "max_tokens": 3},
            "eval": {"every": 0, "tasks": 1, "final_tasks": 1},
            "trainer": {"lr": 1e-2},
            "record": {"checkpoint_every": 0, "trace": False},
        }
        config = build(RunConfig, {**tree, **settings})
        return asyncio.run(run(config, ProgressDisplay(STEPS, mode="quiet"), make=lambda *_: Checksum())).steps

    def _watch(self) -> None:
        publish, apply = NativeTrainer.publish, NativeTrainer.apply

        async def watched_publish(trainer: NativeTrainer, version: Version, full: bool = False) -> WeightUpdate:
            self.publishing = version.step
            return await publish(trainer, version, full)

        async def watched_apply(trainer: NativeTrainer, scale: float) -> Any:
            self.applied += 1
            return await apply(trainer, scale)

        self.monkeypatch.setattr(NativeTrainer, "publish", watched_publish)
        self.monkeypatch.setattr(NativeTrainer, "apply", watched_apply)

    def ended_steps(self) -> int:
        with SqliteLedger(self.folder / "run", mode="read") as ledger:
            return sum(step.ended_at is not None for step in ledger.steps())

    def versions(self) -> list[int]:
        with SqliteLedger(self.folder / "run", mode="read") as ledger:
            return [version.step for version in ledger.versions()]


def assert_nothing_after(seen: Published) -> None:
    assert seen.publishing == SICK, "the mutation was never reached"
    assert seen.applied == seen.ended_steps() == SICK, "a gradient step was taken after the mutation"
    assert seen.versions() == list(range(SICK)), "a version that was mutated is recorded as served"
