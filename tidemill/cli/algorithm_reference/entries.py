"""Entries of the algorithm reference, read from the functions' own docstrings.

    docstring -> Entry(formula, source, when, cost), and the constants of the signature

There is no second list that could differ, and no torch. A docstring is the formula and its explanation, then lines that
begin with `Source:`, `When:` and `Cost:`. A docstring that lacks a part is an error. `docs/algorithms.md` is `page()`:

    python -m tidemill.cli.algorithm_reference > docs/algorithms.md
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidemill.algorithms import advantages
from tidemill.algorithms.advantages import ADVANTAGES
from tidemill.algorithms.corrections import CORRECTIONS
from tidemill.algorithms.entropy import adaptive_entropy
from tidemill.algorithms.preferences import OF_SCORES, PREFERENCES, UNPAIRED
from tidemill.algorithms.presets import LOSS_CONSTANTS, NOTES, PRESETS
from tidemill.algorithms.reductions import REDUCTIONS
from tidemill.cli.algorithm_reference import prose
from tidemill.core.import_object import constants_of, load_object

PARTS = ("Source", "When", "Cost")
_LABEL = re.compile(rf"^({'|'.join(PARTS)}):", re.MULTILINE)
_PAPER = re.compile(r"\b\d{4}\.\d{5}\b")


@dataclass(frozen=True, slots=True)
class Entry:
    """One function or setting of the reference."""

    kind: str  # a key of TITLES
    name: str
    formula: str
    source: str
    when: str
    cost: str
    constants: Mapping[str, Any] = field(default_factory=dict)  # name -> default


TITLES = {
    "advantage": "Advantages",
    "loss": "Policy losses",
    "term": "Further terms",
    "correction": "Corrections",
    "reduction": "Reductions",
    "preference": "Preferences",
    "reward": "Settings that are no functions",
}
"""Kinds of entries, and the titles of their tables."""


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
    """An entry of `entries()`, or one made of a user's own function, FILE.py:function.

    A user's docstring may lack parts; they are then empty.
    """
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


def page() -> str:
    """The text of `docs/algorithms.md`."""
    every = entries()
    sections = {
        kind: _section(title, prose.ABOUT[kind], _table([e for e in every if e.kind == kind]))
        for kind, title in TITLES.items()
    }
    last = [sections.pop("reward")]
    heads = ("preset", "advantage", "loss", "reduction", "corrections", "other", "paper")
    presets = _section("Presets", prose.ABOUT["preset"], table(heads, map(_preset_row, PRESETS)))
    first = (prose.INTRODUCTION, prose.NOTATION, prose.STEP, prose.OWN)
    return "\n\n".join(part.strip() for part in (*first, *sections.values(), presets, *last, prose.LAG)) + "\n"


def _section(title: str, about: str, rows: str) -> str:
    return f"## {title}\n\n{about.strip()}\n\n{rows}"


def _table(found: Sequence[Entry]) -> str:
    rows = [(code(e.name), e.formula, e.source, e.when, e.cost, constants_as(e.constants) or "–") for e in found]
    return table(("name", "formula", "source", "when", "cost", "constants"), rows)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in GitHub's Markdown: pipes escaped, papers as links."""
    lines = [heads, ["---"] * len(heads), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return _PAPER.sub(r"[\g<0>](https://arxiv.org/abs/\g<0>)", text.replace("|", "\\|"))


def code(text: str) -> str:
    return f"`{text}`"


def constants_as(constants: Mapping[str, Any]) -> str:
    return ", ".join(code(f"{name} = {number(value)}") for name, value in constants.items())


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


def _preset_row(name: str) -> tuple[str, ...]:
    """A preset's row: preset, advantage, loss, reduction, corrections, other, paper."""
    values = dict(PRESETS[name])
    given, loss = values.pop("constants", {}), values.pop("loss")
    known = LOSS_CONSTANTS.get(loss, {})
    own = {key: value for key, value in given.items() if key not in known}
    taken = {**known, **{key: value for key, value in given.items() if key not in own}}
    corrections = [_called(each["name"], each.get("constants", {})) for each in values.pop("corrections", [])]
    first = (_called(values.pop("advantage"), own), _called(loss, taken), code(values.pop("reduction")))
    other = constants_as(flat(values))
    return (code(name), *first, ", ".join(corrections) or "–", other or "–", NOTES[name])


def _called(name: str, constants: Mapping[str, Any]) -> str:
    return f"{code(name)} ({constants_as(constants)})" if constants else code(name)
