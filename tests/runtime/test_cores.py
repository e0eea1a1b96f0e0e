"""Cores that processes share: who takes how many, when, and what is left by one that died."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tidemill.core.config import build
from tidemill.core.errors import StartFailed
from tidemill.core.interfaces import Capabilities
from tidemill.core.types import GenerateRequest, LossSpec, Sample, SamplingParams
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.run.cluster import start_cluster
from tidemill.run.planner.plan import plan_of
from tidemill.run.recipe import RunConfig
from tidemill.run.roles import build_engine, build_trainer
from tidemill.run.storage.run_folder import RunFolder
from tidemill.runtime import cpu_sharing
from tidemill.runtime.cpu_sharing import CoreShare, SharedCores, core_board
from tidemill.trainer import parallel_micro_batches as lanes_of_trainer
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings, TrainerSpec
from tidemill.weight_sync.sync_settings import SyncSettings

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs memory that processes share by name")


class Used(list[int]):
    """With how many threads somebody was told to compute, in order; without the torch of this process being told."""

    def __call__(self, threads: int) -> None:
        self.append(threads)


@contextmanager
def shares(wanted: dict[str, int]) -> Iterator[dict[str, CoreShare]]:
    """The core shares of processes that want so many threads; of none where nothing is shared."""
    with core_board(max(wanted.values())) as board:
        yield {name: share for name, threads in wanted.items() if (share := board.share(name, threads))}


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_sharing, "usable_cores", lambda: 2)


@pytest.mark.parametrize(
    ("machine", "wanted", "alone", "together"),
    [
        (2, (2, 1), (2, 1), (1, 1)),
        (2, (2, 2), (2, 2), (1, 1)),
        (8, (8, 8), (8, 8), (4, 4)),
        (8, (8, 2, 2), (8, 2, 2), (5, 1, 1)),
        (1, (3, 1), (1, 1), (1, 1)),
        (4, (9, 1), (4, 1), (3, 1)),
    ],
)
def test_whoever_computes_alone_has_the_machine(
    monkeypatch, machine: int, wanted: tuple[int, ...], alone: tuple[int, ...], together: tuple[int, ...]
):
    monkeypatch.setattr(cpu_sharing, "usable_cores", lambda: machine)
    with shares({str(i): threads for i, threads in enumerate(wanted)}) as given:
        used = [Used() for _ in wanted]
        shared = [SharedCores(share, told) for share, told in zip(given.values(), used, strict=True)]
        for each in shared:
            each.take()
            each.leave()
        assert tuple(told[-1] for told in used) == alone
        for _ in range(2):  # the first of them does not know of the others yet
            for each in shared:
                each.take()
        assert tuple(told[-1] for told in used) == together
        for each in shared[1:]:
            each.leave()
        shared[0].take()
        assert used[0][-1] == alone[0]
        assert all(a != b for told in used for a, b in pairwise(told)), "it is told of changes only"


@pytest.mark.parametrize("wanted", [{"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 1}, {"a": cpu_sharing.MOST + 1}])
def test_there_is_nothing_to_share_where_nobody_has_a_core_too_many(two_cores, wanted: dict[str, int]):
    with shares(wanted) as given:
        assert given == {}


def test_what_one_left_that_was_killed_is_wiped_by_the_one_that_takes_its_place(two_cores):
    with shares({"trainer": 2, "engine-0": 2}) as given:
        script = "import os, sys; from tidemill.runtime.cpu_sharing import *; "
        script += (
            "share = CoreShare.model_validate_json(sys.argv[1]); SharedCores(share, print).take(); os.kill(os.getpid(), 9)"
        )
        engine = given["engine-0"].model_dump_json()
        died = subprocess.run([sys.executable, "-c", script, engine], timeout=60)
        assert died.returncode == -9
        used = Used()
        trainer = SharedCores(given["trainer"], used)
        trainer.take()
        assert used == [1]  # so the board is shared with a process, and tells of it still
        SharedCores(CoreShare.model_validate_json(engine), Used())
        trainer.take()
        assert used == [1, 2]


def test_who_joins_shares_too_and_a_name_keeps_its_place(two_cores):
    with core_board(2) as board:
        first, joined, used = board.share("engine-0", 2), board.share("engine-1", 2), Used()
        assert first is not None and joined is not None and board.share("engine-0", 2) == first != joined
        mine, other = SharedCores(first, used), SharedCores(joined, used)
        for each in (mine, other, mine):  # alone, then beside one that joined
            each.take()
        assert used == [2, 1, 1]
        left = [board.share(f"engine-{i}", 2) for i in range(2, cpu_sharing.PLACES + 1)]
        assert all(left[:-1]) and left[-1] is None, "no place is left"
        assert board.share("engine-1", 2) == joined


def test_the_board_is_gone_with_those_who_have_it(two_cores):
    with shares({"a": 2, "b": 2}) as given:
        board = given["a"].board
        assert Path(board).exists() and os.stat(board).st_size == 2 * cpu_sharing.PLACES
    with pytest.raises(OSError, match="No such file"):
        SharedCores(given["a"], Used())


def model(folder: Path) -> Path:
    fresh_model(folder / "model", alphabet="abcd", context=64, **SIZES["0.1m"])
    return folder / "model"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Used:
    """What torch is told, while this process computes as it did."""
    used = Used()
    monkeypatch.setattr(torch, "set_num_threads", used)
    return used


async def test_an_engine_takes_what_is_free_before_each_step_and_leaves_when_all_is_done(tmp_path, two_cores, told):
    with shares({"trainer": 2, "engine-0": 2}) as given:
        spec = EngineSpec(model=model(tmp_path), engine=EngineSettings(device="cpu"), core_share=given["engine-0"])
        engine, trainer, used = build_engine(spec), SharedCores(given["trainer"], Used()), Used()
        observer = SharedCores(given["trainer"], used)
        assert isinstance(engine, NativeEngine)
        stream = engine.stream(GenerateRequest(np.array([3, 4]), SamplingParams(max_tokens=4, ignore_eos=True)))
        async for _ in stream:
            trainer.take()  # from the second step on
        observer.take()
        assert used == [1] and told == [2, 1]
        assert engine._loop is not None
        await engine._loop
        observer.take()
        assert used == [1, 2]
        await engine.close()


LOSS = {"l": LossSpec("ppo_clip", {"clip_low": 0.2, "clip_high": 0.2})}


def two_micro_batches() -> list[Sample]:
    sampled = np.arange(6) > 1
    sample = Sample(
        *(np.arange(6, dtype=np.int32), sampled, np.full(6, -1, np.float32), np.zeros(6, np.int32)),
        *(np.ones(6, np.float32), sampled.astype(np.float32)),
        loss="l",
    )
    return [replace(sample, tokens=sample.tokens[::-1].copy()), sample]


def shared_trainer(folder: Path, share: CoreShare, offload: bool) -> NativeTrainer:
    settings = TrainerSettings(device="cpu", micro_batch_tokens=6)
    spec = {"model": model(folder), "trainer": settings, "steps": 1, "sync": SyncSettings(), "folder": folder}
    trainer = build_trainer(TrainerSpec(**spec, core_share=share), offload)
    assert isinstance(trainer, NativeTrainer)
    return trainer


async def test_a_trainer_takes_what_is_free_before_each_part_of_a_micro_batch(tmp_path, two_cores, told):
    """An engine that begins or ends meanwhile is noticed before the next one, not after the step."""
    with shares({"trainer": 2, "engine-0": 2}) as given:
        trainer, used = shared_trainer(tmp_path, given["trainer"], offload=False), Used()
        engine, other = SharedCores(given["engine-0"], Used()), SharedCores(given["engine-0"], used)
        trainer.decoder.register_forward_hook(lambda *_: engine.take())
        trainer.decoder.embed.weight.register_post_accumulate_grad_hook(lambda _: engine.leave())
        await trainer.forward_backward(two_micro_batches(), LOSS)
        assert told == [2, 1, 2, 1]  # forward and back, twice
        other.take()
        assert used == [2]  # the trainer has left
        await trainer.close()


async def test_the_thread_that_computes_is_the_one_that_is_told(tmp_path, two_cores):
    """How many threads there are is each thread's own affair: told elsewhere, a trainer would go on with all of them."""
    before, seen = torch.get_num_threads(), []
    with shares({"trainer": 2, "engine-0": 2}) as given:
        trainer = shared_trainer(tmp_path, given["trainer"], offload=True)
        engine = SharedCores(given["engine-0"], Used())

        def forward(*_: object) -> None:
            seen.append(torch.get_num_threads())
            engine.take()

        def back(_: torch.Tensor) -> None:
            seen.append(torch.get_num_threads())
            engine.leave()

        trainer.decoder.register_forward_hook(forward)
        trainer.decoder.embed.weight.register_post_accumulate_grad_hook(back)
        try:
            await trainer.forward_backward(two_micro_batches(), LOSS)
        finally:
            torch.set_num_threads(before)
        assert seen == [2, 1, 2, 1]
        await trainer.close()


