"""One call of a reward function, turned into outcomes. The worker and the in-process scorer share it."""

from __future__ import annotations

from tidemill.core.errors import ConfigError
from tidemill.core.import_object import load_object
from tidemill.core.outcomes import clip, outcome_of, outcomes_of
from tidemill.core.types import InfraError, Outcome
from tidemill.envs.reward_workers.reward_protocol import RewardRequest


def load(request: RewardRequest) -> str:
    """Load the function, which may import anything. Returns why that failed, or the empty string."""
    try:
        load_object(request.function)
    except ConfigError as error:
        return f"{request.name}: {error}"
    return ""


def invoke(request: RewardRequest) -> list[Outcome]:
    """Call the function; one outcome, or `count` of them. Whatever it raises is an InfraError."""
    try:
        value = load_object(request.function)(*request.args, **request.kwargs)
        if request.count:
            return outcomes_of(value, request.name, request.count)
        return [outcome_of(value, request.name)]
    except (Exception, SystemExit) as error:  # the user's code may raise anything, sys.exit() included
        return failed(request, f"{request.name} raised {type(error).__name__}: {clip(str(error))}")


def failed(request: RewardRequest, reason: str) -> list[Outcome]:
    return [InfraError(reason)] * max(1, request.count)
