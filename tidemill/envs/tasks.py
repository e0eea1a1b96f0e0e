"""Turns rows into tasks: stable ids, the held-out split, and checks on every set of tasks."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from tidemill.core import serialization
from tidemill.core.errors import ConfigError
from tidemill.core.seeding import derive_seed
from tidemill.core.task_places import numbered
from tidemill.core.types import Task
from tidemill.models.chat_template import is_message

COLUMNS = ("prompt", "completion", "chosen", "rejected", "messages")  # of TRL's formats
Splits = Mapping[str, Sequence[Task]]
DEEPEST = 100  # levels of nesting in a task's data, which later code reads recursively


def task_of(row: Mapping[str, Any], where: str, *, prompt_column: str = "prompt", template: str = "{prompt}") -> Task:
    """A task from a row: its prompt (a text or a list of messages), all other columns as data.

    where: the row's place, for messages. Raises ConfigError when the row cannot be used.
    """
    row = with_prompt(row, prompt_column)
    if prompt_column not in row:
        columns = ", ".join(map(str, row)) or "none"
        raise ConfigError(f"{where} has no column {prompt_column!r}: its columns are {columns}; set prompt_column")
    prompt = row[prompt_column]
    data = {key: value for key, value in row.items() if key != prompt_column}
    check_data(row, where)
    data = _without_nan(data)
    if isinstance(prompt, str) and prompt:
        prompt = template.replace("{prompt}", prompt)
    elif not _is_messages(prompt):
        raise ConfigError(f"{where}: prompt {prompt!r:.80} is neither a text nor a list of role/content messages")
    elif template != "{prompt}":
        raise ConfigError(f"{where}: a template applies to text prompts, and this one is a list of messages")
    return Task(_content_id(prompt, data, where), prompt, data)


def split_by_hash(tasks: Sequence[Task], share: float) -> dict[str, list[Task]]:
    """Hold out about `share` of the prompts; a prompt keeps its side when rows are added or moved."""
    sides: dict[str, list[Task]] = {"train": [], "eval": []}
    for task in tasks:
        draw = derive_seed("held-out", json.dumps(task.prompt, sort_keys=True)) / 2**63
        sides["eval" if draw < share else "train"].append(task)
    return sides


def check_splits(name: str, splits: Splits, *, prompts_apart: bool = False) -> None:
    """Raise ConfigError unless both splits have tasks, ids are unique, and no task is in both.

    Data must also be encodable (`check_data`). prompts_apart: tasks with one prompt count as one task, whatever their data,
    as in single-turn environments.
    """
    for split in ("train", "eval"):
        if not splits[split]:
            raise ConfigError(f"environment {name!r} has no {split} tasks: expected at least one")
        ids = {task.id for task in splits[split]}
        if len(ids) < len(splits[split]):
            raise ConfigError(
                f"environment {name!r}: {len(splits[split]) - len(ids)} {split} tasks share their id with another"
            )
    train, held_out = ({str(t.prompt) if prompts_apart else t.id for t in splits[s]} for s in ("train", "eval"))
    both = train & held_out
    if both:
        raise ConfigError(
            f"environment {name!r}: {len(both)} tasks are in train and in eval, such as {min(both):.100}; "
            "remove them from one side"
        )
    for task in (*splits["train"], *splits["eval"]):
        check_data({"prompt": task.prompt, **task.data}, f"environment {name!r}: task {task.id}")


def check_data(data: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError, which names the column, unless all columns can be sent between processes."""
    for key, value in data.items():
        column = f"{where}: column {key!r:.80}"
        if _deeper(value, DEEPEST - 1):
            raise ConfigError(f"{column} is nested more than {DEEPEST} deep")
        try:
            serialization.encode({key: value})
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ConfigError(f"{column} holds half a character, {half!r}, which is no text: write the whole one") from None
        except OverflowError:
            raise ConfigError(f"{column} holds an integer of more than 64 bits: write it as a text") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{column} cannot travel between processes: {error}") from None


def _without_nan(value: Any) -> Any:
    """The value with None for NaN, which equals nothing: a resume could not match the task with its record."""
    if isinstance(value, Mapping):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and value != value else value


def _deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return levels < 0 or any(_deeper(each, levels - 1) for each in inner)


def told_apart(tasks: Sequence[Task]) -> list[Task]:
    """The tasks with distinct ids: a row equal to earlier ones stays, with a number after its id."""
    found, seen = [], Counter[str]()
    for task in tasks:
        seen[task.id] += 1
        found.append(task if seen[task.id] == 1 else replace(task, id=numbered(task.id, seen[task.id])))
    return found


def columns_of(tasks: Sequence[Task]) -> set[str]:
    """The data columns that any task has; a reward gets None where a task lacks one."""
    return set[str]().union(*(task.data for task in tasks))


def _is_messages(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(map(is_message, prompt))


def _content_id(prompt: Any, data: Mapping[str, Any], where: str) -> str:
    try:
        text = json.dumps([prompt, data], sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where} holds a value that is not plain JSON: {error}") from None
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def with_prompt(row: Mapping[str, Any], prompt_column: str) -> dict[str, Any]:
    """A copy of a row in one of TRL's formats, with a prompt extracted from its other columns if they hold one.

    chosen, rejected (conversations, no conversational prompt): their common beginning is the prompt, as in `extract_prompt`.
    messages, no prompt: all before the assistant's last message. In messages, keys with None are removed, which rows of a
    table have.
    """
    found = {key: _plain(value) if key in (*COLUMNS, prompt_column) else value for key, value in row.items()}
    chosen, rejected = found.get("chosen"), found.get("rejected")
    if _is_talk(chosen) and _is_talk(rejected) and not _is_talk(found.get(prompt_column)):
        shared = _shared(chosen, rejected)
        if shared or prompt_column not in found:
            found |= {prompt_column: chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}
    elif prompt_column not in found and _is_talk(messages := found.get("messages")):
        found[prompt_column] = messages[:-1] if messages[-1].get("role") == "assistant" else messages
    return found


def _shared(one: list[Any], other: list[Any]) -> int:
    """The number of messages that both begin with; the shorter keeps at least one as its reply."""
    most = min(len(one), len(other)) - 1
    return next((place for place in range(most) if one[place] != other[place]), most)


def _is_talk(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) and "role" in each for each in value)


def _plain(value: Any) -> Any:
    if not _is_talk(value):
        return value
    return [{key: part for key, part in each.items() if part is not None or key == "content"} for each in value]
