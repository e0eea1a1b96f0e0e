"""Sources of a step's data that the ledger decides: the next task, and groups to train once more."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tidemill.core.errors import PayloadLost, RunFailed
from tidemill.core.interfaces import Environment
from tidemill.core.types import Group, Task
from tidemill.envs.curriculum import Curriculum
from tidemill.envs.environment_mixture import Several
from tidemill.ledger.ledger import SqliteLedger
from tidemill.run.recipe import RunConfig
from tidemill.run.recipe_tables import ReplaySettings


def curriculum_of(config: RunConfig, environment: Environment) -> Curriculum:
    """A new curriculum of the training tasks, as at the beginning of a run."""
    weights = environment.weights if isinstance(environment, Several) else None
    return Curriculum(environment.tasks("train"), config.seed, config.data.order, config.data.retire, weights)


def remembered(curriculum: Curriculum, ledger: SqliteLedger) -> Curriculum:
    """Tell the curriculum what the ledger recorded of its tasks' groups, as far as it matters."""
    for group_id, env, name, rewards in ledger.history(curriculum.matters_from(ledger.next_group_id())):
        if (task := curriculum.task_of(env, name)) is not None:
            curriculum.give(group_id, task)
            if rewards is not None:
                curriculum.learn(group_id, task, rewards)
    curriculum.figures()  # forget the figures of recorded groups: they belong to earlier steps
    return curriculum


def giving(curriculum: Curriculum) -> Callable[[int], Task]:
    """Function from admission id to task. It raises RunFailed when no task is left."""

    def task_at(group_id: int) -> Task:
        task = curriculum.choose(group_id)
        if task is None:
            raise RunFailed(
                "every training task is retired: of each, a whole group was passed at data.retire or more, so these tasks "
                "teach no more; set steps to what was done to end the run with its final/, or train that on harder tasks in "
                "another run_dir"
            )
        curriculum.give(group_id, task)
        return task

    return task_at


class Experience:
    """Replay buffer: groups of recent steps to train once more. Call it with a step to load its groups.

    A group is worth the standard deviation of its rewards. The choice is a function of the record alone, so a resume needs
    nothing else. Replayed groups are outside the bound on staleness, on purpose: they may be `within` steps older. Ratios
    and corrections account for their age. A group whose payload cannot be read any more is passed over, and recorded.
    """

    def __init__(self, ledger: SqliteLedger, settings: ReplaySettings, count: int) -> None:
        """Replay at most `count` groups a step."""
        self._ledger, self._settings, self._count = ledger, settings, count
        self._lost = set[int]()  # groups that could not be read

    def choose(self, step: int) -> list[int]:
        """The ids of the groups that `step` is to replay, the most valuable first, then the latest."""
        return self._ranked(step)[: self._count]

    def __call__(self, step: int) -> list[Group]:
        found = list[Group]()
        for group_id in self._ranked(step):
            if len(found) == self._count:
                break
            try:
                found.append(self._ledger.load(group_id))
            except PayloadLost as error:
                if group_id not in self._lost:
                    self._lost.add(group_id)
                    self._ledger.event("payload_lost", {"group": group_id, "reason": str(error)})
        return found

    def _ranked(self, step: int) -> list[int]:
        known = self._ledger.experience(max(0, step - self._settings.within), step) if self._count else []
        worth = [(float(np.std(rewards)), group_id) for group_id, rewards, uses in known if uses < self._settings.times]
        return [group_id for value, group_id in sorted(worth, reverse=True) if value > 0]
