"""What the pool and its workers say to each other: msgpack in the frames of `runtime.workers`.

    pool -> worker   Request
    worker -> pool   Started (its code is loaded: the limit begins now), then Done

A frame of a worker longer than MAX_REPLY is a failure of that call; nothing a worker writes can be more than refused.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidemill.core.types import InfraError, Score, Unscorable

MAX_REPLY = 1 << 20  # bytes


class RewardRequest(msgspec.Struct, frozen=True):
    id: int
    function: str  # FILE.py:NAME or MODULE:NAME
    name: str  # what messages call it
    args: list[Any]
    kwargs: dict[str, Any]
    count: int = 0  # outcomes expected of a call that judges a group; 0: a single outcome


class Started(msgspec.Struct, frozen=True, tag=True):
    id: int


class RewardReply(msgspec.Struct, frozen=True, tag=True):
    id: int
    outcomes: list[Score | Unscorable | InfraError]
    children: bool = False  # the call left processes behind


Reply = Started | RewardReply
