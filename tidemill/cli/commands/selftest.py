"""The doctor's self-test: uses a tiny model and a scoring worker as a run would."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import torch

from tidemill.cli.commands.doctor import DoctorFinding
from tidemill.cli.logprob_sources import sample_of
from tidemill.core.interfaces import Engine, Trainer
from tidemill.core.types import Array, GenerateRequest, Sample, SamplingParams, Score, Version
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.models.kernels.library import why_not, why_not_gpu
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.observability.diagnosis.mismatch import SAME, LogprobComparison
from tidemill.run.roles import build_engine, build_trainer
from tidemill.runtime.workers import keeper
from tidemill.trainer.trainer_kinds import TrainerSettings, TrainerSpec
from tidemill.weight_sync.sync_settings import SyncSettings

REWARD = "tidemill.envs.rewards.functions:exact"
PROMPTS, REPLY = 4, 16  # sequences, and tokens sampled for each
REPORT = "this is a fault of the program or of its libraries: please report it with this output"


def cuda_devices() -> DoctorFinding:
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return DoctorFinding("CUDA", "ok", "none: this PyTorch is built for the CPU")
        return DoctorFinding("CUDA", "warn", "no device is visible", "where there is one, check the driver with nvidia-smi")
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return DoctorFinding("CUDA", "ok", ", ".join(f"{d.name} ({d.total_memory / 2**30:.0f} GiB)" for d in devices))


def kernels() -> DoctorFinding:
    """The compiled kernels. Without them everything works, but engines are slower."""
    if why := why_not():
        return DoctorFinding(
            "kernels", "warn", f"not compiled: {why}", "install gcc or clang: engines on the CPU are faster"
        )
    if not torch.cuda.is_available():
        return DoctorFinding("kernels", "ok", "compiled for this processor")
    if why := why_not_gpu():
        fix = "install triton and gcc or clang: engines on the device are several times as fast"
        return DoctorFinding("kernels", "warn", f"compiled for this processor; none for the CUDA device: {why}", fix)
    return DoctorFinding("kernels", "ok", "compiled for this processor and for the CUDA device")


async def self_test(folder: Path) -> list[DoctorFinding]:
    """Run the self-test. folder: an empty one, to be removed afterwards."""
    model, findings = folder / "model", []
    try:
        fresh_model(model, alphabet="abcdefghijklmnopqrstuvwxyz \n", context=64, **SIZES["0.1m"])
        settings = TrainerSettings(device="cpu")
        spec = TrainerSpec(model=model, trainer=settings, steps=1, sync=SyncSettings(), folder=folder)
        trainer = build_trainer(spec, offload=False)
        engine = build_engine(EngineSpec(model=model, engine=EngineSettings(device="cpu"), transport="shared_memory"))
    except Exception as error:  # this command is there to find any error
        return [DoctorFinding("model", "fail", f"{type(error).__name__}: {error}", REPORT)]
    try:
        findings.append(await _attempt("weights", lambda: carry_weights(trainer, engine)))
        if findings[-1].status == "ok":
            findings.append(await _attempt("parity", lambda: compare(trainer, engine)))
    finally:
        await engine.close()
        await trainer.close()
    findings.append(await _attempt("scoring", score_once))
    return findings


async def carry_weights(trainer: Trainer, engine: Engine) -> DoctorFinding:
    """Carry weights through shared memory; the engine computes the fingerprint anew."""
    begin = time.monotonic()
    published = await trainer.publish(Version(0))
    served = await engine.update(published)
    spent, size = time.monotonic() - begin, published.bytes / 2**20
    if served != published.version:
        return DoctorFinding("weights", "fail", f"the engine serves {served}, published was {published.version}", REPORT)
    return DoctorFinding("weights", "ok", f"{size:.1f} MiB through shared memory in {1000 * spent:.0f} ms, same fingerprint")


async def compare(trainer: Trainer, engine: Engine) -> DoctorFinding:
    """Compare the engine's logprobs of sampled tokens with the trainer's."""
    compared, replies = LogprobComparison("self-test", "engine - trainer", SAME), list[tuple[Sample, Array]]()
    for row in range(PROMPTS):
        prompt = np.arange(3, 8 + 3 * row, dtype=np.int32)
        params = SamplingParams(max_tokens=REPLY, ignore_eos=True, seed=row)
        reply = await engine.generate(GenerateRequest(prompt, params, key=f"doctor-{row}"))
        tokens = np.concatenate([prompt, reply.tokens])
        replies.append((sample_of(tokens, np.arange(len(tokens)) >= len(prompt)), reply.logprobs))
    own = await trainer.forward([sample for sample, _ in replies])
    for values, (sample, logprobs) in zip(own, replies, strict=True):
        compared.add(logprobs, values[sample.mask], np.flatnonzero(sample.mask))
    gap = compared.gap
    found = f"engine and trainer differ by at most {gap.maximum:.0e} nats over {gap.tokens + gap.not_finite} sampled tokens"
    found += "" if compared.ok else f"; most in {compared.worst}"
    return DoctorFinding.unless(not compared.ok, "parity", found, REPORT, "fail")


async def score_once() -> DoctorFinding:
    """Start a scoring worker, score one reply in it, and end it."""
    pool, begin = RewardPool(workers=1, limit_s=10.0), time.monotonic()
    try:
        outcome = await pool.call(REWARD, kwargs={"completion": "abc", "answer": "abc"})
    finally:
        await pool.close()
    if outcome != Score(1.0):
        return DoctorFinding(
            "scoring", "fail", f"a worker said {outcome}", "run the reward in this process: scoring.workers=0"
        )
    found = f"a worker process was started, judged and ended in {time.monotonic() - begin:.1f} s"
    found += "" if keeper.KEEPERS else f"; {keeper.UNKEPT}"
    advice = "run on Linux, or in a container that ends with the run"
    return DoctorFinding.unless(not keeper.KEEPERS, "scoring", found, advice)


async def _attempt(name: str, check: Callable[[], Awaitable[DoctorFinding]]) -> DoctorFinding:
    try:
        return await check()
    except Exception as error:  # as above
        return DoctorFinding(name, "fail", f"{type(error).__name__}: {error}", REPORT)
