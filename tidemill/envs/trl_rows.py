"""Converts rows in TRL's formats to rows with a prompt.

chosen, rejected (conversations, no conversational prompt)  ->  their common beginning is the prompt, as `extract_prompt`
messages, no prompt                                         ->  all before the assistant's last message is the prompt
{"role": ..., "content": ..., "name": None}                 ->  keys with None are removed: rows of a table have every key
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

COLUMNS = ("prompt", "completion", "chosen", "rejected", "messages")


def with_prompt(row: Mapping[str, Any], prompt_column: str) -> dict[str, Any]:
    """A copy of the row, with a prompt extracted from its other columns where they hold one."""
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
