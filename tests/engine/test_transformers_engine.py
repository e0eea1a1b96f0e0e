"""An engine that shares nothing with the native one keeps the contract, joins by the registry, and serves a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_contract import EngineContract
from transformers_engine import TransformersEngine

import tidemill
from tidemill.core.interfaces import Engine
from tidemill.core.types import Version
from tidemill.engine.engine_kinds import ENGINES
from tidemill.envs.guess import ALPHABET
from tidemill.ledger.ledger import SqliteLedger
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.run.capability_check import OLDEST, UNPROVEN
from tidemill.weight_sync.transport import make_receiver

MODULE = Path(__file__).with_name("transformers_engine.py")


class TestTransformersEngine(EngineContract):
    def make(self, folder: Path) -> Engine:
        return TransformersEngine(folder, make_receiver("shared_memory"), Version(0))


@pytest.fixture
def registered() -> Iterator[None]:
    ENGINES.register("transformers", f"{MODULE}:TransformersSettings", f"{MODULE}:build")
    yield
    ENGINES.unregister("transformers")


def test_it_serves_a_run(registered: None, tmp_path: Path) -> None:
    fresh_model(tmp_path / "model", alphabet=ALPHABET, context=64, **SIZES["0.1m"])
    run = tidemill.train(
        env={"kind": "guess", "low": 1, "high": 4, "turns": 2},
        model=tmp_path / "model",
        run_dir=tmp_path / "run",
        steps=2,
        engine={"kind": "transformers", "device": "cpu"},
        placement="inline",
        rollout={"groups": 2, "group_size": 2, "max_tokens": 2},
        algorithm={"name": "grpo", "zero_variance": "keep"},
        eval={"every": 0, "tasks": 2, "final_tasks": 2},
        record={"probe_every": 1},
        quiet=True,
    )
    assert run.complete and run.steps == 2
    with SqliteLedger(run.folder, mode="read") as ledger:
        said = [event.detail["how"].partition(": ")[2] for event in ledger.events("engine_adapted")]
        versions = [version.step for version in ledger.versions()]
    assert said == [OLDEST, UNPROVEN] and versions == [0, 1, 2]
