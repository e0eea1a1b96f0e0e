"""Kinds that are registered from outside: a recipe names them, and every process of a run finds them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import pytest

import tidemill
from tidemill.core.atomic_files import write_json
from tidemill.core.config import build, dump
from tidemill.core.errors import ConfigError, RenamedKey
from tidemill.core.interfaces import Engine
from tidemill.core.types import Version
from tidemill.engine.engine_kinds import ENGINES, EngineSpec
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.envs.guess import ALPHABET
from tidemill.ledger.ledger import SqliteLedger
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.run import roles
from tidemill.run.capability_check import NO_PROBES, OLDEST
from tidemill.run.placement_kinds import PLACEMENTS, PlacementSetup
from tidemill.run.placement_kinds import BasePlacementSettings as BasePlacement
from tidemill.run.recipe import RunConfig, load_recipe
from tidemill.run.roles import build_role, start_engine, start_role
from tidemill.run.storage.run_folder import RunFolder
from tidemill.runtime.placement import Inline, Placement, Resources
from tidemill.trainer.trainer_kinds import TRAINERS, TrainerSettings, TrainerSpec
from tidemill.weight_sync.sync_settings import TRANSPORTS, BaseSyncSettings, SyncSettings
from tidemill.weight_sync.transport import Transport, checkpoint

pytestmark = pytest.mark.runs

HERE = Path(__file__)


class StampedEngine(EngineSettings):
    """Settings of a native engine that writes down who built it."""

    kind: Literal["stamped"] = "stamped"
    stamp: str = ""


def build_engine(spec: EngineSpec, *parts):
    from tidemill.engine.native.build_native_engine import build as native

    assert isinstance(spec.engine, StampedEngine)
    Path(spec.engine.stamp, f"engine-{os.getpid()}").touch()
    return native(spec, *parts)


class StampedTrainer(TrainerSettings):
    kind: Literal["stamped"] = "stamped"
    stamp: str = ""


def build_trainer(spec: TrainerSpec, *parts):
    from tidemill.trainer.build_native_trainer import build as native

    assert isinstance(spec.trainer, StampedTrainer)
    Path(spec.trainer.stamp, f"trainer-{os.getpid()}").touch()
    return native(spec, *parts)


class StampedSync(BaseSyncSettings):
    transport: Literal["stamped"] = "stamped"
    stamp: str = ""


def build_transport() -> Transport:
    def sender(settings: StampedSync, folder: Path, partial: bool):
        Path(settings.stamp, f"sender-{os.getpid()}").touch()
        return checkpoint().sender(SyncSettings(transport="checkpoint"), folder, partial)

    return Transport(sender, checkpoint().receiver)


class StampedPlacement(BasePlacement):
    kind: Literal["stamped"] = "stamped"
    stamp: str = ""


def build_placement(settings: StampedPlacement, setup: PlacementSetup) -> Placement:
    Path(settings.stamp, f"placement-{os.getpid()}").touch()
    return Inline(setup.build)


@pytest.fixture
def stamped() -> Iterator[None]:
    """One more kind of each."""
    added = {
        ENGINES: (f"{HERE}:StampedEngine", f"{HERE}:build_engine"),
        TRAINERS: (f"{HERE}:StampedTrainer", f"{HERE}:build_trainer"),
        TRANSPORTS: (f"{HERE}:StampedSync", f"{HERE}:build_transport"),
        PLACEMENTS: (f"{HERE}:StampedPlacement", f"{HERE}:build_placement"),
    }
    for registry, strings in added.items():
        registry.register("stamped", *strings)
    yield
    for registry in added:
        registry.unregister("stamped")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    fresh_model(tmp_path / "model", alphabet=ALPHABET, context=64, **SIZES["0.1m"])
    return tmp_path / "model"


def made(folder: Path) -> set[tuple[str, bool]]:
    """What was built: its name, and whether this process built it."""
    pairs = (path.name.rsplit("-", 1) for path in folder.glob("*-*") if path.is_file())
    return {(name, int(pid) == os.getpid()) for name, pid in pairs}


def test_a_run_is_made_of_kinds_that_were_registered(stamped: None, model: Path, tmp_path: Path) -> None:
    stamp = str(tmp_path)
    run = tidemill.train(
        env={"kind": "guess", "low": 1, "high": 4, "turns": 2},
        model=model,
        run_dir=tmp_path / "run",
        steps=1,
        engine={"kind": "stamped", "stamp": stamp, "device": "cpu", "context": 32},
        trainer={"kind": "stamped", "stamp": stamp, "device": "cpu"},
        placement={"kind": "stamped", "stamp": stamp, "sync": {"transport": "stamped", "stamp": stamp}},
        rollout={"groups": 2, "group_size": 2, "max_tokens": 2},
        algorithm={"name": "grpo", "zero_variance": "keep"},
        eval={"every": 0, "tasks": 1, "final_tasks": 1},
        quiet=True,
    )
    assert run.complete and run.steps == 1
    assert made(tmp_path) == {(name, True) for name in ("engine", "trainer", "sender", "placement")}
    recorded = RunFolder.existing(run.folder).recipe()
    assert {recorded[table]["kind"] for table in ("engine", "trainer", "placement")} == {"stamped"}
    assert recorded["engine"]["stamp"] == recorded["placement"]["sync"]["stamp"] == stamp


async def test_a_process_of_its_own_finds_the_builder_by_the_same_string(stamped: None, model: Path, tmp_path: Path) -> None:
    engine = {"kind": "stamped", "stamp": str(tmp_path), "device": "cpu", "max_sequences": 2}
    config = build(RunConfig, {"env": "guess", "model": str(model), "run_dir": "runs/x", "engine": engine})
    async with asyncio.timeout(120), start_engine(config, model, tmp_path / "logs", threads=1) as served:
        await served.capabilities()
    assert made(tmp_path) == {("engine", False)}


def test_deterministic_is_for_the_native_kinds(stamped: None) -> None:
    with pytest.raises(ValueError, match=r"engine.kind = 'stamped' does not go with deterministic = true, which needs 'nat"):
        build(
            RunConfig,
            {"env": "guess", "model": "m", "run_dir": "x", "engine": {"kind": "stamped"}, "deterministic": True},
        )


# -- the old name of a key -------------------------------------------------------------------------------------------


BASE = {"run_dir": "runs/x", "model": "new:0.1m", "env": "guess"}


@pytest.mark.parametrize("given", ["checkpoint", "shared_memory"])
def test_the_old_name_of_the_transport_is_accepted_and_said(given: str) -> None:
    with pytest.warns(RenamedKey, match=r"^placement.sync.carrier is called placement.sync.transport now$") as told:
        config = load_recipe([], [f"placement.sync.carrier={given}", "placement.sync.keep=3"], BASE)
    assert len(told) == 1
    assert config.placement.sync == SyncSettings(transport=given, keep=3)  # pyright: ignore
    assert "carrier" not in dump(config)["placement"]["sync"]


def test_both_names_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="carrier and transport are two names of one key: leave out carrier"):
        load_recipe([], ["placement.sync.carrier=checkpoint", "placement.sync.transport=checkpoint"], BASE)


def test_a_run_that_was_recorded_under_the_old_names_goes_on(tmp_path: Path) -> None:
    config = build(RunConfig, BASE | {"run_dir": str(tmp_path / "run"), "placement": {"sync": {"transport": "checkpoint"}}})
    folder = RunFolder.open(config)
    old = dump(config)
    old["placement"]["sync"]["carrier"] = old["placement"]["sync"].pop("transport")
    del old["engine"]["kind"], old["trainer"]["kind"]
    write_json(folder.config, old)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is said: nobody wrote it now
        assert build(RunConfig, folder.recipe()) == config
        folder.claim(config, begun=True)
    assert folder.recipe() == dump(config)


def test_the_command_line_says_it_in_one_line(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('model = "new:0.1m"\nenv = "guess"\nplacement.sync.carrier = "checkpoint"\n')
    command = [sys.executable, "-m", "tidemill", "explain", str(recipe)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    assert done.stderr == "note: placement.sync.carrier is called placement.sync.transport now\n"


def test_a_role_parses_its_spec_once_and_its_builder_takes_it(
    stamped: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, parsed, taken = {}, list[str](), list[EngineSpec]()

    class Wire:
        """A placement that keeps what would travel."""

        async def start(self, protocol, role, name, spec, *more):
            sent.update(json.loads(json.dumps(spec)), role=role, name=name)

    settings = StampedEngine(stamp=str(tmp_path), device="cpu", context=32)
    spec = EngineSpec(name="engine-3", model=model, engine=settings, transport="checkpoint", cached_versions=5)
    asyncio.run(start_role(cast(Any, Wire()), Engine, spec, Resources(1), {}))
    settings_of = ENGINES.settings_of
    monkeypatch.setattr(ENGINES, "settings_of", lambda kind: parsed.append(kind) or settings_of(kind))
    monkeypatch.setattr(roles, "build", lambda kind, tree: parsed.append(kind.__name__) or build(kind, tree))
    monkeypatch.setattr(ENGINES, "builder_of", lambda kind: lambda spec, *parts: taken.append(spec))
    build_role(sent)
    assert [dump(each) for each in taken] == [dump(spec)] and parsed == ["EngineSpec", "stamped"]


# -- an engine that can do less --------------------------------------------------------------------------------------


def build_lesser(spec: EngineSpec, *parts):
    """A native engine that promises less."""
    from dataclasses import replace

    from tidemill.engine.native.build_native_engine import build as native

    assert isinstance(spec.engine, StampedEngine)
    engine = native(spec, *parts)
    capabilities, lacks = engine.capabilities, json.loads(spec.engine.stamp)

    async def fewer():
        return replace(await capabilities(), **lacks)

    engine.capabilities = fewer
    if not lacks.get("token_versions", True):
        generate = engine.generate

        async def unstamped(request):
            got = await generate(request)
            return replace(got, versions=got.versions + 50, sources=(Version(50),))  # of no version that there is

        engine.generate = unstamped
    return engine


@pytest.fixture
def lesser() -> Iterator[None]:
    ENGINES.register("stamped", f"{HERE}:StampedEngine", f"{HERE}:build_lesser")
    yield
    ENGINES.unregister("stamped")


def lesser_run(model: Path, folder: Path, lacks: dict[str, object], **more: object) -> tidemill.Run:
    settings: dict = {
        "engine": {"kind": "stamped", "stamp": json.dumps(lacks), "device": "cpu", "context": 32},
        "rollout": {"groups": 2, "group_size": 2, "max_tokens": 2},
        "algorithm": {"name": "grpo", "zero_variance": "keep"},
        "eval": {"every": 0, "tasks": 1, "final_tasks": 1},
    }
    env = {"kind": "guess", "low": 1, "high": 4, "turns": 2}
    return tidemill.train(env, model, run_dir=folder, steps=2, placement="inline", quiet=True, **settings | more)


def test_a_run_adapts_to_an_engine_that_can_do_less(lesser: None, model: Path, tmp_path: Path) -> None:
    run = lesser_run(model, tmp_path / "run", {"token_versions": False, "score": False}, record={"probe_every": 1})
    assert run.complete
    with SqliteLedger(run.folder, mode="read") as ledger:
        said = [event.detail["how"] for event in ledger.events("engine_adapted")]
    assert said == [f"engine.kind = 'stamped': {OLDEST}", f"engine.kind = 'stamped': {NO_PROBES.format(at='')}"]


def test_a_run_refuses_an_engine_that_cannot_do_what_the_recipe_needs(lesser: None, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout.top_k = 3: engine.kind = 'stamped' lacks the capability 'support'"):
        lesser_run(model, tmp_path / "run", {"support": False}, rollout={"groups": 2, "group_size": 2, "top_k": 3})
