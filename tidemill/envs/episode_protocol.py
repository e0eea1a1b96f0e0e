"""Messages between the controller and an environment worker: msgpack in `runtime.workers` frames.

    controller -> worker   LoadEnvironment, then any number of Begin or JudgeRequest; EpisodeAnswer or ReplyRefused to an
                           Ask; CancelEpisode; WorkerPing
    worker -> controller   EnvironmentLoaded, then for each Begin any number of Ask and one EpisodeEnded; for each
                           JudgeRequest one Judged; Raised instead of either; Pong

Many episodes can run at a time, each with a number of its own. Within an episode, turns follow one another.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidemill.core.types import Finish, InfraError, Score, Task, Trajectory, Unscorable

MAX_FRAME = 4 << 20  # bytes per frame of a worker, and so per message to the policy

Message = str | list[dict[str, Any]]


class LoadEnvironment(msgspec.Struct, frozen=True, tag=True):
    reference: str  # FILE.py:NAME or MODULE:NAME
    name: str  # the environment's name in messages


class Begin(msgspec.Struct, frozen=True, tag=True):
    id: int
    task: Task


class JudgeRequest(msgspec.Struct, frozen=True, tag=True):
    id: int
    task: Task
    attempts: list[Trajectory]


class EpisodeAnswer(msgspec.Struct, frozen=True, tag=True):
    id: int
    turn: int
    text: str


class ReplyRefused(msgspec.Struct, frozen=True, tag=True):
    """No reply: the exception that `Chat.reply` raised, by the name of its class."""

    id: int
    turn: int
    kind: str
    reason: str
    finish: Finish | None


class CancelEpisode(msgspec.Struct, frozen=True, tag=True):
    id: int


class WorkerPing(msgspec.Struct, frozen=True, tag=True):
    number: int


class EnvironmentLoaded(msgspec.Struct, frozen=True, tag=True):
    error: str  # why the environment does not load; empty when it does


class Ask(msgspec.Struct, frozen=True, tag=True):
    id: int
    turn: int
    message: Message
    max_tokens: int | None
    last: bool


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """The environment no longer waits for the answer of this turn."""

    id: int
    turn: int


class EpisodeEnded(msgspec.Struct, frozen=True, tag=True):
    id: int
    outcome: Score | Unscorable | InfraError | None


class Judged(msgspec.Struct, frozen=True, tag=True):
    id: int
    outcomes: list[Score | Unscorable | InfraError]


class Raised(msgspec.Struct, frozen=True, tag=True):
    """The environment raised an exception. finish: set when it did not catch the end of its chat."""

    id: int
    reason: str
    finish: Finish | None = None
    trace: str = ""


class Pong(msgspec.Struct, frozen=True, tag=True):
    number: int


ToWorker = LoadEnvironment | Begin | JudgeRequest | EpisodeAnswer | ReplyRefused | CancelEpisode | WorkerPing
FromWorker = EnvironmentLoaded | Ask | Withdraw | EpisodeEnded | Judged | Raised | Pong
