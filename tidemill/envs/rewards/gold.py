"""Gold replies, which a reward must give the full score; `run.preflight.reward_audit` uses them.

For a named reward it is the task's answer, in the form that the reward reads. For a user's reward it is the result of the
function `gold` beside it, or without one the answer itself, if the reward is given the answer.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from tidemill.core.errors import ConfigError
from tidemill.core.interfaces import Gold
from tidemill.core.task_places import named
from tidemill.core.types import Task, Unscorable
from tidemill.core.user_code import raised
from tidemill.envs.rewards.boxes import boxed
from tidemill.envs.rewards.named import BOXED
from tidemill.envs.rewards.signature import Signature

Teller = Callable[..., Any]


def teller_beside(reward: Callable[..., Any]) -> Teller | None:
    """The function `gold` in the module that defines the reward; None if there is none."""
    found = vars(sys.modules[reward.__module__]).get("gold") if getattr(reward, "__module__", "") in sys.modules else None
    return found if inspect.isfunction(found) and found is not reward else None


def gold_reply(task: Task, signature: Signature, teller: Teller | None, form: str | None) -> Gold:
    """The gold reply of a task for a reward, or Unscorable with the reason for none.

    form: `Named.gold` of a named reward; None for a user's. Raises ConfigError when the user's `gold` fails.
    """
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
    """Call a user's `gold` with its parameters filled by name. Raises ConfigError when it fails."""
    values = {**task.data, "prompt": task.prompt, "task": {"id": task.id, "prompt": task.prompt, "data": task.data}}
    try:
        parameters = inspect.signature(teller).parameters.values()
        every = any(p.kind is p.VAR_KEYWORD for p in parameters)
        reply = teller(**{k: v for k, v in values.items() if every or k in {p.name for p in parameters}})
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"gold() of {named(task.id)} raised {raised(error)}") from error
    if reply is None:
        return Unscorable("gold() knows none")
    if isinstance(reply, str | Unscorable) or (isinstance(reply, list) and reply and all(isinstance(r, str) for r in reply)):
        return reply
    gave = f"gold() of {named(task.id)} gave {reply!r:.60}"
    raise ConfigError(f"{gave}: expected a text, a list of texts (one a turn), or None")
