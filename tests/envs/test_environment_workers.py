"""A user's environment in worker processes: the same record as in this process, and each fault stays where it is."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import asynccontextmanager, closing
from dataclasses import fields
from pathlib import Path

import faulty_environments as faulty_file
import numpy as np
import psutil
import pytest
from scripted_engine import ScriptedEngine, chat_tokenizer, says

from tidemill.controller.rollout import EpisodeSetup
from tidemill.core.errors import EnvironmentLost
from tidemill.core.fault_injection import LOG_VARIABLE, VARIABLE
from tidemill.core.types import Finish, InfraError, SamplingParams, Score, Task, Trajectory
from tidemill.envs.build_environment import make_environment
from tidemill.envs.chat import rollout_seeds
from tidemill.envs.environment import environment
from tidemill.envs.environment_settings import EnvironmentWorkers, GuessSettings, PythonSettings
from tidemill.envs.episode_workers import WorkerEnvironment, in_workers
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.runtime.workers import stopped

pytestmark = pytest.mark.runs

FILE = str(Path(__file__).with_name("faulty_environments.py"))
LIMIT_S = 1.0
TOKENIZER = chat_tokenizer()


class Engine(ScriptedEngine):
    """Answers "hello" a thousand times. A prompt with "slow" in it is answered when it is cancelled: never."""

    def __init__(self, context: int = 1000) -> None:
        super().__init__(says(TOKENIZER, *["hello"] * 1000), context=context)
        self.aborted: list[str] = []
        self.cancelled = 0

    async def generate(self, request):
        await asyncio.sleep(0)
        if "slow" in TOKENIZER.decode(request.tokens):
            try:
                await asyncio.sleep(600)
            finally:
                self.cancelled += 1
        return await super().generate(request)

    async def abort(self, key: str) -> None:
        self.aborted.append(key)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def until(condition, within_s: float = 15.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def workers(count: int = 1, limit_s: float = 20.0, memory_mb: int = 0, reference: str = f"{FILE}:faulty", lost=None):
    """The environment in workers, with the reasons for which one was lost; nothing is left of it in the end."""
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    reasons: list[str] = []

    def note(reason: str) -> float:
        reasons.append(reason)
        return 0.0

    settings = EnvironmentWorkers(workers=count, limit_s=limit_s, memory_mb=memory_mb)
    inner = faulty_file.judged if reference.endswith("judged") else faulty_file.faulty
    env = WorkerEnvironment(inner, reference, settings, lost or note)
    try:
        yield env, reasons
    finally:
        await env.close()
        await until(lambda: all(gone(p.pid) for p in psutil.Process().children(recursive=True) if p.pid not in before))


def task(do: str, marks: Path | None = None) -> Task:
    return Task(do, "hello there", {"do": do, "marks": str(marks)})


async def rows_of(env, what: Task, engine: Engine, limit_s: float = 60.0, context: int = 1000) -> list[Trajectory]:
    params = SamplingParams(max_tokens=20, stop_ids=(TOKENIZER.eos_token_id,))
    episodes = EpisodeSetup(env, TOKENIZER, params, context, limit_s)
    return await episodes.play(what, engine, f"key-{what.id}", rollout_seeds(1, 2, 3))


async def play(env, what: Task, engine: Engine | None = None, limit_s: float = 60.0, context: int = 1000) -> Trajectory:
    return (await rows_of(env, what, engine or Engine(context), limit_s, context))[-1]


async def pid(env) -> int:
    outcome = (await play(env, task("returns_pid"))).outcome
    assert isinstance(outcome, Score)
    return int(outcome.value)


def assert_same(a: Trajectory, b: Trajectory) -> None:
    for field in fields(Trajectory):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype, field.name
            assert left.tobytes() == right.tobytes(), field.name
        else:
            assert left == right, field.name


SAME = ["two_turns", "raises", "nan", "string", "none", "own_error", "odd_parts", "two_at_once", "too_long_at_once"]
SAME += ["fills_the_context", "swallows"]


async def test_the_record_is_the_same_as_in_this_process():
    kinds = set()
    async with workers() as (env, reasons):
        for do in SAME:
            here, there = Engine(context=200), Engine(context=200)
            expected = await play(faulty_file.faulty, task(do), here, context=200)
            assert_same(await play(env, task(do), there, context=200), expected)
            assert [p.tobytes() for p in there.prompts] == [p.tobytes() for p in here.prompts], do
            assert there.params == here.params and there.keys == here.keys and there.aborted == here.aborted, do
            kinds.add((type(expected.outcome), expected.finish))
        assert len(kinds) > 4
        assert not reasons


async def test_whole_conversations_are_recorded_as_in_this_process():
    async with workers() as (env, reasons):
        here, there = Engine(context=200), Engine(context=200)
        recorded = []
        for environment, engine in ((faulty_file.faulty, here), (env, there)):
            recorded.append(await rows_of(environment, task("branches"), engine, context=200))
        assert [len(rows) for rows in recorded] == [3, 3] and recorded[0][-1].outcome.parts["refused"] > 20
        for a, b in zip(*recorded, strict=True):
            assert_same(a, b)
        assert [row.parent is None for row in recorded[0]] == [True, False, False]
        assert not reasons


async def test_the_guessing_game_plays_the_same_in_a_worker():
    game = make_environment(GuessSettings(), RewardPool(workers=0))
    env = in_workers(game, EnvironmentWorkers(workers=1), lambda reason: 0.0, print, GuessSettings())
    assert isinstance(env, WorkerEnvironment)
    try:
        assert env.tasks("eval") == game.tasks("eval")
        for what in game.tasks("eval")[:3]:
            number = str(what.data["number"])
            here, there = [Engine() for _ in range(2)]
            for engine in (here, there):
                engine._answer = says(TOKENIZER, "what", "1", "16", number, "3")
            assert_same(await play(env, what, there), await play(game, what, here))
    finally:
        await env.close()


@pytest.mark.runs
async def test_many_slow_beginnings_are_no_long_silence():
    async with workers(limit_s=LIMIT_S) as (env, reasons):
        await pid(env)
        found = await asyncio.gather(*(play(env, task("begins_slowly"), Engine()) for _ in range(16)))  # four limits' worth
        assert all(isinstance(each.outcome, Score) for each in found) and not reasons, reasons


# what it does, and what is said of it; these cost their worker
KILLED = {
    "sleeps": r"environment faulty did not give control back for 1 s \(in sleeps, .*faulty_environments.py:\d+\)",
    "spins": r"environment faulty did not give control back for 1 s \(in spins, .*faulty_environments.py:\d+\)",
    "exits": "the worker of environment faulty exited with status 3; its last words: out of here",
    "segfaults": r"was killed by SIGSEGV; its last words: in (string_at|segfaults), ",
    "writes_everywhere": "wrote something else than a frame",
}


@pytest.mark.slow
async def test_what_costs_a_worker_costs_two_and_no_more_than_its_episodes():
    async with workers(limit_s=LIMIT_S) as (env, reasons):
        last = await pid(env)
        for number, (do, reason) in enumerate(KILLED.items(), 1):
            engine, begun = Engine(), time.monotonic()
            sibling = asyncio.ensure_future(play(env, task("withdraws"), engine))  # is under way in the same worker
            attempt = await play(env, task(do), engine)
            assert time.monotonic() - begun < 15
            assert isinstance(attempt.outcome, InfraError)
            await until(lambda number=number: len(reasons) == 2 * number)  # it was begun anew, once
            assert attempt.outcome == InfraError(reasons[-1])
            assert attempt.finish is Finish.ENV_ERROR
            assert f"key-{do}" in engine.aborted
            assert re.search(reason, attempt.outcome.reason), attempt.outcome.reason
            assert isinstance((await sibling).outcome, InfraError | Score)  # the first, if it was with it both times
            now = await pid(env)
            assert now != last
            assert gone(last)
            last = now


# these cost their own episode only
RAISED = {
    "sys_exits": "SystemExit: 4",
    "gives_up": "CancelledError: ",
    "not_a_text": "ValueError: a message of type int: expected a text or a list of messages",
    "not_a_count": "ValueError: max_tokens is a str: expected a whole number",
    "not_texts": "ValueError: a list of messages: expected role and content (a text, or a list of parts) in each",
    "not_unicode": "surrogates not allowed",
    "huge": "ValueError: a message of 1073741824 characters: at most 4194304 bytes are taken",
    "huge_together": "bytes, at most 4194304 are taken",
    "eats_memory": "MemoryError: ",
}


async def test_what_an_episode_gets_wrong_is_its_own_affair():
    async with workers(memory_mb=4096) as (env, reasons):
        first = await pid(env)
        for do, reason in RAISED.items():
            attempt = await play(env, task(do))
            assert isinstance(attempt.outcome, InfraError)
            assert reason in attempt.outcome.reason
            assert attempt.finish is Finish.ENV_ERROR
        assert await pid(env) == first
        assert not reasons


async def test_other_workers_go_on_while_one_hangs():
    async with workers(2, LIMIT_S) as (env, reasons):
        hung = asyncio.ensure_future(play(env, task("sleeps"), engine := Engine()))
        await until(lambda: len(engine.prompts) == 1)
        first, *others = [await play(env, task("two_turns")) for _ in range(20)]
        assert isinstance(first.outcome, Score)
        assert all(other.outcome == first.outcome for other in others)
        assert isinstance((await hung).outcome, InfraError)
        await until(lambda: len(reasons) == 2)
        await until(lambda: len(env.pool.pids) == 2)  # it is replaced without being asked for


async def test_many_episodes_in_one_worker_do_not_mix():
    async with workers() as (env, reasons):
        texts = [f"{'hello ' * (n % 7)}there {n}" for n in range(60)]
        whats = [Task(text, text, {"do": "two_turns"}) for text in texts]
        there = await asyncio.gather(*(play(env, what) for what in whats))
        for what, attempt in zip(whats, there, strict=True):
            assert_same(attempt, await play(faulty_file.faulty, what))
        assert not reasons


async def test_a_worker_that_is_stopped_from_outside_while_it_is_idle():
    async with workers(limit_s=LIMIT_S) as (env, reasons):
        os.kill(await pid(env), signal.SIGSTOP)
        attempt = await play(env, task("two_turns"))
        assert len(reasons) == 1 and "it is stopped" in reasons[0]
        assert attempt.info.pop("workers/lost") == 1, "it was begun anew"
        assert_same(attempt, await play(faulty_file.faulty, task("two_turns")))


async def test_a_worker_that_is_stopped_is_not_waited_for_as_a_slow_one_is(monkeypatch):
    monkeypatch.setattr(stopped, "LOOK_S", 0.02)
    async with workers(limit_s=600) as (env, reasons):
        worker = await pid(env)
        os.kill(worker, signal.SIGSTOP)
        attempt = await asyncio.wait_for(play(env, task("two_turns")), 60)
        assert len(reasons) == 1 and "was stopped by a signal" in reasons[0] and await pid(env) != worker
        assert attempt.info.pop("workers/lost") == 1, "it was begun anew"
        assert_same(attempt, await play(faulty_file.faulty, task("two_turns")))


async def test_an_episode_whose_worker_is_killed_is_begun_anew_with_its_seeds():
    """In the middle of a turn: nothing of the first beginning is in the record."""
    async with workers() as (env, reasons):
        worker, engine = await pid(env), Engine()
        answer, asked = engine._answer, asyncio.Event()

        def kills_once(*given):
            if len(engine.prompts) == 2 and not asked.is_set():  # of the second turn
                asked.set()
                os.kill(worker, signal.SIGKILL)
            return answer(*given)

        engine._answer = kills_once
        attempt = await play(env, task("two_turns"), engine)
        assert asked.is_set() and len(reasons) == 1 and "SIGKILL" in reasons[0]
        undisturbed = await play(faulty_file.faulty, task("two_turns"))
        assert attempt.tokens.tobytes() == undisturbed.tokens.tobytes() and attempt.outcome == undisturbed.outcome
        assert [p.seed for p in engine.params[2:]] == [p.seed for p in engine.params[:2]]
        assert "key-two_turns" in engine.aborted


async def test_a_controller_that_stood_still_blames_nobody():
    async with workers(limit_s=LIMIT_S) as (env, reasons):
        first = await pid(env)
        waiting = asyncio.ensure_future(play(env, task("withdraws")))
        for _ in range(2):
            await asyncio.sleep(0.06)
            time.sleep(1.2 * LIMIT_S)
        assert isinstance((await waiting).outcome, Score)
        assert await pid(env) == first
        assert not reasons


async def test_cancelling_ends_the_episode_and_not_the_worker(tmp_path):
    async with workers() as (env, reasons):
        first, marks = await pid(env), tmp_path / "cancelled"
        for limit_s in (60.0, 2.0):  # by the caller, and by the episode's deadline
            playing = asyncio.ensure_future(play(env, task("waits", marks), limit_s=limit_s))
            await until(lambda: marks.with_suffix(".begun").exists())
            if limit_s > 2:
                playing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await playing
            else:
                assert (await playing).outcome == InfraError("the episode took longer than 2 s")
            await until(lambda: marks.exists() and marks.read_text() == str(first))
            marks.unlink()
            marks.with_suffix(".begun").unlink()
        assert await pid(env) == first
        assert not reasons


async def test_an_episode_that_ignores_its_cancellation_costs_its_worker(tmp_path):
    async with workers(limit_s=LIMIT_S) as (env, reasons):
        first = await pid(env)
        playing = asyncio.ensure_future(play(env, task("stubborn", tmp_path / "m")))
        await until((tmp_path / "m.begun").exists)
        playing.cancel()
        await until(lambda: len(reasons) == 1)
        assert reasons == ["an episode of environment faulty went on for 1 s after it was cancelled"]
        assert await pid(env) != first


async def test_a_reply_that_is_not_waited_for_is_not_in_the_record():
    async with workers() as (env, reasons):
        attempt = await play(env, task("withdraws"), engine := Engine())
        assert engine.cancelled == 1
        assert attempt.outcome == Score(5.0)
        assert attempt.turns == 1
        assert "slow" not in TOKENIZER.decode(attempt.tokens)
        assert not reasons
        attempt = await play(env, task("dies_while_it_asks"), engine)
        assert engine.cancelled == 3  # it was begun anew, once
        assert attempt.turns == 1
        assert isinstance(attempt.outcome, InfraError)


async def test_forks_answer_once_and_do_not_stay(tmp_path):
    async with workers() as (env, reasons):
        first = await pid(env)
        for do, value in {"forks_and_stays": 5.0, "forks_and_speaks": 5.0, "forks_after_the_last_reply": 1.0}.items():
            attempt = await play(env, task(do, tmp_path / "fork"))
            assert attempt.outcome == Score(value)
            assert attempt.turns == 1
        await until(lambda: all(gone(child.pid) for child in psutil.Process(first).children()))
        assert (tmp_path / "fork").read_bytes() == b""
        assert await pid(env) == first
        assert not reasons


async def test_processes_of_an_episode_go_with_its_worker(tmp_path):
    marks = tmp_path / "pids"
    async with workers() as (env, _):
        playing = asyncio.ensure_future(play(env, task("leaves_processes", marks)))
        await until(lambda: marks.exists() and marks.read_text().endswith("\n"))
    with pytest.raises(EnvironmentLost, match="was closed"):
        await playing
    await until(lambda: all(gone(int(each)) for each in marks.read_text().split()))


async def test_too_many_losses_end_the_run_with_a_reason():
    def lost(reason: str) -> float:
        reasons.append(reason)
        if len(reasons) == 3:
            raise RuntimeError(f"{reason}; three times")
        return 0.0

    reasons: list[str] = []
    async with workers(lost=lost) as (env, _):
        assert isinstance((await play(env, task("exits"))).outcome, InfraError)
        with pytest.raises(EnvironmentLost, match="out of here; three times"):
            await asyncio.wait_for(play(env, task("exits")), 20)
        with pytest.raises(EnvironmentLost, match="three times"):
            await play(env, task("two_turns"))


async def test_what_does_not_load_in_a_worker_ends_the_run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import tidemill\ntidemill.train('guess', 'new:0.1m', run_dir='run')\n")
    started = Path(FILE).with_name("absent.py")
    for reference, reason in {
        f"{script}:x": "tidemill.train.. is called while script.py is being",
        f"{started}:x": "not exist",
    }.items():
        async with workers(reference=reference) as (env, reasons):
            with pytest.raises(EnvironmentLost, match=reason):
                await asyncio.wait_for(play(env, task("two_turns")), 30)
            assert not reasons


@pytest.mark.slow
async def test_an_environment_of_its_own_class_judges_in_its_worker():
    async with workers(limit_s=LIMIT_S, reference=f"{FILE}:judged") as (env, reasons):
        assert env.tasks("eval")[0].id == "eval-0"
        attempts = [await play(env, Task("t", text)) for text in ("hello", "what is the answer?")]
        assert [a.outcome for a in attempts] == [None, None]
        full = Task("full", "fill the context")
        expected = await play(faulty_file.judged, full, context=200)
        assert expected.finish is Finish.CONTEXT
        assert_same(await play(env, full, context=200), expected)
        expected = await faulty_file.judged.judge(Task("t", "t"), attempts)
        outcomes = await env.judge(Task("t", "t"), attempts)
        assert [o.value for o in outcomes] == [o.value for o in expected]
        assert {o.parts["pid"] for o in outcomes} != {os.getpid()}
        episodes = EpisodeSetup(env, TOKENIZER, SamplingParams(), 1000, 60.0)
        await episodes.judge(Task("t", "raise"), [[each] for each in attempts])
        assert attempts[0].outcome == InfraError("LookupError: no rule (faulty_environments.py:244)")
        attempts[0].outcome = attempts[1].outcome = None
        await episodes.judge(Task("t", "sleep"), [[each] for each in attempts])
        assert all(isinstance(a.outcome, InfraError) and "in judge, " in a.outcome.reason for a in attempts)
        await until(lambda: len(reasons) == 2)


@pytest.mark.parametrize("kind", ["kill", "raise"])
async def test_faults_on_purpose(kind, tmp_path, monkeypatch):
    fault = f"environment:{'reply' if kind == 'kill' else 'episode'}:1:{kind}"
    monkeypatch.setenv(VARIABLE, fault)
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "log"))
    async with workers(limit_s=LIMIT_S) as (env, reasons):
        outcomes = [(await play(env, task("two_turns"))).outcome for _ in range(3)]
    if kind == "kill":  # it happens once, and so not to the second beginning
        assert [type(o) for o in outcomes] == [Score, Score, Score]
        assert len(reasons) == 1 and "SIGKILL" in reasons[0]
    else:
        assert [type(o) for o in outcomes] == [Score, InfraError, Score]
        assert "on purpose" in outcomes[1].reason and not reasons
    assert (tmp_path / "log").read_text() == f"{fault}\n"


PARENT = f"""
import asyncio, sys
sys.path[:0] = {[str(Path(FILE).parent)]!r}
import test_environment_workers as t
async def main():
    async with t.workers(2) as (env, _):
        print(await t.pid(env), env.pool._guard.pid, flush=True)
        await asyncio.gather(*(t.play(env, t.task("leaves_processes", f"{{sys.argv[1]}}/{{n}}")) for n in range(2)))
