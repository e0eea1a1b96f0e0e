"""`tidemill parity RUN`: what was recorded is what the weights on disk say; where it is not, the class is named."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.commands.conftest import ENVIRONMENT, RECIPE
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tidemill.cli import logprob_audit as replays
from tidemill.cli.commands import parity as command
from tidemill.cli.logprob_audit import fit_temperature
from tidemill.cli.main import app
from tidemill.core import serialization
from tidemill.core.config import build
from tidemill.core.types import Trajectory, Version
from tidemill.ledger.ledger import SqliteLedger
from tidemill.ledger.segments import SegmentWriter, segment_numbers
from tidemill.models.hf_weights import load_folder
from tidemill.observability.diagnosis.mismatch import ROUNDING
from tidemill.run.recipe import RunConfig
from tidemill.run.storage.run_folder import RunFolder

Change = Callable[[Trajectory], Trajectory]


@pytest.fixture(autouse=True)
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of a model, which has tests of its own, takes longer than all of this."""

    class Fine:
        ok = True

    async def check(model: Path, length: int) -> Any:
        assert (model / "config.json").is_file()
        return Fine()

    async def checked(config: RunConfig, model: Path) -> None:
        """The engine's check has tests of its own, in test_engine_check.py."""

    monkeypatch.setattr(command, "check_engine", checked)
    monkeypatch.setattr(command, "check", check)
    monkeypatch.setattr(command, "as_data", lambda report: {})
    monkeypatch.setattr(command, "_show", lambda report: None)


def parity(run: Path) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["parity", str(run), "--json"], catch_exceptions=False)
    return result.exit_code, json.loads(result.stdout)["replay"]


def change(run: Path, changed: Change, most: int | None = None) -> int:
    """Record the trajectories of version 0 anew, as `changed` makes them; how many were."""
    with SqliteLedger(run, mode="read") as ledger:
        lines = [line for line in ledger.samples(order="recent", limit=10**6) if line.oldest == line.newest == 0][:most]
        old = [(line, ledger.load_trajectory(line.group_id, line.place)) for line in lines]
    numbers = segment_numbers(run / "trajectories")
    writer = SegmentWriter(run / "trajectories", limit=1 << 30, sync=False, first=max(numbers) + 1)
    with closing(sqlite3.connect(run / "ledger.sqlite")) as db:
        for line, trajectory in old:
            new = changed(trajectory)
            payloads = [b""] * line.place + [serialization.encode(new)]  # a record is found by its place
            at = writer.append(line.group_id, payloads)[line.place]
            steps = new.versions[new.mask & (new.versions >= 0)]
            db.execute(
                "UPDATE trajectories SET segment = ?, offset = ?, length = ?, crc = ?, oldest = ?, newest = ? "
                "WHERE group_id = ? AND place = ?",
                (at.segment, at.offset, at.length, at.crc, int(steps.min()), int(steps.max()), line.group_id, line.place),
            )
        db.commit()
    writer.close()
    assert old
    return len(old)


def only(report: dict[str, Any], version: str = "policy@v0") -> dict[str, Any]:
    return next(each for each in report["versions"] if each["version"] == version)


def test_a_sound_run_is_what_it_recorded(run: Path) -> None:
    status, report = parity(run)
    assert status == 0 and report["ok"] and report["dtype"] == "float32" and not report["strangers"]
    first = only(report)
    assert (
        first["trajectories"] >= 6 and first["differ"] == 0 and first["causes"] == {} and first["folder"].endswith("initial")
    )
    for pair in ("recorded - trainer", "recorded - engine"):
        assert first[pair]["tokens"] >= 30 and first[pair]["max"] < 1e-5, "the very weights that sampled them are there"
    assert report["not_on_disk"] > 0, "those of versions 1 and 2"
    assert report["while_it_ran"]["tokens"] >= report["while_it_ran"]["of_which_probed"] > 0


def rolled(by: int, *names: str) -> Change:
    return lambda t: replace(t, **{name: np.roll(getattr(t, name), by) for name in names})


