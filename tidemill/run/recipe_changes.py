"""Refuses to resume a run under a recipe that differs in more than what may change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tidemill.core.errors import ConfigError
from tidemill.run.recipe_files import same_file

MOST_TOLD = 5  # differences that the error names
MAY_CHANGE = frozenset({"run_dir", "steps", "placement", "eval", "profile", "record", "scoring", "supervise"})
"""Keys that may differ when a run is resumed. Any other would change the meaning of the recorded steps."""


def check_same_run(old: dict[str, Any], new: dict[str, Any], folder: Path) -> None:
    """Raise ConfigError if `new` is not the recipe of the run in `folder`, recorded as `old`."""
    if new.get("deterministic"):
        threads = ("engine_threads", "trainer_threads")
        if any(old["placement"][key] != new["placement"][key] for key in threads):
            raise ConfigError(
                f"{folder} is deterministic: with other numbers of threads its sums would differ in their bits"
            )
        if len({bool(tree["placement"].get("reference_engines")) for tree in (old, new)}) == 2:
            raise ConfigError(
                f"{folder} is deterministic, and trainer and engines round differently: leave "
                "placement.reference_engines as it was"
            )
    was, now = ({k: v for k, v in tree.items() if k not in MAY_CHANGE} for tree in (old, new))
    if changed := list(_differences(was, now)):
        more = f" and {len(changed) - MOST_TOLD} more" if len(changed) > MOST_TOLD else ""
        raise ConfigError(
            f"{folder} holds a run of another recipe: {'; '.join(changed[:MOST_TOLD])}{more}. Use another run_dir, or "
            f"change only {', '.join(sorted(MAY_CHANGE - {'run_dir'}))}"
        )


def _differences(old: Any, new: Any, key: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new and not same_file(key, old, new):
        yield f"{key} was {old!r} and is {new!r}"