asyncio.run(main())
"""


async def test_nothing_outlives_a_killed_controller(tmp_path):
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        started = [int(each) for each in parent.stdout.readline().split()]
        await until(lambda: len([p for p in tmp_path.iterdir() if p.read_text().endswith("\n")]) == 2)
        os.kill(parent.pid, signal.SIGKILL)
    started += [int(each) for path in tmp_path.iterdir() for each in path.read_text().split()]
    assert len(started) == 6
    await until(lambda: all(map(gone, started)))


def test_what_goes_to_workers_and_what_stays():
    told: list[str] = []
    default, none = EnvironmentWorkers(), EnvironmentWorkers(workers=0)

    def placed(env, settings=default, written=None):
        return in_workers(env, settings, lambda reason: 0.0, told.append, written)

    async def local(task, chat):
        return 1.0

    written = PythonSettings(path=f"{FILE}:judged")
    guess = make_environment(GuessSettings(), RewardPool(workers=0))
    assert isinstance(placed(faulty_file.faulty), WorkerEnvironment)
    assert isinstance(placed(faulty_file.judged, written=written), WorkerEnvironment)
    assert placed(faulty_file.faulty, none) is faulty_file.faulty
    assert placed(guess, written=GuessSettings()) is guess
    assert not told
    closure = environment(local)
    assert placed(closure) is closure
    assert placed(faulty_file.judged) is faulty_file.judged
    assert len(told) == 2
    assert "local runs in this process" in told[0]


TRAINED = """
import os

