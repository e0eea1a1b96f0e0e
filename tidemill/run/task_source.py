"""Source of the controller's tasks: a curriculum that knows what the ledger recorded."""

from __future__ import annotations

from collections.abc import Callable

from tidemill.core.errors import RunFailed
from tidemill.core.interfaces import Environment
from tidemill.core.types import Task
from tidemill.envs.curriculum import Curriculum
from tidemill.envs.environment_mixture import Several
from tidemill.ledger.ledger import SqliteLedger
from tidemill.run.recipe import RunConfig


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
