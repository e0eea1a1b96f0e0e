"""What the controller and an environment worker say to each other: msgpack in the frames of `runtime.workers`.

    controller -> worker   Load, then any number of Begin or Judge; Answer or Refusal to an Ask; Cancel; Ping
    worker -> controller   Loaded, then for each Begin any number of Ask, then Ended; for each Judge Judged; Pong

Any number of episodes are under way at a time, each known by its number; within one, turns follow one another.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidemill.core.types import Finish, InfraError, Score, Task, Trajectory, Unscorable

MAX_FRAME = 4 << 20  # bytes of a worker's frame, so of one message to the policy

Message = str | list[dict[str, Any]]


class LoadEnvironment(msgspec.Struct, frozen=True, tag=True):
    reference: str  # FILE.py:NAME or MODULE:NAME
    name: str  # what messages call it


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
    """There is no reply: what `Chat.reply` raised, by the name of its class."""

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
    error: str  # why the environment does not load; or empty


class Ask(msgspec.Struct, frozen=True, tag=True):
    id: int
    turn: int
    message: Message
    max_tokens: int | None
    last: bool


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """The environment waits no longer for the answer of this turn."""

    id: int
    turn: int


class EpisodeEnded(msgspec.Struct, frozen=True, tag=True):
    id: int
    outcome: Score | Unscorable | InfraError | None


class Judged(msgspec.Struct, frozen=True, tag=True):
    id: int
    outcomes: list[Score | Unscorable | InfraError]


class Raised(msgspec.Struct, frozen=True, tag=True):
    """The environment raised. `finish`: it let a conversation's end pass through."""

    id: int
    reason: str
    finish: Finish | None = None
    trace: str = ""


class Pong(msgspec.Struct, frozen=True, tag=True):
    number: int


ToWorker = LoadEnvironment | Begin | JudgeRequest | EpisodeAnswer | ReplyRefused | CancelEpisode | WorkerPing
FromWorker = EnvironmentLoaded | Ask | Withdraw | EpisodeEnded | Judged | Raised | Pong
