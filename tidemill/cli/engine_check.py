"""Check of the engine that a recipe names: it is started as a run starts it, gets published weights, and samples.

start -> publish the folder's weights -> audit, if the engine can -> compare what it samples with the trainer
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tidemill.controller.sampling_check import SamplingReport, compare_sampling
from tidemill.core.errors import ConfigError, EngineFailed, PolicyMismatch
from tidemill.core.interfaces import Capabilities, Engine
from tidemill.core.types import SamplingParams, Version
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.models.hf_weights import load_folder
from tidemill.observability.diagnosis.mismatch import GROSS
from tidemill.run.planner.plan import plan_of
from tidemill.run.recipe import RunConfig
from tidemill.run.roles import build_engine
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings
from tidemill.weight_sync.sync_settings import SyncSettings
from tidemill.weight_sync.transport import make_sender

LONG_S = 1800.0  # deadline of the whole: a server takes a minute to start, and a large model's weights take their time
PROOFS = {
    "served": "after each update it compares the fingerprint of what it serves with the trainer's",
    "received": "it compares the fingerprint of what it received with the trainer's, and does not read back what it serves",
    "none": "it cannot show which weights it serves, so no run trains on what it samples",
}


@runtime_checkable
class Audits(Protocol):
    """An engine that reads back what it serves on demand."""

    async def audit(self) -> None:
        """Raise PolicyMismatch if what is served is not what was published."""
        ...


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """The findings about one engine."""

    kind: str
    proof: str  # a sentence on what its updates prove
    audit: str = ""  # the result of reading back what is served; "" if it cannot do that on demand
    sampling: SamplingReport | None = None
    fault: str = ""
    missing: str = ""  # why it could not be started: there is no verdict then

    @property
    def ok(self) -> bool:
        return not self.fault

    def data(self) -> dict[str, Any]:
        sampling = self.sampling.detail() if self.sampling else None
        told = {"kind": self.kind, "proof": self.proof, "audit": self.audit or None, "sampling": sampling}
        return told | {"fault": self.fault or None, "not_started": self.missing or None, "ok": self.ok}


async def check_engine(config: RunConfig, folder: Path) -> EngineCheck | None:
    """Check the recipe's engine on a model folder. None if the run has no engine to train on."""
    if config.offline:
        return None
    kind, settings, dtype = config.engine.kind_name, config.engine, plan_of(config).coarsest
    with tempfile.TemporaryDirectory(prefix="tidemill-parity-") as place:
        trained = TrainerSettings(device="cpu", serving_dtype=config.trainer.serving_dtype)
        sender = make_sender(SyncSettings(), Path(place))
        trainer = NativeTrainer(load_folder(folder), trained, steps=1, sender=sender)
        transport = SyncSettings().kind_name
        spec = EngineSpec(model=folder, engine=settings, transport=transport, logs=Path(place))
        can: Capabilities | None = None
        try:
            async with asyncio.timeout(LONG_S):
                engine = build_engine(spec)
                try:
                    can = await engine.capabilities()  # it has started
                    return await _checked(config, engine, can, trainer, dtype)
                finally:
                    await engine.close()
        except (ConfigError, EngineFailed, TimeoutError) as error:
            why = str(error).partition("\n")[0] or f"it took longer than {LONG_S:g} s"
            return EngineCheck(kind, "", missing=why) if can is None else EngineCheck(kind, PROOFS[can.proof], fault=why)
        finally:
            await trainer.close()


async def _checked(config: RunConfig, engine: Engine, can: Capabilities, trainer: NativeTrainer, dtype: str) -> EngineCheck:
    kind, audit = config.engine.kind_name, ""
    try:
        if "full" in can.updates.kinds:
            await engine.update(await trainer.publish(Version(0)))
        if isinstance(engine, Audits):
            await engine.audit()
            audit = "what it serves was read back, and is what was published"
    except PolicyMismatch as error:
        return EngineCheck(kind, PROOFS[can.proof], audit="what it serves is not what was published", fault=str(error))
    params = _params(config, can)
    sampled = engine.generate, trainer.forward, params, trainer.decoder.arch.vocab, "policy"
    report = await compare_sampling(*sampled, context=can.context)
    return EngineCheck(kind, PROOFS[can.proof], audit, report, report.fault(GROSS[dtype]))


def _params(config: RunConfig, can: Capabilities) -> SamplingParams:
    """The recipe's sampling, as far as this engine gives logprobs for it."""
    r = config.rollout
    temperature = r.temperature if can.samples_at is None else can.samples_at
    if not can.support:
        return SamplingParams(temperature=temperature)
    return SamplingParams(temperature=temperature, top_p=r.top_p, top_k=r.top_k, min_p=r.min_p)
