"""`tidemill doctor`: on a working machine nothing fails; each part of its self-test fails when that part is broken."""

from __future__ import annotations

import asyncio
import json
from collections import namedtuple
from pathlib import Path

import pytest

from tidemill.cli.commands import doctor, sandbox_test, selftest
from tidemill.cli.commands.doctor import DoctorFinding
from tidemill.core import hardware
from tidemill.core.types import Score
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.run.roles import build_engine, build_trainer
from tidemill.runtime.workers import keeper
from tidemill.sandbox import bubblewrap, landlock
from tidemill.sandbox.escapes.suite import EscapeFinding, attempts
from tidemill.sandbox.sandbox_pool import Sandbox
from tidemill.sandbox.sandbox_settings import SandboxSettings
from tidemill.trainer.trainer_kinds import TrainerSettings, TrainerSpec
from tidemill.weight_sync.sync_settings import SyncSettings

NAMES = "Python SQLite cores memory|shared memory|disk extras PyTorch sandbox CUDA kernels weights parity scoring"


@pytest.mark.runs
def test_every_part_works_here(tidemill):
    said = tidemill("doctor", "--json")
    checks = json.loads(said.out)["checks"]
    assert said.code == 0 and json.loads(said.out)["ok"]
    names = [c["name"] for c in checks]
    assert names == [n for part in NAMES.split("|") for n in ([part] if part == "shared memory" else part.split())]
    assert {c["status"] for c in checks if c["name"] in ("weights", "parity", "scoring")} == {"ok"}
    assert all(c["advice"] for c in checks if c["status"] != "ok")


def test_a_failure_is_said_and_is_the_status(tidemill, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox_test, "sandbox", lambda: DoctorFinding("sandbox", "ok", "tried elsewhere"))
    monkeypatch.setattr(doctor, "facts", lambda folder: [DoctorFinding("disk", "fail", "it is gone", "bring it back")])
    said = tidemill("doctor")
    assert said.code == 1 and "fail  disk" in said.out and "bring it back" in said.out and "1 failed" in said.out
    assert "ok    parity" in said.out and "\x1b" not in said.out


@pytest.fixture
def parts(tmp_path: Path):
    for name, seed in (("one", 1), ("other", 2)):
        fresh_model(tmp_path / name, alphabet="abcdefghijklmnopqrstuvwxyz \n", context=64, seed=seed, **SIZES["0.1m"])

    def make(trainer: str, engine: str):
        spec = TrainerSpec(
            model=tmp_path / trainer,
            trainer=TrainerSettings(device="cpu"),
            steps=1,
            sync=SyncSettings(),
            folder=tmp_path,
        )
        served = EngineSpec(model=tmp_path / engine, engine=EngineSettings(device="cpu"))
        return build_trainer(spec, offload=False), build_engine(served)

    return make


@pytest.mark.parametrize(("engine", "status"), [("one", "ok"), ("other", "fail")])
async def test_other_weights_do_not_pass_for_parity(parts, engine: str, status: str):
    ours, theirs = parts("one", engine)
    found = await selftest.compare(ours, theirs)
    await theirs.close()
    await ours.close()
    assert found.status == status and "64 sampled tokens" in found.found


async def test_one_wrong_logprob_is_enough(parts):
    ours, theirs = parts("one", "one")
    generate = theirs.generate

    async def one_off(request):
        reply = await generate(request)
        reply.logprobs[3] -= 1e-3 * (request.key == "doctor-2")
        return reply

    theirs.generate = one_off
    found = await selftest.compare(ours, theirs)
    await theirs.close()
    await ours.close()
    assert found.status == "fail" and "1e-03" in found.found


async def test_a_self_test_that_raises_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def refuse(*_: object) -> DoctorFinding:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(selftest, "carry_weights", refuse)
    found = {f.name: f for f in await selftest.self_test(tmp_path)}
    assert found["weights"].status == "fail" and "No space left" in found["weights"].found
    assert "parity" not in found and found["scoring"].status == "ok"


def test_scarcity_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: Usage(0, 0, 10**9))
    monkeypatch.setattr(doctor, "usable_cores", lambda: 1)
    monkeypatch.setattr(doctor, "memory_bytes", lambda: (8 * 2**30, 2**30))
    found = {f.name: f for f in doctor.facts(tmp_path)}
    assert [n for n, f in found.items() if f.status == "warn"] == ["cores", "memory", "disk"]


def test_a_container_limits_cores_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    free = hardware.usable_cores(), hardware.memory_bytes()[0]
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert hardware.usable_cores() == 1 <= free[0]
    assert hardware.memory_bytes() == (1000000, 600000) and free[1] > 1000000
    (tmp_path / "memory.stat").write_text("anon 150000\ninactive_file 250000\n")
    assert hardware.memory_bytes() == (1000000, 850000)  # what is cached of files could be dropped
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert (hardware.usable_cores(), hardware.memory_bytes()[0]) == free


def test_a_scoring_worker_is_needed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(selftest, "REWARD", "tidemill.envs.rewards.functions:missing")
    found = asyncio.run(selftest.score_once())
    assert found.status == "fail" and "missing" in found.found and found.advice


@pytest.mark.parametrize(("kept", "status"), [(True, "ok"), (False, "warn")])
def test_a_system_where_programs_can_outlive_a_run_is_warned_of(kept: bool, status: str, monkeypatch: pytest.MonkeyPatch):
    class Pool:
        def __init__(self, **_: object) -> None: ...

        async def call(self, *_: object, **__: object) -> Score:
            return Score(1.0)

        async def close(self) -> None: ...

    monkeypatch.setattr(selftest, "RewardPool", Pool)
    monkeypatch.setattr(keeper, "KEEPERS", kept)
    found = asyncio.run(selftest.score_once())
    assert found.status == status and (keeper.UNKEPT in found.found) is not kept


async def _one_escape(opened: object) -> list[EscapeFinding]:
    return [EscapeFinding(attempt, attempt.name == "tcp", "ESCAPED True") for attempt in attempts()]


@pytest.mark.parametrize("level", ["bubblewrap", "landlock"])
def test_the_sandbox_is_tried(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setattr(sandbox_test, "run_suite", _one_escape)
    monkeypatch.setattr(sandbox_test, "small_limits", lambda *args, **kwargs: SandboxSettings(level="limits"))
    found = sandbox_test.sandbox()
    assert (found.name, found.status) == ("sandbox", "fail")
    assert found.found == f"limits: 1 of {len(attempts())} escapes succeed: tcp (ESCAPED True)"

    async def none(opened: Sandbox) -> list[EscapeFinding]:
        opened.level = level
        return [EscapeFinding(attempt, False, "held") for attempt in attempts()]

    monkeypatch.setattr(sandbox_test, "run_suite", none)
    found = sandbox_test.sandbox()
    assert found.status == ("ok" if level == "bubblewrap" else "warn")
    assert f"{level}: {len(attempts())} escapes" in found.found
    assert ("pip install 'tidemill[sandbox]'" in found.advice) == (level == "landlock")


def test_a_machine_without_a_sandbox_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "bwrap", lambda user: "")
    monkeypatch.setattr(landlock, "abi", lambda: 0)
    found = sandbox_test.sandbox()
    assert found.status == "warn" and "no sandbox works here" in found.found and "tidemill[sandbox]" in found.advice
