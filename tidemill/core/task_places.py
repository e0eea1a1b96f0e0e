"""Places of tasks in the user's files, for messages: the id of a row is a hash, which nobody can look up.

remember(source, rows)   whoever reads rows, and can read them again
named(task id)           "task 3f2a... (data file 'rows.jsonl', line 3)", looked up when there is something to say
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress

from tidemill.core.errors import ConfigError

Rows = Callable[[], Iterable[tuple[str, str]]]
"""The place and the id of each row; a further row of equal content has the same id here."""

_sources: dict[Hashable, Rows] = {}  # that this process has read tasks from, the latest last


def remember(source: Hashable, rows: Rows) -> None:
    """Look for tasks in these rows. source: what they are read from; the same again takes its place."""
    _sources.pop(source, None)
    _sources[source] = rows


def named(task_id: str) -> str:
    """The task in words, with its place if that is known."""
    for rows in reversed(_sources.values()):
        seen = Counter[str]()
        with suppress(ConfigError):  # the file is another one by now
            for place, found in rows():
                seen[found] += 1
                if task_id == numbered(found, seen[found]):
                    return f"task {task_id} ({place})"
    return f"task {task_id}"


def numbered(row_id: str, number: int) -> str:
    """The id of the task of a row. number: of this row among those of equal content, from 1."""
    return row_id if number == 1 else f"{row_id}-{number}"