async def test_who_cannot_open_the_board_computes_as_it_was_told_to(tmp_path, two_cores, told):
    gone = CoreShare(board=str(tmp_path / "gone"), place=0, wanted=2, cores=2)
    trainer = shared_trainer(tmp_path, gone, offload=False)
    await trainer.forward_backward(two_micro_batches(), LOSS)
    assert told == []
    await trainer.close()


def recipe(folder: Path, **tables: Any) -> RunConfig:
    base = {"run_dir": folder / "run", "model": str(model(folder)), "env": "guess", "algorithm": "grpo"}
    return build(RunConfig, base | tables)


class Started:
    """The handle of a process that computes nothing, and its proxy."""

    def __init__(self, name: str) -> None:
        self.name, self.proxy = name, self

    async def capabilities(self) -> Capabilities:
        return Capabilities(64)

    async def stop(self) -> None: ...


class Recording:
    """A placement that keeps what it was given to start, and starts nothing, or what computes nothing."""

    def __init__(self, starts: bool = False) -> None:
        self.given, self.starts = dict[str, Any](), starts

    async def start(self, protocol: type, role: str, name: str, spec: dict[str, Any], *_: object) -> Any:
        self.given[name] = spec
        if not self.starts:
            raise StartFailed(name)
        return Started(name)

    def begin(self) -> None: ...
    async def close(self) -> None: ...


