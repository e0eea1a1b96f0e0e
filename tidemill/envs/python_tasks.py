"""Tasks given in Python: a list, a dict of splits, a `datasets` dataset, or a function that makes one of these."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tidemill.core.errors import ConfigError
from tidemill.core.task_places import remember
from tidemill.core.types import Task
from tidemill.core.user_code import raised
from tidemill.envs.tasks import split_by_hash, task_of, told_apart

Rows = Sequence[Task | Mapping[str, Any]]
TaskSource = Rows | Mapping[str, Rows] | Callable[[str], Rows] | Callable[[], Any] | Any
"""A function takes the split, or nothing. `Any` is a `datasets.Dataset` or `DatasetDict`, whose package may be missing."""

HELD_OUT = ("eval", "test", "validation")  # names of splits that are not trained on


def splits_of(source: TaskSource, name: str, share: float = 0.1) -> dict[str, list[Task]]:
    """The splits "train" and "eval" of a task source. Raises ConfigError for one that is not usable."""
    if callable(source):
        if _takes_nothing(source):
            return splits_of(_made(source, name), name, share)
        return {split: _tasks(_made(source, name, split), f"{split} task", name) for split in ("train", "eval")}
    if isinstance(source, Mapping):
        return _of_table(source, name, share)
    return split_by_hash(_tasks(source, "task", name), share)


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        return not inspect.signature(function).parameters
    except ValueError:  # one of Python's own
        return False


def _made(function: Callable[..., Any], name: str, *split: str) -> Any:
    """The tasks that a user's function returns. Raises ConfigError when it raises."""
    try:
        return function(*split)
    except ConfigError:
        raise
    except Exception as error:
        asked = f" for {split[0]!r}" if split else ""
        raise ConfigError(f"environment {name!r}: its tasks cannot be made{asked}: {raised(error)}") from error


def _of_table(source: Mapping[str, Any], name: str, share: float) -> dict[str, list[Task]]:
    held_out = next((split for split in HELD_OUT if split in source), None)
    if "train" not in source:
        raise ConfigError(
            f"environment {name!r}: tasks have the splits {', '.join(map(str, source)) or 'none'}: expected train, and one "
            f"of {', '.join(HELD_OUT)} that is held out"
        )
    train = _tasks(source["train"], "train task", name)
    if held_out is None:
        return split_by_hash(train, share)
    return {"train": train, "eval": _tasks(source[held_out], f"{held_out} task", name)}


def _tasks(rows: Any, what: str, name: str) -> list[Task]:
    rows = _of_dataset(rows, name)
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise ConfigError(
            f"environment {name!r}: tasks are a {type(rows).__name__}: expected a list of tasks or rows, or a Dataset"
        )
    found, places = list[Task](), list[tuple[str, str]]()
    for number, row in enumerate(rows):
        if not isinstance(row, Task | Mapping):
            raise ConfigError(f"environment {name!r}: {what} {number} is a {type(row).__name__}: expected a Task or a row")
        where = f"environment {name!r}: {what} {number}"
        found.append(row if isinstance(row, Task) else task_of(row, where))
        if not isinstance(row, Task):  # whose id is the user's own
            places.append((where, found[-1].id))
    remember((name, what), lambda: places)
    return told_apart(found)


def _of_dataset(rows: Any, name: str) -> Any:
    """A dataset's rows as plain values; anything else unchanged. Raises ConfigError for an endless stream."""
    datasets = sys.modules.get("datasets")  # imported already, if the caller gives a dataset
    if datasets is None or not hasattr(datasets, "Dataset"):
        return rows
    if isinstance(rows, datasets.IterableDataset):
        raise ConfigError(
            f"environment {name!r}: tasks are an IterableDataset, which may have no end: give list(tasks.take(10_000))"
        )
    return list(rows.with_format(None)) if isinstance(rows, datasets.Dataset) else rows
