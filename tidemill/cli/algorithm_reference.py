"""Algorithm reference, read from the docstring of each function.

A docstring is the formula and its explanation, then lines that begin with `Source:`, `When:` and `Cost:`. One that lacks a
part is an error. `tidemill explain` shows entries, and `docs/algorithms.md` has all of them in tables. There is no torch
here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill.algorithms import advantages
from tidemill.algorithms.advantages import ADVANTAGES
from tidemill.algorithms.algorithm_settings import adaptive_entropy
from tidemill.algorithms.corrections import CORRECTIONS
from tidemill.algorithms.preferences import OF_SCORES, PREFERENCES, UNPAIRED
from tidemill.algorithms.presets import LOSS_CONSTANTS
from tidemill.algorithms.reductions import REDUCTIONS
from tidemill.core.import_object import constants_of, load_object

PARTS = ("Source", "When", "Cost")
_LABEL = re.compile(rf"^({'|'.join(PARTS)}):", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Entry:
    """One function or setting of the reference."""

    kind: str  # "advantage", "loss", "term", "correction", "reduction", "preference" or "reward"
    name: str
    formula: str
    source: str
    when: str
    cost: str
    constants: Mapping[str, Any] = field(default_factory=dict)  # name -> default


def entries() -> list[Entry]:
    """All entries, by kind. Raises ValueError when a docstring lacks a part."""
    from tidemill.algorithms.losses import LOSSES

    terms = [function for name, function in LOSSES.items() if name not in LOSS_CONSTANTS]
    return [
        *_described("advantage", ADVANTAGES.values()),
        *_described("loss", [LOSSES[name] for name in LOSS_CONSTANTS]),
        *_described("term", terms),
        *_described("correction", CORRECTIONS.values()),
        *_described("reduction", REDUCTIONS.values()),
        *_described("preference", [*PREFERENCES.values(), *UNPAIRED.values(), *OF_SCORES.values()]),
        *_described("reward", [advantages.overlong, advantages.distilled, advantages.returns, adaptive_entropy]),
    ]


def entry(kind: str, name: str) -> Entry:
    """An entry of `entries()`, or one of FILE.py:function, whose parts may be empty."""
    if ".py:" not in name:
        return next(each for each in entries() if (each.kind, each.name) == (kind, name))
    function = load_object(name)
    formula, said = _split(inspect.getdoc(function) or "")
    source, when, cost = (dict(said).get(part, "") for part in PARTS)
    return Entry(kind, name, formula or "its docstring says nothing", source, when, cost, _defaults(function))


def parsed(kind: str, name: str, text: str, constants: Mapping[str, Any] | None = None) -> Entry:
    """Parse a docstring into an entry. Raises ValueError unless every part is there once, in order."""
    formula, said = _split(text)
    if not formula or tuple(label for label, _ in said) != PARTS or not all(what for _, what in said):
        there = dict([("formula", formula), *said])
        lacks = ", ".join(part for part in ("formula", *PARTS) if not there.get(part)) or "their order"
        raise ValueError(f"the docstring of the {kind} {name!r} lacks {lacks}: expected a formula, then {': '.join(PARTS)}:")
    (_, source), (_, when), (_, cost) = said
    return Entry(kind, name, formula, source, when, cost, constants or {})


def _split(text: str) -> tuple[str, list[tuple[str, str]]]:
    first, *rest = (_line(part) for part in _LABEL.split(inspect.cleandoc(text)))
    return first, list(zip(rest[::2], rest[1::2], strict=True))


def _line(text: str) -> str:
    """The text on one line; a single sentence loses its full stop."""
    line = " ".join(text.split())
    return line if ". " in line else line.removesuffix(".")


def _described(kind: str, functions: Iterable[Callable[..., Any]]) -> list[Entry]:
    return [parsed(kind, f.__name__, f.__doc__ or "", _defaults(f)) for f in functions]


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: value for name, value in constants_of(function).items() if value is not inspect.Parameter.empty}


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted names."""
    found = dict[str, Any]()
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def number(value: Any) -> str:
    """A value as one would write it into a recipe."""
    if value is None:
        return "none"
    return re.sub(r"e-0", "e-", f"{value:g}") if isinstance(value, int | float) else str(value)
