"""Warm-ups of whole runs, in this process: cut off, out of reach, kept, and kept by somebody else."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from tidemill.cli.commands.why import standing
from tidemill.core import fault_injection
from tidemill.core.config import build
from tidemill.core.errors import CheckpointError, RunFailed
from tidemill.core.fault_injection import Fault, FaultError, Faults
from tidemill.run import sft_warmup, warm_start
from tidemill.run.recipe import RunConfig
from tidemill.run.session import RunEnded, run
from tidemill.run.sft_warmup import WarmedUp
from tidemill.run.storage.checkpoint_manifest import MANIFEST
from tidemill.run.storage.run_folder import RunFolder, read_json
from tidemill.run.warm_start import RECORD, WarmStartCache, read_kept, record

pytestmark = pytest.mark.runs

TASK = """
def score(completion, answer):
    return float(completion.strip() == answer)


tasks = [{"prompt": f"{a}{b}", "answer": a} for a in "abcdefgh" for b in "0123456789"]
"""
SMALL = {
    "model": "new:0.1m",
    "steps": 1,
    "placement": "inline",
    "rollout": {"groups": 1, "group_size": 2, "max_tokens": 2},
    "eval": {"every": 0, "final_tasks": 2},
    "scoring": {"workers": 1},
    "warmup": {"accuracy": 0.6, "lr": 5e-3, "batch": 32, "steps": 400},
}


class Told:
    """A display that remembers."""

    def __init__(self) -> None:
        self.notes = list[str]()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def __getattr__(self, name: str) -> Any:
        return lambda *given: None


@pytest.fixture(autouse=True)
def saved_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft_warmup, "SAVE_S", 0.0)
    monkeypatch.setattr(sft_warmup, "SAVE_SHARE", 0)
    monkeypatch.setattr(sft_warmup, "LOOK_EVERY", 5)


def train(folder: Path, name: str = "run", **more: Any) -> tuple[RunEnded, list[str]]:
    folder.mkdir(exist_ok=True)
    (folder / "task.py").write_text(TASK)
    given = SMALL | {"env": f"{folder / 'task.py'}:score", "run_dir": str(folder / name)} | more
    told: Any = Told()
    ended = asyncio.run(run(build(RunConfig, given), told))
    return ended, told.notes


def killed_at(monkeypatch: pytest.MonkeyPatch, log: Path, point: str) -> None:
    """Where a kill would come, an exception that nobody handles comes once: it leaves the same files."""
    monkeypatch.setattr(fault_injection, "_armed", Faults([Fault.parse(f"{point}:raise")], log, 0))


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "warm-starts").iterdir())


@pytest.mark.slow
def test_a_target_out_of_reach_fails_keeps_nothing_and_goes_on_under_a_higher_limit(tmp_path: Path):
    with pytest.raises(RunFailed, match=r"reached accuracy 0\.\d\d on training tasks in 3 steps.*= 0\.6 was expected"):
        train(tmp_path, warmup=SMALL["warmup"] | {"steps": 3})
    folder = RunFolder(tmp_path / "run")
    assert not kept(tmp_path) and not folder.initial.exists() and not folder.final.exists()
    said = standing(folder)
    assert said["state"] == "failed" and "more warmup.steps" in said["failure"]["message"]
    ended, notes = train(tmp_path)
    assert ended.complete and any(note.startswith("warm-up: going on from step ") for note in notes)
    assert read_kept(kept(tmp_path)[0]).accuracy >= 0.6 and not folder.warm_up.exists()


EXACT = {"deterministic": True, "warmup": SMALL["warmup"] | {"lr": 3e-4, "batch": 16}}


@pytest.mark.slow
def test_a_warm_up_that_is_killed_again_and_again_is_the_one_that_nobody_disturbed_to_the_last_bit(
    tmp_path: Path, monkeypatch
):
    """Of a deterministic run; of another one the same happens, but for the last bits."""
    train(tmp_path / "whole", **EXACT)
    whole, weights = kept(tmp_path / "whole")[0], "model.safetensors"
    steps, reached = read_kept(whole).steps, [0]
    assert steps > 20
    for kill, point in enumerate(("trainer:apply:12", "trainer:save:*", "controller:rename:*", "trainer:apply:20")):
        killed_at(monkeypatch, tmp_path / f"{kill}.log", point)
        with pytest.raises((FaultError, CheckpointError)):
            train(tmp_path / "killed", **EXACT)
        saved = (tmp_path / "killed" / "run" / "warm-up").glob("*/step-??????")
        reached.append(max((int(p.name.removeprefix("step-")) for p in saved), default=0))
    assert reached == sorted(reached) and reached[-1] > 8, "none begins again from nothing"
    monkeypatch.setattr(fault_injection, "_armed", Faults([], None, 0))
    ended, notes = train(tmp_path / "killed", **EXACT)
    assert ended.complete and f"warm-up: going on from step {reached[-1]}" in notes
    (same,) = kept(tmp_path / "killed")
    assert read_kept(same).steps == steps
    for made in (same, tmp_path / "killed" / "run" / "initial"):
        assert (made / weights).read_bytes() == (whole / weights).read_bytes()


def test_a_kept_one_is_used_and_a_damaged_one_is_made_again(tmp_path: Path):
    _, first = train(tmp_path, "one")
    (entry,) = kept(tmp_path)
    assert not any("as an earlier run left it" in note for note in first)
    _, second = train(tmp_path, "two")
    assert [note for note in second if note.startswith("warm-up: as an earlier run left it, ")]
    assert read_json(tmp_path / "two" / "report.json")["warmup_cached"] is True
    weights = entry / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    ended, third = train(tmp_path, "three")
    (said,) = [note for note in third if "cannot be used, and is made again" in note]
    assert str(weights) in said and "is damaged" in said and "\n" not in said
    assert ended.report["warmup_cached"] is False and kept(tmp_path) == [entry]
    assert read_kept(entry).accuracy >= 0.6


@pytest.mark.slow
def test_a_checkpoint_of_a_warm_up_that_is_damaged_costs_the_warm_up_alone(tmp_path: Path):
    with pytest.raises(RunFailed):
        train(tmp_path, warmup=SMALL["warmup"] | {"steps": 3})
    (saved,) = (tmp_path / "run" / "warm-up").glob("*/step-??????/trainer/optimizer.safetensors")
    saved.write_bytes(saved.read_bytes()[:-3])
    ended, notes = train(tmp_path)
    assert ended.complete and any(note.startswith("the warm-up begins anew: ") for note in notes)


def entry_of(folder: Path) -> tuple[WarmStartCache, Path, list[str]]:
    """A cache with one entry, `a`, as a run writes it."""
    told = list[str]()
    cache = WarmStartCache(folder / "warm-starts", told.append)
    assert cache.prepare()
    made = cache.folder / "a.run.partial"
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"weights")
    (made / "config.json").write_text("{}")
    record(made, WarmedUp(9.0, 40, 0.5))
    return cache, cache.keep(made, "a"), told


def test_what_is_kept_is_private(tmp_path: Path):
    before = os.umask(0)  # what is made is open to all
    try:
        cache, entry, told = entry_of(tmp_path)
    finally:
        os.umask(before)
    assert cache.find("a") == WarmedUp(9.0, 40, 0.5) and not told and cache.find("b") is None
    assert {p.stat().st_mode & 0o777 for p in (cache.folder, entry)} == {0o700}
    assert {p.stat().st_mode & 0o077 for p in entry.iterdir()} == {0}


DAMAGES = {
    "a byte": (lambda e: (e / "model.safetensors").write_bytes(b"weighty"), "damaged"),
    "a length": (lambda e: (e / "model.safetensors").write_bytes(b"weight"), "holds 6 bytes"),
    "a file less": (lambda e: (e / "config.json").unlink(), "missing"),
    "no manifest": (lambda e: (e / MANIFEST).unlink(), "not readable"),
    "no record": (lambda e: (e / RECORD).unlink(), "not readable"),
    "another accuracy": (lambda e: (e / RECORD).write_text('{"seconds": 9.0, "steps": 40, "accuracy": 0.9}'), ""),
    "other steps": (lambda e: (e / RECORD).write_text('{"seconds": 9.0, "steps": 41, "accuracy": 0.5}'), "step 40"),
    "no figures": (lambda e: (e / RECORD).write_text("{}"), "missing"),
    "a file that others may write": (lambda e: (e / "model.safetensors").chmod(0o606), "may be written by others"),
    "a folder that others may write": (lambda e: e.chmod(0o770), "may be written by others"),
    "a link": (lambda e: ((e / "config.json").unlink(), (e / "config.json").symlink_to("/etc/hosts")), "neither"),
    "a pipe": (lambda e: ((e / "config.json").unlink(), os.mkfifo(e / "config.json")), "neither"),
    "a link in its place": (lambda e: (e.rename(e.with_name("b")), e.symlink_to(e.with_name("b"))), "neither"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_that_is_not_as_it_was_written_is_not_used(tmp_path: Path, damage: str):
    cache, entry, told = entry_of(tmp_path)
    do, why = DAMAGES[damage]
    do(entry)
    assert cache.find("a") is None and len(told) == 1 and "\n" not in told[0], told
    assert told[0].startswith(f"the warm-up kept in {entry} cannot be used, and is made again: ") and why in told[0]
    assert not os.path.lexists(entry) and cache.find("a") is None and len(told) == 1


def test_a_cache_of_another_user_or_open_to_others_is_not_used(tmp_path: Path, monkeypatch):
    cache, _, told = entry_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(warm_start.os, "geteuid", lambda: os.getuid() + 1)
        assert not cache.prepare() and "belongs to another user" in told[-1]
        assert cache.find("a") is None and "belongs to another user" in told[-1]
    cache, _, told = entry_of(tmp_path)
    cache.folder.chmod(0o777)
    assert not cache.prepare() and "may be written by others (mode 777)" in told[-1]
    cache.folder.chmod(0o755)  # as an older version made it
    assert cache.prepare() and cache.folder.stat().st_mode & 0o777 == 0o700 and cache.find("a")


def test_a_run_beside_a_cache_that_it_cannot_trust_warms_up_for_itself(tmp_path: Path):
    (tmp_path / "warm-starts").mkdir()
    (tmp_path / "warm-starts").chmod(0o777)
    ended, notes = train(tmp_path)
    assert ended.complete and not kept(tmp_path) and not (tmp_path / "run" / "warm-up").exists()
    assert [note for note in notes if note.startswith("the cache of warm-ups is not used: ")]
    assert read_kept(tmp_path / "run" / "initial").accuracy >= 0.6
