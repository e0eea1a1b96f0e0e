"""The reply that a reward must give the full score: what its verdicts are checked against (`run.preflight.reward_audit`).

For a named reward, the task's answer in the form that it reads. For a user's, what the function `gold` beside it says, its
parameters filled by name as the reward's are; without one, the answer itself, where the reward is given the answer.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from tidemill.core.errors import ConfigError
from tidemill.core.interfaces import Gold
from tidemill.core.types import Task, Unscorable
from tidemill.envs.rewards.boxes import boxed
from tidemill.envs.rewards.named import BOXED
from tidemill.envs.rewards.signature import Signature

Teller = Callable[..., Any]


def teller_beside(reward: Callable[..., Any]) -> Teller | None:
    """The function `gold` of the module that the reward is defined in, if there is one."""
    found = vars(sys.modules[reward.__module__]).get("gold") if getattr(reward, "__module__", "") in sys.modules else None
    return found if inspect.isfunction(found) and found is not reward else None


def gold_reply(task: Task, signature: Signature, teller: Teller | None, form: str | None) -> Gold:
    """form: of a named reward, see `Named.gold`; None: a user's. Raises ConfigError when the user's `gold` fails."""
    if teller is not None:
        return told_by(teller, task)
    answer = task.data.get("answer")
    if answer is None:
        return Unscorable("the task has no `answer`")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        return Unscorable(f"the task's answer is {answer!r:.60}, which is no reply")
    if form is not None:
        if not form:
            return Unscorable(f"what reward {signature.name!r} looks for can not be told from the answer")
        return str(answer) if form == BOXED and boxed(str(answer)) is not None else form.format(answer=answer)
    given = [name for name in signature.names if name == "task" or task.data.get(name) == answer]
    return str(answer) if given else Unscorable(f"reward {signature.name!r} does not ask for the answer")


def told_by(teller: Teller, task: Task) -> Gold:
    """What a user's function says, its parameters filled by name."""
    values = {**task.data, "prompt": task.prompt, "task": {"id": task.id, "prompt": task.prompt, "data": task.data}}
    try:
        parameters = inspect.signature(teller).parameters.values()
        every = any(p.kind is p.VAR_KEYWORD for p in parameters)
        return checked(teller(**{k: v for k, v in values.items() if every or k in {p.name for p in parameters}}), task)
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"gold() of task {task.id} raised {type(error).__name__}: {error}") from error


def checked(reply: Any, task: Task) -> Gold:
    if reply is None:
        return Unscorable("gold() knows none")
    if isinstance(reply, str | Unscorable) or (isinstance(reply, list) and reply and all(isinstance(r, str) for r in reply)):
        return reply
    raise ConfigError(f"gold() of task {task.id} gave {reply!r:.60}: expected a text, a list of texts (one a turn), or None")
