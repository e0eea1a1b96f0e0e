"""`tidemill parity RUN`: the recipe's engine as a run starts it, what it proves, its audit, and what it samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.commands.conftest import ENVIRONMENT, RECIPE
from typer.testing import CliRunner

from tidemill.cli import engine_check
from tidemill.cli.commands import parity as command
from tidemill.cli.main import app
from tidemill.core.errors import ConfigError, PolicyMismatch
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.native import scheduler
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.ledger.ledger import SqliteLedger
from tidemill.run.roles import build_engine

pytestmark = pytest.mark.runs


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons of the model and of the record have tests of their own."""

    class Fine:
        ok = True

    async def fine(*given: Any) -> Fine:
        return Fine()

    monkeypatch.setattr(command, "check", fine)
    monkeypatch.setattr(command, "replay", fine)
    monkeypatch.setattr(command, "as_data", lambda report: {})
    for name in ("replay_data", "_show", "_show_replay"):
        monkeypatch.setattr(command, name, lambda *given: None)


def parity(run: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["parity", str(run), *options], catch_exceptions=False)
    return result.exit_code, result.stdout


def built(change: Callable[[NativeEngine], Any]) -> Callable[[EngineSpec], Any]:
    def build(spec: EngineSpec) -> Any:
        engine = build_engine(spec)
        assert isinstance(engine, NativeEngine)
        change(engine)
        return engine

    return build


def test_a_runs_engine_is_updated_and_samples_what_the_trainer_computes(run: Path) -> None:
    status, said = parity(run, "--json")
    found = json.loads(said)["engine"]
    assert status == 0 and found["ok"] and found["kind"] == "native" and found["audit"] is None
    assert "after each update it compares the fingerprint of what it serves" in found["proof"]
    assert found["sampling"]["tokens"] >= 500 and found["sampling"]["logprob_gap"] < 1e-5
    assert 0 < found["sampling"]["chi_square"] < found["sampling"]["chi_square_most"]


def test_an_audit_is_run_and_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audits = list[int]()

    def sound(engine: NativeEngine) -> None:
        async def audit() -> None:
            audits.append((await engine.stats()).version.step)

        engine.audit = audit  # type: ignore[attr-defined]

    monkeypatch.setattr(engine_check, "build_engine", built(sound))
    status, said = parity(run)
    assert status == 0 and audits == [0], "after the update"
    assert "audit: what it serves was read back, and is what was published" in said and "sampling: mean" in said

    def broken(engine: NativeEngine) -> None:
        async def audit() -> None:
            raise PolicyMismatch("engine engine-0 computes with other weights than were published: lm_head.weight")

        engine.audit = audit  # type: ignore[attr-defined]

    monkeypatch.setattr(engine_check, "build_engine", built(broken))
    status, said = parity(run)
    assert status == 1 and "what it serves is not what was published" in said and "lm_head.weight" in said


def test_what_it_samples_by_other_weights_is_found(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(engine: NativeEngine) -> None:
        update = engine.update

        async def then_another(given: Any) -> Any:
            version = await update(given)
            engine._updates.weights.decoder.norm.weight.data.mul_(1.5)
            return version

        engine.update = then_another  # type: ignore[method-assign]

    monkeypatch.setattr(engine_check, "build_engine", built(other))
    status, said = parity(run)
    assert status == 1 and "are not the trainer's" in said


def test_an_engine_that_does_not_start_gives_no_verdict(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(spec: EngineSpec) -> Any:
        raise ConfigError("engine.kind = 'native': there is no such server")

    monkeypatch.setattr(engine_check, "build_engine", missing)
    status, said = parity(run)
    assert status == 0 and "could not be checked: engine.kind = 'native': there is no such server" in said


def trained(folder: Path, *overrides: str) -> Any:
    """The result of a run of two steps with drafts."""
    (folder / "env.py").write_text(ENVIRONMENT)
    (folder / "recipe.toml").write_text(RECIPE)
    given = [f"run_dir={folder / 'run'}", f"env={folder / 'env.py'}:checksum", "steps=2", *overrides]
    recipe = [str(folder / "recipe.toml"), "engine.speculation.method=rollouts", "rollout.max_tokens=20", *given]
    return CliRunner().invoke(app, ["train", *recipe, "--json"])


def test_a_run_with_drafts_is_checked_before_its_first_step_and_counts_them(tmp_path: Path) -> None:
    assert trained(tmp_path).exit_code == 0
    with SqliteLedger(tmp_path / "run", mode="read") as ledger:
        (event,) = [each for each in ledger.events() if each.kind == "sampling_checked"]
        assert ledger.last_step() == 1
    assert event.detail["settings"] == ["engine.speculation.method"] and event.detail["tokens"] == 512
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    keys = ("speculation/drafted_tokens", "speculation/accepted_tokens")
    drafted, accepted = (sum(line.get(key, 0) for line in lines) for key in keys)
    assert drafted > accepted >= 0


def test_a_run_whose_drafts_are_taken_unchecked_ends_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        scheduler, "accepted", lambda drafted, slots, positions, sampled: np.argsort(positions, kind="stable")
    )
    result = trained(tmp_path)
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith("engine.speculation.method: with this, ")
    with SqliteLedger(tmp_path / "run", mode="read") as ledger:
        assert ledger.last_step() is None
