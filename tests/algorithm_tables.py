"""Write the tables in `docs/algorithms.md` from the functions' docstrings: python tests/algorithm_tables.py"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill.algorithms.presets import LOSS_CONSTANTS, NOTES, PRESETS
from tidemill.cli.algorithm_reference import Entry, entries, flat, number

PAGE = Path(__file__).parents[1] / "docs" / "algorithms.md"
_PAPER = re.compile(r"\b\d{4}\.\d{5}\b")
HEADS = ("name", "formula", "source", "when", "cost", "constants")
PRESET_HEADS = ("preset", "advantage", "loss", "reduction", "corrections", "other", "paper")
TITLES = {  # kinds of entries, and the headings of their sections
    "advantage": "Advantages",
    "loss": "Policy losses",
    "term": "Further terms",
    "correction": "Corrections",
    "reduction": "Reductions",
    "preference": "Preferences",
    "reward": "Settings that are no functions",
}


def page(text: str) -> str:
    """The page with every table as the docstrings have it. Raises ValueError where a section or its table is missing."""
    every = entries()
    tables = {title: table(HEADS, (_row(e) for e in every if e.kind == kind)) for kind, title in TITLES.items()}
    for title, rows in (tables | {"Presets": table(PRESET_HEADS, map(_preset_row, PRESETS))}).items():
        old = re.compile(rf"(^## {re.escape(title)}\n(?:(?!## |\| name |\| preset ).*\n)*)((?:\|.*\n)+)", re.MULTILINE)
        text, found = old.subn(lambda match, rows=rows: f"{match[1]}{rows}\n", text)
        if found != 1:
            raise ValueError(f"docs/algorithms.md: expected one section '## {title}' with a table, found {found}")
    return text


def section(title: str) -> str:
    """The text of a section of the page."""
    return PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def _row(e: Entry) -> Sequence[str]:
    return code(e.name), e.formula, e.source, e.when, e.cost, constants_as(e.constants) or "–"


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


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
