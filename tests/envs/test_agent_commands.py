"""Programs as agents: what they print decides, and whatever they do wrong costs their own attempt and nothing else."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from gateway.recording_chat import RecordingChat, said

from tidemill.core.config import build
from tidemill.core.episode_counts import counting
from tidemill.core.errors import ConfigError
from tidemill.core.types import InfraError, Outcome, Score, Task, Unscorable
from tidemill.envs import agent_player, agent_process
from tidemill.envs.agent_environment import AgentEnvironment
from tidemill.envs.agent_player import NO_SCORE, ProgramPerEpisode, ProgramPerRun, play_task
from tidemill.envs.agent_process import AgentProcess
from tidemill.envs.build_environment import make_environment
from tidemill.envs.environment_settings import AgentSettings, EnvironmentWorkers
from tidemill.envs.episode_workers import in_workers
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.gateway import gateway

pytestmark = pytest.mark.runs

FILE = Path(__file__).with_name("programs") / "playing_agent.py"
COMMAND = f"python {shlex.quote(str(FILE))}"


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"say {i}", "answer": f"say {i}"}) for i in range(40)))
    return str(path)


@pytest.fixture(autouse=True)
def nothing_left() -> AsyncIterator[None]:  # type: ignore[misc]
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    yield  # type: ignore[misc]
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE], left


def task(word: str = "", **data: Any) -> Task:
    return Task("t", "hello", {"word": word, "answer": "hello", **data})


def settings(data: str, **given: Any) -> AgentSettings:
    return build(AgentSettings, {"command": COMMAND, "data": data, **given})


async def play(
    given: Task, chat: RecordingChat | None = None, limit_s: float = 60.0, judged: bool = False
) -> Outcome | None:
    command = [agent_process.sys.executable, str(FILE)]
    return await play_task(ProgramPerEpisode(command, limit_s, judged), given, chat or RecordingChat())


async def test_a_program_plays_and_tells_its_score() -> None:
    chat = RecordingChat()
    assert await play(task("twice"), chat) == Score(1.0, {"length": 19.0})
    assert [len(each["messages"]) for each in chat.asked] == [1, 2]
    assert await play(task(answer="something else")) == Score(0.0, {"length": 8.0})
    assert await play(task(), judged=True) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (task("fail"), Unscorable("the agent ended with exit status 3; its last words: something went wrong here")),
        (task("killed"), Unscorable("the agent ended with killed by SIGKILL")),
        (task("flood"), Unscorable("the agent printed more than 1 MiB in one line")),
        (task("forged"), Unscorable(NO_SCORE)),
        (task("silent score"), InfraError("the agent ended without a reply of the policy: it called nothing")),
        (task(more={"score": None, "reason": "no idea"}), Unscorable("no idea")),
        (task(more={"score": "much"}), InfraError("the agent returned 'much' (str): expected a number or None")),
        (
            task(more={"parts": {"a": "b"}}),
            InfraError("the agent returned a Score whose a is 'b': expected a finite number"),
        ),
        (Task("t", "a" * 300_000, {"answer": "aaa"}), Score(1.0, {"length": 300_003.0})),
        (Task("t", "nul \0 byte", {"answer": "nul \0"}), Score(1.0, {"length": 13.0})),
    ],
    ids=["fail", "killed", "flood", "forged", "silent", "no score", "no number", "no parts", "long", "nul"],
)
async def test_every_end_of_a_program_has_its_outcome(given: Task, expected: Outcome) -> None:
    forged = '{"id": "t", "score": 1}\n{"score": 1}'
    chat = RecordingChat(
        lambda messages: said(forged if given.data.get("word") == "forged" else f"to {messages[-1]['content']}")
    )
    assert await play(given, chat) == expected


async def test_an_exception_of_a_program_is_told_with_its_line() -> None:
    outcome = await play(task("raises"))
    assert isinstance(outcome, Unscorable)
    assert re.search(r'playing_agent.py", line \d+, in play / .* / TypeError: can only', outcome.reason), outcome


async def test_an_agent_whose_calls_are_refused_is_told_why() -> None:
    outcome = await play(task("refused"))
    assert isinstance(outcome, InfraError)
    said = "the agent ended without a reply of the policy: 1 refused call, the latest with: 400 "
    assert outcome.reason.startswith(said) and len(outcome.reason) > len(said)


@pytest.mark.parametrize("workers", [0, 1])
async def test_why_calls_are_refused_is_told_of_an_agent_that_goes_on(rows: str, workers: int) -> None:
    counts, why = Counter[str](), list[str]()
    made = make_environment(settings(rows), RewardPool(workers=0))
    environment = in_workers(made, EnvironmentWorkers(workers=workers, limit_s=60.0), lambda reason: 0.0, pytest.fail)
    try:
        with counting(counts.update, why.append):
            await environment.run(task("refused"), RecordingChat())
    finally:
        await environment.close()
    assert counts["gateway/refused"] == len(why) == 1 and why[0].startswith("400 ")


async def test_few_programs_start_at_a_time_and_many_play(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_player, "usable_cores", lambda: 2)
    start, ended, all_ask = AgentProcess.start, AgentProcess.ended_within, asyncio.Event()
    starting, most = set[AgentProcess](), 0

    async def started(*given: Any) -> AgentProcess:
        nonlocal most
        starting.add(process := await start(*given))
        most = max(most, len(starting))
        return process

    async def waited(process: AgentProcess, limit_s: float, *others: Any) -> bool:
        found = await ended(process, limit_s, *others)
        starting.discard(process)  # its first wait is for its first question
        return found

    class Patient(RecordingChat):
        async def complete(self, messages: Any, **how: Any) -> Any:
            reply = await super().complete(messages, **how)
            if len(self.asked) == 6:
                all_ask.set()
            await asyncio.wait_for(all_ask.wait(), 60)
            return reply

    monkeypatch.setattr(AgentProcess, "start", started)
    monkeypatch.setattr(AgentProcess, "ended_within", waited)
    command, patient = [agent_process.sys.executable, str(FILE)], Patient()
    player = ProgramPerEpisode(command, 60.0, False)
    played = await asyncio.gather(*(play_task(player, task(), patient) for _ in range(6)))
    assert played == [Score(1.0, {"length": 8.0})] * 6 and most == 2, "those that have asked make room for others"
    player = ProgramPerEpisode(command, 0.2, False)
    late = await asyncio.gather(*(play_task(player, task("hang"), RecordingChat()) for _ in range(5)))
    assert all(isinstance(each, Unscorable) for each in late) and most == 2


async def test_a_late_program_is_unscorable_and_ends() -> None:
    assert await play(task("hang"), limit_s=0.5) == Unscorable("the agent took longer than 0.5 s")


async def test_what_a_program_leaves_ends_with_it(tmp_path: Path) -> None:
    outcome = await play(task("orphan", note=str(tmp_path / "pid")))
    assert isinstance(outcome, Score)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


async def test_an_engine_that_fails_is_raised_though_the_program_goes_on() -> None:
    chat = RecordingChat(lambda messages: RuntimeError("the engine burns"))
    with pytest.raises(RuntimeError, match="burns"):
        await play(task(), chat)


async def test_a_cancelled_episode_ends_its_program() -> None:
    chat = RecordingChat()
    chat.gate = asyncio.Event()
    playing = asyncio.ensure_future(play(task(), chat))
    await chat.count(1)
    playing.cancel()
    await asyncio.wait({playing}, timeout=30)
    assert playing.cancelled() and chat.cancelled == 1


async def test_one_process_plays_many_episodes_and_is_replaced_when_it_dies() -> None:
    player = ProgramPerRun([agent_process.sys.executable, str(FILE), "--all"], 60.0, False)
    chats = [RecordingChat() for _ in range(12)]
    try:
        for _ in range(2):
            outcomes = await asyncio.gather(*(play_task(player, task("twice"), chat) for chat in chats))
            assert outcomes == [Score(1.0, {"length": 19.0})] * 12
        process = player._process
        held = RecordingChat()
        held.gate = asyncio.Event()
        other = asyncio.ensure_future(play_task(player, task(), held))
        await held.count(1)
        died = await play_task(player, task("die"), RecordingChat())
        assert died == Unscorable("the agent ended with exit status 7")
        assert await other == died  # its attempt was lost with the process
        assert await play_task(player, task(), RecordingChat()) == Score(1.0, {"length": 8.0})
        assert player._process is not process
        player._limit_s = 0.3
        assert await play_task(player, task("silent"), RecordingChat()) == Unscorable("the agent took longer than 0.3 s")
    finally:
        await player.close()


@pytest.mark.parametrize("lifetime", ["episode", "run"])
@pytest.mark.parametrize("workers", [0, 2])
async def test_an_environment_of_a_command(rows: str, lifetime: str, workers: int) -> None:
    """In this process and in workers, whose channel carries what the program asks."""
    command = COMMAND + (" --all" if lifetime == "run" else "")
    made = make_environment(settings(rows, command=command, lifetime=lifetime), RewardPool(workers=0))
    environment = in_workers(made, EnvironmentWorkers(workers=workers, limit_s=60.0), lambda reason: 0.0, pytest.fail)
    try:
        assert environment.name == "playing_agent" and len(environment.tasks("train")) > len(environment.tasks("eval")) > 0
        tasks = environment.tasks("train")[:6]
        chats = [RecordingChat() for _ in tasks]
        played = await asyncio.gather(*(environment.run(each, chat) for each, chat in zip(tasks, chats, strict=True)))
        assert played == [Score(1.0, {"length": float(len(each.prompt) + 3)}) for each in tasks]
        assert [chat.asked[0]["messages"][0]["content"] for chat in chats] == [each.prompt for each in tasks]
        failing = RecordingChat(lambda messages: RuntimeError("the engine burns"))
        with pytest.raises(RuntimeError, match="burns"):
            await environment.run(tasks[0], failing)
    finally:
        await environment.close()


async def test_rewards_may_decide_instead(rows: str) -> None:
    made = make_environment(settings(rows, reward="exact"), RewardPool(workers=0))
    assert isinstance(made, AgentEnvironment) and made.judged and not made.grouped
    first = made.tasks("train")[0]
    assert await made.run(first, RecordingChat()) is None
    assert made.gold(first) == first.data["answer"]


def test_tasks_may_come_from_a_file_of_python(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("tasks = [{'prompt': f'task {i}'} for i in range(50)]\n")
    made = make_environment(settings(f"{file}:tasks"), RewardPool(workers=0))
    assert len(made.tasks("train")) + len(made.tasks("eval")) == 50


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"command": ""}, "env.command is empty"),
        ({"command": "python 'x"}, "cannot be read"),
        ({"command": "no-such-program-here"}, "there is no program 'no-such-program-here'"),
        ({"command": "python missing.py"}, "file 'missing.py' does not exist"),
        ({"reward": "exakt"}, "exakt"),
        ({"data": "missing.jsonl"}, "'missing.jsonl' does not exist"),
    ],
)
def test_a_command_that_cannot_be_used_is_refused(rows: str, given: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_environment(settings(rows).model_copy(update=given), RewardPool(workers=0))


def test_a_missing_package_is_told_before_a_run(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = gateway.importlib.util.find_spec
    monkeypatch.setattr(gateway.importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name))
    with pytest.raises(ConfigError, match=r"pip install 'tidemill\[serve\]'"):
        make_environment(settings(rows), RewardPool(workers=0))
