"""Messages between the controller and an environment worker, in the frames of `runtime.workers`.

    calls   LoadEnvironment -> nothing; then Begin -> EpisodeEnded, JudgeRequest -> outcomes, in any number
    notes   Ask, Withdraw or EpisodeCounted from a worker; EpisodeAnswer or ReplyRefused to an Ask

Within an episode, turns are numbered. Those of whole conversations may be under way at a time; any other waits alone.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidemill.core.constraints import Constraint
from tidemill.core.reply import Reply
from tidemill.core.types import Finish, InfraError, Score, Task, Trajectory, Unscorable

MAX_FRAME = 4 << 20  # bytes per frame of a worker, and so per message to the policy

Message = str | list[dict[str, Any]]


class LoadEnvironment(msgspec.Struct, frozen=True, tag=True):
    reference: str  # FILE.py:NAME or MODULE:NAME
    name: str  # the environment's name in messages


class Begin(msgspec.Struct, frozen=True, tag=True):
    task: Task


class JudgeRequest(msgspec.Struct, frozen=True, tag=True):
    task: Task
    attempts: list[Trajectory]


class EpisodeAnswer(msgspec.Struct, frozen=True, tag=True):
    turn: int
    reply: str | Reply  # a Reply to a whole conversation, the text to any other


class ReplyRefused(msgspec.Struct, frozen=True, tag=True):
    """No reply: the exception that `Chat.reply` or `Chat.ask` raised, by the name of its class."""

    turn: int
    kind: str
    reason: str
    finish: Finish | None


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A request for a reply: of the policy that plays, or of a frozen one in a conversation of its own."""

    turn: int
    message: Message
    max_tokens: int | None
    last: bool
    policy: str = ""  # the frozen one; "": the one that plays
    whole: bool = False  # the message is a whole conversation
    tools: list[dict[str, Any]] = []  # schemas of its tools
    held: Constraint | None = None  # what the reply must be


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """The environment no longer waits for the answer of this turn."""

    turn: int


class EpisodeCounted(msgspec.Struct, frozen=True, tag=True):
    """Names of `core.episode_counts`, each of which counts one more in this episode. refused: why a call was refused."""

    names: list[str]
    refused: str = ""


class EpisodeEnded(msgspec.Struct, frozen=True, tag=True):
    """The end of an episode. finish: set when the environment did not catch the end of its chat, with the reason."""

    outcome: Score | Unscorable | InfraError | None
    finish: Finish | None = None
    reason: str = ""


EpisodeNote = Ask | Withdraw | EpisodeCounted
EpisodeRequest = LoadEnvironment | Begin | JudgeRequest
EpisodeResult = EpisodeEnded | list[Score | Unscorable | InfraError] | None