def other_mask(t: Trajectory) -> Trajectory:
    mask = t.mask.copy()
    mask[[1, 2]] = True  # of the prompt
    return replace(t, mask=mask)


CHANGES: dict[str, tuple[Change, str]] = {
    "temperature": (lambda t: replace(t, temperature=0.7), "sampled at 1, recorded as 0.7"),
    "shift by one": (rolled(-1, "logprobs", "mask", "versions"), "the next token"),
    "mask": (other_mask, "2 tokens are marked"),
    "unknown": (lambda t: replace(t, logprobs=np.where(t.mask, np.float32(-0.01), 0).astype(np.float32)), ""),
}


@pytest.mark.parametrize("cause", CHANGES)
def test_what_was_changed_is_named(run: Path, cause: str) -> None:
    changed, detail = CHANGES[cause]
    count = change(run, changed)
    status, report = parity(run)
    found = only(report)
    assert status == 1 and not report["ok"] and found["differ"] == found["trajectories"] == count
    assert len(found["causes"]) >= 1 and all(c.startswith(cause) and detail in c for c in found["causes"])


def test_one_changed_trajectory_among_others_is_found(run: Path) -> None:
    change(run, rolled(-1, "logprobs"), most=1)
    _, report = parity(run)
    found = only(report)
    assert found["differ"] == 1 < found["trajectories"] and found["first"].startswith("group ")
    assert next(iter(found["causes"])).startswith("shift by one")


def test_stale_weights_are_named_by_the_version_that_fits(run: Path) -> None:
    with SqliteLedger(run, mode="read") as ledger:
        last = max(ledger.versions())

    def relabelled(t: Trajectory) -> Trajectory:
        return replace(t, versions=np.where(t.mask, last.step, -1).astype(np.int32), sources=(last,))

    change(run, relabelled)
    status, report = parity(run)
    assert status == 1
    causes = only(report, str(last))["causes"]
    assert list(causes) == [f"stale weights (those of policy@v0 fit, not of {last})"]


def test_another_life_of_a_step_is_not_taken_for_it(run: Path) -> None:
    change(run, lambda t: replace(t, sources=(replace(t.sources[0], incarnation=1),)), most=2)
    before = parity(run)[1]
    change(run, lambda t: replace(t, sources=(replace(t.sources[0], incarnation=1),)))
    status, report = parity(run)
    assert report["replayed"] == 0 and status == 1 and report["not_on_disk"] > before["not_on_disk"]


async def test_the_size_of_bfloat16_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = build(RunConfig, RunFolder(run).recipe())
    folder = RunFolder(run).initial
    stored = replays.Stored(folder, (Version(0),))
    replayer = replays._Replayer(config, [stored], stored, ROUNDING["float32"])
    with SqliteLedger(run, mode="read") as ledger:
        lines = [line for line in ledger.samples(order="recent", limit=99) if line.oldest == line.newest == 0]
        trajectories = [ledger.load_trajectory(line.group_id, line.place) for line in lines]
    low = await replayer._trained(load_folder(folder), trajectories, "bfloat16")
    by_tokens = {t.tokens.tobytes(): values for t, values in zip(trajectories, low, strict=True)}

    def lower(t: Trajectory) -> Trajectory:
        return replace(t, logprobs=np.where(t.mask, by_tokens[t.tokens.tobytes()], 0).astype(np.float32))

    change(run, lower)
    result = await replays.replay(RunFolder(run))
    assert [c.partition(" (")[0] for c in result.versions[0].findings] == ["dtype"]


def one_step(folder: Path, override: str) -> Path:
    """A run of one step, of its own."""
    (folder / "env.py").write_text(ENVIRONMENT)
    (folder / "recipe.toml").write_text(RECIPE)
    given = [f"run_dir={folder / 'run'}", f"env={folder / 'env.py'}:checksum", "steps=1", override]
    trained = CliRunner().invoke(app, ["train", str(folder / "recipe.toml"), *given, "--json"], catch_exceptions=False)
    assert trained.exit_code == 0, trained.stdout
    return folder / "run"


