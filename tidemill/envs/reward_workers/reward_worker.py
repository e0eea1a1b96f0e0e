"""Worker process that runs reward functions, one call at a time.

python -m tidemill.envs.reward_workers.reward_worker MEMORY_MB PARENT
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidemill.core import fault_injection
from tidemill.core.import_object import load_object
from tidemill.core.outcomes import outcome_of, outcomes_of
from tidemill.core.types import InfraError, Outcome, Score, Unscorable
from tidemill.runtime.workers import serve_calls
from tidemill.runtime.workers.worker_setup import Channel

MAX_REPLY = 1 << 20  # bytes
Outcomes = list[Score | Unscorable | InfraError]


class RewardRequest(msgspec.Struct, frozen=True):
    """Request to call one reward function."""

    function: str  # FILE.py:NAME or MODULE:NAME
    name: str  # the function's name in messages
    args: list[Any]
    kwargs: dict[str, Any]
    count: int = 0  # expected outcomes of a call that judges a group; 0: a single outcome


class RewardHandler:
    """`worker_setup.Handler` of a reward worker."""

    requests, notes = RewardRequest, None

    def load(self, request: RewardRequest) -> None:
        load_object(request.function)

    def call(self, request: RewardRequest, channel: Channel) -> list[Outcome]:
        fault_injection.reach("reward", "call", channel.id)
        return invoke(request)


def invoke(request: RewardRequest) -> list[Outcome]:
    """Call the function; returns one outcome, or `count`."""
    value = load_object(request.function)(*request.args, **request.kwargs)
    if request.count:
        return outcomes_of(value, request.name, request.count)
    return [outcome_of(value, request.name)]


if __name__ == "__main__":
    serve_calls.serve(RewardHandler(), MAX_REPLY)
