"""The cause in a group of exceptions: the first one, or the loss of the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from tidemill.core.errors import PeerLost, PolicyMismatch

GRACE_S = 1.0  # for the report of the trainer's end to arrive


def first_cause(failures: BaseExceptionGroup) -> BaseException:
    """The first exception that is not a mere cancellation: the one that the user should read."""
    for failure in failures.exceptions:
        if isinstance(failure, BaseExceptionGroup):
            return first_cause(failure)
        return failure
    raise AssertionError("an exception group is never empty")


async def trainer_loss(failures: BaseExceptionGroup, ends: Callable[[], Coroutine[Any, Any, NoReturn]] | None) -> PeerLost:
    """The trainer's loss, if it is the cause of these failures. Raises them if it is not.

    ends: raises PeerLost when the trainer has ended. An engine may be the first to notice: it does not find the weights.
    """
    task = asyncio.current_task()
    lost, others = failures.split(PeerLost)
    if (task and task.cancelling()) or (others and others.split(PolicyMismatch)[1]):  # the group hides a cancellation
        raise failures
    if lost is None and ends is not None:
        try:
            async with asyncio.timeout(GRACE_S):
                await ends()
        except PeerLost as loss:
            return loss
        except TimeoutError:
            pass
    cause = first_cause(lost or failures)
    if isinstance(cause, PeerLost):
        return cause
    raise failures
