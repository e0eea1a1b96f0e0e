"""Requests to a living run's engine pool, as files in its folder."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from tidemill.core.errors import ConfigError
from tidemill.run import pool_requests
from tidemill.run.pool_requests import ENDED, FOLDER, Request, answering, ask

PID = 4711


class Engines:
    """A pool that knows names only; `stuck` is never drained."""

    def __init__(self) -> None:
        self.names, self.draining = ["engine-0", "stuck"], asyncio.Event()

    async def join(self) -> str:
        self.names.append(name := f"engine-{len(self.names)}")
        return name

    async def drain(self, name: str, *, hand_over: bool = False) -> None:
        if name not in self.names:
            raise ValueError(f"drain({name!r}): it does not serve\nwith a trace")
        if name == "stuck" and not hand_over:
            self.draining.set()
            await asyncio.Event().wait()
        self.names.remove(name)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_requests, "EVERY_S", 0.005)


def asked(folder: Path, request: Request, alive: bool = True, limit_s: float = 30.0) -> asyncio.Future[str]:
    return asyncio.ensure_future(asyncio.to_thread(ask, folder, request, lambda: alive, limit_s))


async def test_engines_are_added_and_removed(tmp_path: Path) -> None:
    engines = Engines()
    async with answering(tmp_path, engines, PID):
        assert await asked(tmp_path, Request(PID, "add")) == "engine-2"
        assert await asked(tmp_path, Request(PID, "remove", "engine-0")) == "engine-0"
        assert await asked(tmp_path, Request(PID, "remove", "stuck", hand_over=True)) == "stuck"
    assert engines.names == ["engine-2"] and not list((tmp_path / FOLDER).iterdir())


async def test_a_refusal_is_the_runs_sentence_and_the_run_goes_on(tmp_path: Path) -> None:
    async with answering(tmp_path, Engines(), PID):
        with pytest.raises(ConfigError, match=r"^drain\('engine-7'\): it does not serve$"):
            await asked(tmp_path, Request(PID, "remove", "engine-7"))
        with pytest.raises(ConfigError, match="was to process 1, and the run is process 4711 now"):
            await asked(tmp_path, Request(1, "add"))
        for damaged in (b"{", b"[]", json.dumps({"pid": PID, "action": "burn"}).encode()):
            path = tmp_path / FOLDER / "x.request.json"
            path.with_suffix(".new").write_bytes(damaged)
            os.rename(path.with_suffix(".new"), path)
            answer = tmp_path / FOLDER / "x.answer.json"
            async with asyncio.timeout(30):
                while not answer.exists():
                    await asyncio.sleep(0.005)
            assert json.loads(answer.read_text())["error"]
            answer.unlink()
        assert await asked(tmp_path, Request(PID, "add")) == "engine-2"


async def test_who_waits_is_told_when_the_run_ends_or_does_not_answer(tmp_path: Path) -> None:
    engines = Engines()
    async with answering(tmp_path, engines, PID):
        waiting = asked(tmp_path, Request(PID, "remove", "stuck"))
        async with asyncio.timeout(30):
            await engines.draining.wait()
    with pytest.raises(ConfigError, match=ENDED):
        await waiting
    with pytest.raises(ConfigError, match=ENDED):
        await asked(tmp_path, Request(PID, "add"), alive=False)
    with pytest.raises(ConfigError, match=r"no answer within 0\.01 s"):
        await asked(tmp_path, Request(PID, "add"), limit_s=0.01)
    assert not list((tmp_path / FOLDER).iterdir())


async def test_what_an_earlier_process_was_asked_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "old.request.json").write_text(json.dumps({"pid": PID, "action": "add"}))
    engines = Engines()
    async with answering(tmp_path, engines, PID):
        assert await asked(tmp_path, Request(PID, "add")) == "engine-2"
    assert engines.names == ["engine-0", "stuck", "engine-2"]