@pytest.fixture
def truncated_run(tmp_path: Path) -> Path:
    return one_step(tmp_path, "rollout.top_p=0.6")


async def test_truncated_sampling_is_over_the_support_and_named_where_it_is_not(truncated_run: Path) -> None:
    report = await replays.replay(RunFolder(truncated_run))
    assert report.ok and report.replayed > 0, report
    with SqliteLedger(truncated_run, mode="read") as ledger:
        lines = [line for line in ledger.samples(order="recent", limit=99) if line.oldest == line.newest == 0]
        trajectories = [ledger.load_trajectory(line.group_id, line.place) for line in lines]
    assert all(t.support is not None for t in trajectories)
    config, folder = build(RunConfig, RunFolder(truncated_run).recipe()), RunFolder(truncated_run).initial
    stored = replays.Stored(folder, (Version(0),))
    replayer = replays._Replayer(config, [stored], stored, ROUNDING["float32"])
    whole = await replayer._trained(load_folder(folder), [replace(t, support=None) for t in trajectories])
    by_tokens = {t.tokens.tobytes(): values for t, values in zip(trajectories, whole, strict=True)}

    def over_everything(t: Trajectory) -> Trajectory:
        values = by_tokens.get(t.tokens.tobytes())
        return t if values is None else replace(t, logprobs=np.where(t.mask, values, 0).astype(np.float32))

    change(truncated_run, over_everything)
    result = await replays.replay(RunFolder(truncated_run))
    named = [cause for version in result.versions for cause in version.findings]
    assert named == ["truncated sampling (over the whole vocabulary, not the support that was kept)"]


def test_weights_that_were_never_published_are_told_of(run: Path) -> None:
    initial = run / "initial"
    if initial.is_symlink():
        target = initial.resolve()
        initial.unlink()
        shutil.copytree(target, initial)
    file = initial / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
    status, report = parity(run)
    assert status == 1 and "policy@v0 was expected there" in report["strangers"][0] and "initial" in report["strangers"][0]


def test_nothing_to_replay_is_said(run: Path) -> None:
    with closing(sqlite3.connect(run / "ledger.sqlite")) as db:
        db.execute("UPDATE trajectories SET gone_at = 1.0")
        db.commit()
    status, report = parity(run)
    assert status == 1 and report["replayed"] == 0 and report["removed"] > 0
    result = CliRunner().invoke(app, ["parity", str(run)], catch_exceptions=False)
    assert result.exit_code == 1
    assert "there is no recorded trajectory of a version whose weights are on disk" in result.stdout
    assert f"{report['removed']} removed by retention" in result.stdout


def test_a_table_and_a_run_without_final(run: Path) -> None:
    shutil.rmtree(run / "final")
    result = CliRunner().invoke(app, ["parity", str(run)], catch_exceptions=False)
    assert (
        result.exit_code == 0
        and "policy@v0" in result.stdout
        and "what was recorded is what these weights say" in result.stdout
    )
    change(run, CHANGES["mask"][0])
    result = CliRunner().invoke(app, ["parity", str(run)], catch_exceptions=False)
    assert result.exit_code == 1 and "DIFFER" in result.stdout and "mask (2 tokens are marked" in result.stdout


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.37, 4.0])
def test_a_temperature_is_found_to_many_digits(temperature: float) -> None:
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(0, 2, (40, 30)), rng.integers(0, 30, 40)
    scaled = logits / temperature
    recorded = (scaled - np.log(np.exp(scaled).sum(-1, keepdims=True)))[np.arange(40), targets]
    assert fit_temperature(logits, targets, recorded) == pytest.approx(temperature, rel=1e-5)


def test_greedy_baselines_are_no_trajectories_to_replay(tmp_path: Path) -> None:
    run = one_step(tmp_path, "algorithm=remax")
    with SqliteLedger(run, mode="read") as ledger:
        samples = {line.sample for line in ledger.samples(order="recent", limit=99)}
    assert min(samples) == -1, "there were greedy attempts"
    status, report = parity(run)
    assert status == 0 and only(report)["trajectories"] > 0
