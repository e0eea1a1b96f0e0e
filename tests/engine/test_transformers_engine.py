"""An engine that shares nothing with the native one keeps the contract, joins by the registry, and serves a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_contract import EngineContract
from transformers_engine import ENTROPY, TransformersEngine

import tidemill
from tidemill.core.errors import ConfigError
from tidemill.core.interfaces import Engine
from tidemill.core.token_extras import MODEL_LOGPROBS, TokenExtra
from tidemill.core.types import Version
from tidemill.engine.engine_kinds import ENGINES
from tidemill.envs.guess import ALPHABET
from tidemill.ledger.ledger import SqliteLedger
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.run.capability_check import OLDEST, UNPROVEN
from tidemill.weight_sync.transport import make_receiver

LOSSES = Path(__file__).with_name("extra_losses.py")
MODULE = Path(__file__).with_name("transformers_engine.py")


class TestTransformersEngine(EngineContract):
    def make(self, folder: Path) -> Engine:
        return TransformersEngine(folder, make_receiver("shared_memory"), Version(0))


@pytest.fixture
def registered() -> Iterator[None]:
    ENGINES.register("transformers", f"{MODULE}:TransformersSettings", f"{MODULE}:build")
    yield
    ENGINES.unregister("transformers")


def trained(tmp_path: Path, engine: str, **given: Any) -> Any:
    fresh_model(tmp_path / "model", alphabet=ALPHABET, context=64, **SIZES["0.1m"])
    settings = {
        "env": {"kind": "guess", "low": 1, "high": 4, "turns": 2},
        "rollout": {"groups": 2, "group_size": 2, "max_tokens": 2},
        "algorithm": {"name": "grpo", "zero_variance": "keep"},
        "eval": {"every": 0, "tasks": 2, "final_tasks": 2},
        "record": {"probe_every": 1},
        "engine": {"kind": engine, "device": "cpu"},
    }
    places = {"model": tmp_path / "model", "run_dir": tmp_path / "run", "placement": "inline"}
    return tidemill.train(**settings | places | {"steps": 2, "quiet": True} | given)


def test_it_serves_a_run(registered: None, tmp_path: Path) -> None:
    run = trained(tmp_path, "transformers")
    assert run.complete and run.steps == 2
    with SqliteLedger(run.folder, mode="read") as ledger:
        said = [event.detail["how"].partition(": ")[2] for event in ledger.events("engine_adapted")]
        versions = [version.step for version in ledger.versions()]
    assert said == [OLDEST, UNPROVEN] and versions == [0, 1, 2]


@pytest.mark.parametrize(
    ("engine", "loss", "extra"),
    [("transformers", "by_entropy", ENTROPY), ("native", "by_surprise", MODEL_LOGPROBS)],
)
def test_a_loss_reads_what_the_engine_returns_with_each_token(
    registered: None, tmp_path: Path, engine: str, loss: str, extra: TokenExtra
) -> None:
    seen: list[dict[str, float]] = []
    algorithm = {"name": "grpo", "zero_variance": "keep", "loss": f"{LOSSES}:{loss}"}
    run = trained(tmp_path, engine, algorithm=algorithm, max_lag=0, callbacks=[lambda step, metrics: seen.append(metrics)])
    assert run.complete and [m["train/of_engine"] > 0 for m in seen if "train/of_engine" in m] == [True] * 2
    with SqliteLedger(run.folder, mode="read") as ledger:
        for number in range(4):
            for t in ledger.load(number).trajectories:
                entries = t.extras.pop(extra.name)
                assert entries.dtype == extra.dtype and entries.shape == t.tokens.shape and not t.extras
                assert (entries[~t.mask] == extra.fill).all() and (entries[t.mask] != extra.fill).all()


@pytest.mark.parametrize(
    ("engine", "loss", "says"),
    [
        (
            "native",
            "by_entropy",
            "reads the token extra 'entropy', and engine.kind = 'native' returns 'model_logprobs': take",
        ),
        ("transformers", "of_another_kind", "reads .* as .entropy: float64 .*'transformers' returns .entropy: float32"),
        ("native", "missing", "extra_losses.py has no 'missing'"),
    ],
)
def test_a_loss_that_an_engine_cannot_serve_is_refused_before_the_run(
    registered: None, tmp_path: Path, engine: str, loss: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        trained(tmp_path, engine, algorithm={"name": "grpo", "loss": f"{LOSSES}:{loss}"})
