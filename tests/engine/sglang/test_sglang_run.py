"""A run that samples by a server at an address: the fake one, in a thread of the test."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine.sglang.fake_sglang import running

import tidemill
from tidemill.envs.guess import ALPHABET
from tidemill.ledger.ledger import SqliteLedger
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.run.capability_check import UNPROVEN, UNSEEDED


@contextmanager
def serving_in_a_thread(folder: Path) -> Iterator[str]:
    """The address of a fake server that runs while the context is open."""
    told, begun, end = list[str](), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with running(folder) as (url, _):
            told.append(url)
            begun.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert begun.wait(60)
        yield told[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(60)
        loop.close()


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "load"), [("shared_memory", "disk"), ("collective", "collective")])
def test_a_run_steps_with_the_trainers_logprobs_and_says_what_is_not_proved(
    tmp_path: Path, transport: str, load: str
) -> None:
    fresh_model(tmp_path / "model", alphabet=ALPHABET, context=64, **SIZES["0.1m"])
    with serving_in_a_thread(tmp_path / "model") as url:
        run = tidemill.train(
            {"kind": "guess", "low": 1, "high": 4, "turns": 2},
            tmp_path / "model",
            run_dir=tmp_path / "run",
            quiet=True,
            steps=20,
            max_lag=0,
            engine={"kind": "sglang", "url": url, "load": load},
            placement={"kind": "local", "sync": {"transport": transport}},
            rollout={"groups": 4, "group_size": 4, "max_tokens": 4},
            algorithm={"name": "grpo", "zero_variance": "keep"},
            record={"probe_every": 5, "trace": False, "checkpoint_every": 0},
            eval={"every": 0, "final_tasks": 1},
        )
    assert run.complete and run.steps == 20
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["mismatch/lag0_mean"] for line in lines if line.get("mismatch/lag0_mean") is not None]
    assert len(gaps) >= 19 and max(gaps) <= 1e-5, gaps
    with SqliteLedger(run.folder, mode="read") as ledger:
        said = [event.detail["how"].partition(": ")[2] for event in ledger.events("engine_adapted")]
        assert said == [UNPROVEN, UNSEEDED] and [version.step for version in ledger.versions()] == [*range(21)]
        assert ledger.counts().conserved
