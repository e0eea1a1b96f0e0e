"""Wording of a run's events, the same on the display and in every command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SOME = 8  # items of a list that are shown


def worded(kind: str, detail: Mapping[str, Any]) -> str:
    """An event as a line: "engine restarted: engine-0, after 1 s".

    That line comes from `engine_restarted` and {"engine": "engine-0", "after_s": 1.0}. A text stands alone; any other
    value gets its key's name, and its unit if the key has one. Empty values are left out.
    """
    said = ", ".join(_said(key, value) for key, value in detail.items() if value not in (None, "", [], {}))
    return f"{kind.replace('_', ' ')}: {said}" if said else kind.replace("_", " ")


def _said(key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    name = key.replace("_", " ")
    if isinstance(value, Mapping):
        return f"{name} {', '.join(f'{inner} {_plain(each)}' for inner, each in value.items())}"
    if isinstance(value, list | tuple):
        more = f" and {len(value) - SOME} more" if len(value) > SOME else ""
        return f"{name} {', '.join(map(_plain, value[:SOME]))}{more}"
    if key == "seconds":
        return f"for {_plain(value)} s"
    if key.endswith("_s"):
        return f"{name[:-2]} {_plain(value)} s"
    if key == "share":
        return f"{name} {value:.0%}"
    return f"{name} {_plain(value)}"


def _plain(value: Any) -> str:
    return f"{round(value, 3):g}" if isinstance(value, float) else str(value)
