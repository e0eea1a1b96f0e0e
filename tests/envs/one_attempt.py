"""One attempt as a run plays it, with a policy that says what it is told: its outcome, and what its parts counted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import psutil
from envs.scripted_engine import ScriptedEngine, chat_tokenizer

from tidemill.controller.rollout import EpisodeSetup
from tidemill.controller.run_monitor import count
from tidemill.core.chat_interface import Chat
from tidemill.core.episode_counts import counts_in
from tidemill.core.types import Group, Outcome, SamplingParams, Task, Trajectory
from tidemill.envs.chat import rollout_seeds
from tidemill.observability.metrics import StepMetrics

PATIENT_S = 60.0  # for events that come at once on an idle machine


class Attempt(NamedTuple):
    outcome: Outcome | None
    counts: dict[str, int]
    rows: list[Trajectory]


class Playing:
    """An environment of one function, in this process."""

    name = "playing"

    def __init__(self, run: Callable[[Task, Chat], Awaitable[Any]]) -> None:
        self.run = run


class SayingEngine(ScriptedEngine):
    """Says the same at each call."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        super().__init__(lambda tokens, params: ids, context=1 << 30)

    async def abort(self, key: str) -> None:
        return None


async def attempt(
    environment: Any, task: Task | None = None, *, says: str = "hello", limit_s: float = PATIENT_S, tokenizer: Any = None
) -> Attempt:
    """Play one attempt, and count it as a run's step does."""
    tokenizer = tokenizer or chat_tokenizer()
    params = SamplingParams(stop_ids=(tokenizer.eos_token_id,), max_tokens=1 << 24)
    setup = EpisodeSetup(environment, tokenizer, params, context=1 << 26, limit_s=limit_s)
    task = task or Task("t", "hello")
    rows = await setup.play(task, SayingEngine(tokenizer, says), "k", rollout_seeds(0, 0, 0))  # type: ignore[arg-type]
    counts, metrics = counts_in(rows[-1].info), StepMetrics()
    count(metrics, Group(1, task, rows), None)
    taken = metrics.take()
    assert {name: taken[name] for name in counts} == counts, "a step's metrics tell something else"
    return Attempt(rows[-1].outcome, counts, rows)


async def happens(there: Callable[[], bool]) -> None:
    """Wait until something has happened."""
    async with asyncio.timeout(PATIENT_S):
        while not there():
            await asyncio.sleep(0.005)


def stopped(pid: int) -> bool:
    """True once a process is there, and a signal has stopped it."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() == psutil.STATUS_STOPPED


def gone(pid: int) -> bool:
    """True if there is no process of this id, or nothing of it but its status."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@contextmanager
def leaves_nothing() -> Iterator[None]:
    """Check that every process which was started within the block has ended with it."""
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    yield
    left = [each for each in psutil.Process().children(recursive=True) if each.pid not in before]
    assert not [each for each in left if each.is_running() and each.status() != psutil.STATUS_ZOMBIE], left