async def started(folder: Path, tables: dict[str, Any]) -> dict[str, Any]:
    """What the processes of a run are given."""
    config, placement = recipe(folder, **tables), Recording()
    with pytest.raises(BaseExceptionGroup):
        async with start_cluster(plan_of(config), Path(config.model), RunFolder(folder), placement, lambda *_: None):
            raise AssertionError("nothing was started")
    assert placement.given.keys() >= {"trainer"}
    return placement.given


@pytest.mark.parametrize(
    ("more", "lanes"),
    [
        ({}, 2),
        ({"deterministic": True}, 1),
        ({"engine": {"batch_invariant": True}}, 1),
        ({"placement": {"trainer_threads": 2, "kind": "inline"}}, 1),
        ({"placement": {"trainer_threads": 1, "engine_threads": 2}}, 1),
    ],
)
async def test_a_trainers_threads_have_micro_batches_of_their_own(tmp_path, more: dict[str, Any], lanes: int):
    given = await started(tmp_path, {"placement": {"trainer_threads": 2}} | more)
    assert given["trainer"]["threads"] == lanes


@pytest.mark.parametrize("threads", [1, 2])
async def test_a_trainer_that_was_given_threads_runs_as_many_micro_batches_at_a_time(tmp_path, monkeypatch, threads: int):
    monkeypatch.setattr(lanes_of_trainer, "LEAST", 1)
    settings = TrainerSettings(device="cpu", micro_batch_tokens=12)
    spec = TrainerSpec(
        **{"model": model(tmp_path), "trainer": settings, "steps": 1, "sync": SyncSettings(), "folder": tmp_path},
        threads=threads,
    )
    trainer, met, ran_in = build_trainer(spec, offload=False), threading.Barrier(threads, timeout=20), set[int]()
    assert isinstance(trainer, NativeTrainer)

    def meet(*_: object) -> None:
        met.wait()
        ran_in.add(threading.get_ident())

    trainer.decoder.register_forward_hook(meet)
    await trainer.forward_backward(two_micro_batches(), LOSS)
    assert len(ran_in) == threads
    await trainer.close()


@pytest.mark.parametrize(
    ("tables", "shared"),
    [
        ({"placement": {"engine_threads": 2}}, True),
        ({"placement": {"engine_threads": 1}}, False),
        ({"placement": {"engine_threads": 2, "kind": "inline"}}, False),
        ({"placement": {"engine_threads": 2}, "engine": {"batch_invariant": True}}, False),  # nor may its rows' bits change
        ({"placement": {"engine_threads": 2}, "deterministic": True}, False),  # what happens beside it would change its sums
    ],
)
async def test_a_run_of_more_threads_than_cores_shares_them(two_cores, tmp_path, tables: dict[str, Any], shared: bool):
    for name, given in (await started(tmp_path, tables)).items():
        share = given["core_share"]
        assert (share is not None) is shared
        if share is not None:
            assert (share["wanted"], share["cores"]) == ({"trainer": 1, "engine-0": 2}[name], 2)


async def test_an_engine_that_joins_a_run_shares_the_cores(two_cores, tmp_path):
    config, placement = recipe(tmp_path, placement={"engine_threads": 2}), Recording(starts=True)
    async with start_cluster(
        plan_of(config), Path(config.model), RunFolder(tmp_path), placement, lambda *_: None
    ) as cluster:
        assert await cluster.join() == "engine-1"
    shares = [placement.given[name]["core_share"] for name in ("trainer", "engine-0", "engine-1")]
    assert len({share["place"] for share in shares}) == 3 and [share["wanted"] for share in shares] == [1, 2, 2]
    assert len({share["board"] for share in shares}) == 1
