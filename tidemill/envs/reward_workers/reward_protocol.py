"""Messages between the scoring pool and its workers: msgpack in the frames of `runtime.workers`.

    pool -> worker   RewardRequest
    worker -> pool   Started (its code is loaded: the limit begins now), then RewardReply

A reply longer than MAX_REPLY fails its call. A worker can do no more harm than that by what it writes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidemill.core.types import InfraError, Score, Unscorable

MAX_REPLY = 1 << 20  # bytes


class RewardRequest(msgspec.Struct, frozen=True):
    """Request to call one reward function."""

    id: int
    function: str  # FILE.py:NAME or MODULE:NAME
    name: str  # the function's name in messages
    args: list[Any]
    kwargs: dict[str, Any]
    count: int = 0  # expected outcomes of a call that judges a group; 0: a single outcome


class Started(msgspec.Struct, frozen=True, tag=True):
    """Notice that a worker has loaded the function and begins the call."""

    id: int


class RewardReply(msgspec.Struct, frozen=True, tag=True):
    """Outcomes of one call."""

    id: int
    outcomes: list[Score | Unscorable | InfraError]
    children: bool = False  # the call left processes behind


Reply = Started | RewardReply
