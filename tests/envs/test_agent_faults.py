"""Programs as agents that are killed, stopped, slow or lying: see the table in `reliability/test_fault_table.py`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from one_attempt import Attempt, Playing, attempt, gone, happens, leaves_nothing, stopped

from tidemill.core.types import Score, Task, Unscorable
from tidemill.envs.agent_environment import AgentEnvironment
from tidemill.envs.agent_player import NO_SCORE, PLAYERS, AgentPlayer, ProgramPerEpisode, ProgramPerRun, play_task
from tidemill.envs.agent_process import AgentProcess
from tidemill.envs.agent_workers import AgentWorkers
from tidemill.envs.environment_settings import AgentSettings, EnvironmentWorkers
from tidemill.envs.reward_workers.reward_pool import RewardPool

pytestmark = pytest.mark.runs

FILE = Path(__file__).with_name("programs") / "faulty_agent.py"
COMMAND = [sys.executable, str(FILE)]
AT_THE_EVENT = 1e6  # seconds: the limit of an agent that is late as soon as a test says so


class Stage:
    """A folder for what an agent notes, and the end of its time."""

    def __init__(self, note: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.note, self.over = note, asyncio.Event()
        ended_within = AgentProcess.ended_within

        async def until(process: AgentProcess, limit_s: float, *others: asyncio.Future[Any]) -> bool:
            if limit_s < AT_THE_EVENT / 2:
                return await ended_within(process, limit_s, *others)
            over = asyncio.ensure_future(self.over.wait())
            await ended_within(process, limit_s, *others, over)
            over.cancel()
            return process.ended

        monkeypatch.setattr(AgentProcess, "ended_within", until)

    def task(self, word: str) -> Task:
        return Task("t", "hello", {"word": word, "note": str(self.note)})

    @property
    def pid(self) -> int:
        """The program's process id, once it has been answered; 0 before."""
        said = self.note.read_text() if self.note.exists() else ""
        return int(said) if said.endswith(" ") else 0

    async def play(self, word: str, player: AgentPlayer | None = None, late: Callable[[], bool] | None = None) -> Attempt:
        """Play an attempt. late: says when the agent's time is over."""
        own = player or ProgramPerEpisode(COMMAND, AT_THE_EVENT, False)
        playing = asyncio.ensure_future(attempt(Playing(lambda task, chat: play_task(own, task, chat)), self.task(word)))
        if late is not None:
            await happens(late)
            self.over.set()
        return await playing


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path / "note", monkeypatch)


ASKED = {"gateway/calls": 1, "agent/runs": 1}


async def test_a_killed_agent(stage: Stage) -> None:
    with leaves_nothing():
        found = await stage.play("killed")
    assert found.outcome == Unscorable("the agent ended with killed by SIGKILL")
    assert found.counts == ASKED | {"agent/failed": 1}


async def test_a_frozen_agent(stage: Stage) -> None:
    with leaves_nothing():
        found = await stage.play("frozen", late=lambda: stopped(stage.pid))
    assert found.outcome == Unscorable("the agent took longer than 1e+06 s")
    assert found.counts == ASKED | {"agent/late": 1} and gone(stage.pid)


async def test_a_slow_agent(stage: Stage) -> None:
    with leaves_nothing():
        found = await stage.play("slow", late=lambda: bool(stage.pid))
    assert found.outcome == Unscorable("the agent took longer than 1e+06 s")
    assert found.counts == ASKED | {"agent/late": 1} and gone(stage.pid)


@pytest.mark.parametrize("lifetime", ["episode", "run"])
async def test_a_late_agent_is_told_of_with_its_last_words(stage: Stage, lifetime: str) -> None:
    command = [*COMMAND, *(["--all"] if lifetime == "run" else [])]
    player = PLAYERS[lifetime](command, AT_THE_EVENT, False)
    with leaves_nothing():
        try:
            found = await stage.play("complaining", player, late=lambda: bool(stage.pid))
        finally:
            await player.close()
    said = "the agent took longer than 1e+06 s; its last words: the database does not answer"
    assert found.outcome == Unscorable(said)


async def test_the_last_words_are_those_of_the_episode() -> None:
    process = AgentProcess(lambda line: None, None)
    assert process.last_words() == ""
    process.pipe_data_received(2, b"of another\n")
    before = process.complained
    assert process.last_words(before) == ""
    process.pipe_data_received(2, b"of this one\n")
    assert process.last_words(before) == "; its last words: of this one"
    assert process.last_words() == "; its last words: of another / of this one"
    process.pipe_data_received(2, b"x" * 10_000)
    assert len(process.last_words(before)) < 400


@pytest.mark.parametrize(
    ("word", "reason", "counted"),
    [
        ("wrong type", NO_SCORE, "agent/unscored"),
        ("half", NO_SCORE, "agent/unscored"),
        ("huge", "the agent printed more than 1 MiB", "agent/failed"),
    ],
)
async def test_a_lying_agent(stage: Stage, word: str, reason: str, counted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = AgentProcess.start.__func__  # type: ignore[attr-defined]

    async def started(cls: Any, command: Any, variables: Any, hear: Any, most: int | None = 1 << 20) -> Any:
        return await start(cls, command, variables, hear, most)

    monkeypatch.setattr(AgentProcess, "start", classmethod(started))
    with leaves_nothing():
        found = await stage.play(word)
    assert found.outcome == Unscorable(reason) and found.counts == ASKED | {counted: 1}


async def test_the_last_of_ten_thousand_verdicts_counts(stage: Stage) -> None:
    with leaves_nothing():
        found = await stage.play("many")
    assert found.outcome == Score(1.0) and found.counts == ASKED


async def test_a_frozen_agent_of_a_run_is_replaced(stage: Stage) -> None:
    """Else every later episode would be late, too."""
    player = ProgramPerRun([*COMMAND, "--all"], AT_THE_EVENT, False)
    with leaves_nothing():
        try:
            found = await stage.play("frozen", player, late=lambda: stopped(stage.pid))
            frozen = stage.pid
            assert isinstance(found.outcome, Unscorable) and found.counts == ASKED | {"agent/late": 1}
            stage.note.unlink()
            stage.over.clear()
            assert (await stage.play("", player)).outcome == Score(1.0)
            assert stage.pid != frozen and gone(frozen)
        finally:
            await player.close()


async def test_a_slow_episode_leaves_the_agent_of_a_run_alone(stage: Stage) -> None:
    """It has answered another one meanwhile, so it is at work."""
    player = ProgramPerRun([*COMMAND, "--all"], AT_THE_EVENT, False)
    with leaves_nothing():
        try:
            slow = asyncio.ensure_future(stage.play("slow", player))
            await happens(lambda: bool(stage.pid))
            first = stage.pid
            assert (await stage.play("", player)).outcome == Score(1.0)
            stage.over.set()
            assert isinstance((await slow).outcome, Unscorable)
            stage.over.clear()
            assert (await stage.play("", player)).outcome == Score(1.0) and stage.pid == first
        finally:
            await player.close()


async def test_what_a_worker_counts_comes_to_the_row(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(30)))
    settings = AgentSettings(command=f"python {FILE}", data=str(tmp_path / "rows.jsonl"))
    with leaves_nothing():
        inner = AgentEnvironment(settings, RewardPool(workers=0))
        environment = AgentWorkers(inner, EnvironmentWorkers(workers=1, limit_s=60.0), lambda reason: 0.0)
        try:
            found = await attempt(environment, stage.task("killed"))
        finally:
            await environment.close()
    assert found.outcome == Unscorable("the agent ended with killed by SIGKILL")
    assert found.counts == ASKED | {"agent/failed": 1}