from tidemill import Score, environment

rows = [{"prompt": f"{c}{sign}", "answer": c} for c in "abcdefghij" for sign in "=:"]


@environment(tasks=rows)
async def copies(task, chat):
    first = await chat.reply(task.prompt, max_tokens=2)
    with open("played", "a") as played:
        if played.write("x") and played.tell() == int(os.environ["DIES_AT"]):
            os._exit(7)
    again = await chat.reply("=", max_tokens=2)
    return Score((ord((first + again + "a")[0]) % 8) / 8, {"worker": float(os.getpid())})
"""


def test_a_whole_run_with_environment_workers(tmp_path, monkeypatch):
    import tidemill
    from tidemill.models.new_model import SIZES, fresh_model

    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(TRAINED)
    fresh_model(tmp_path / "m", alphabet="abcdefghij=:\n ", context=32, **SIZES["0.1m"])
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    told: list[dict[str, float]] = []
    settings = {
        "run_dir": tmp_path / "run",
        "steps": 2,
        "quiet": True,
        "placement": "inline",
        "rollout": {"groups": 4, "group_size": 4},
        "eval": {"tasks": 2, "final_tasks": 2},
        "record": {"probe_every": 0},
        "callbacks": [lambda step, metrics: told.append(metrics)],
    }
    monkeypatch.setenv("DIES_AT", "9")
    with pytest.raises(EnvironmentLost, match=r"exited with status 7; .*supervise\.restarts"):
        tidemill.train("mine.py:copies", tmp_path / "m", supervise={"restarts": 0}, **settings)
    told.clear()
    Path("played").unlink()
    monkeypatch.setenv("DIES_AT", "1")
    run = tidemill.train("mine.py:copies", tmp_path / "m", supervise={"backoff_s": 0.0}, **settings)
    assert run.complete
    assert run.report["groups"]["trained"] == 8
    assert all(metrics["reward/mean"] > 0 for metrics in told if "reward/mean" in metrics)
    assert sum(metrics.get("infra_errors", 0.0) + metrics.get("eval/infra_errors", 0.0) for metrics in told) == 0
    with closing(sqlite3.connect(tmp_path / "run" / "ledger.sqlite")) as ledger:
        events = ledger.execute("SELECT detail FROM events WHERE kind = 'environment_worker_lost'").fetchall()
    assert ["the worker of environment copies exited with status 7" in detail for (detail,) in events] == [True, True]
    deadline = time.monotonic() + 5
    while not all(gone(p.pid) for p in psutil.Process().children(recursive=True) if p.pid not in before):
        assert time.monotonic() < deadline
        time.sleep(0.01)
