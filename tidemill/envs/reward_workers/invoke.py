"""Calls one reward function and turns its result into outcomes, in workers and in-process."""

from __future__ import annotations

from tidemill.core.errors import ConfigError
from tidemill.core.import_object import load_object
from tidemill.core.outcomes import clip, outcome_of, outcomes_of
from tidemill.core.types import InfraError, Outcome
from tidemill.envs.reward_workers.reward_protocol import RewardRequest


def load(request: RewardRequest) -> str:
    """Import the function, which may import anything. Returns why that failed, or ""."""
    try:
        load_object(request.function)
    except ConfigError as error:
        return f"{request.name}: {error}"
    return ""


def invoke(request: RewardRequest) -> list[Outcome]:
    """Call the function; returns one outcome, or `count`. An exception becomes InfraError."""
    try:
        value = load_object(request.function)(*request.args, **request.kwargs)
        if request.count:
            return outcomes_of(value, request.name, request.count)
        return [outcome_of(value, request.name)]
    except (Exception, SystemExit) as error:  # the user's code may raise anything, sys.exit() included
        return failed(request, f"{request.name} raised {type(error).__name__}: {clip(str(error))}")


def failed(request: RewardRequest, reason: str) -> list[Outcome]:
    return [InfraError(reason)] * max(1, request.count)
