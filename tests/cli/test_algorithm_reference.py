"""The reference says what the functions say, and the tables in `docs/algorithms.md` say what the reference says."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from algorithm_tables import PAGE, constants_as, page, section, table
from markdown_it import MarkdownIt
from test_layers import option_names

from tidemill.algorithms import advantages, algorithm_settings, corrections, losses, preferences
from tidemill.algorithms.advantages import USING_GIVEN, Scores, advantage_by_name
from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.corrections import Ratios, correction_by_name
from tidemill.algorithms.losses import LossInput, loss_by_name
from tidemill.algorithms.presets import LOSS_CONSTANTS, NOTES, PER_SEQUENCE, PRESETS
from tidemill.algorithms.reductions import REDUCTIONS
from tidemill.cli.algorithm_reference import PARTS, Entry, entries, entry, parsed
from tidemill.core.config import Config, build
from tidemill.core.types import LossSpec

DOCS = PAGE.read_text()
TOOLS = {  # public functions that are no part of an algorithm
    *("advantage_by_name", "correction_by_name", "extras_of", "loss_by_name", "evaluate", "ratio", "correct", "pairs_of"),
    *("kto_baseline", "mismatched", "labelled", "begins_as"),
}
GOOD = "A formula.\n\nSource: a paper,\n    2402.03300.\nWhen: often. Or\nnot.\nCost: nothing."


def test_the_tables_are_what_the_docstrings_say():
    assert page(DOCS) == DOCS, "docs/algorithms.md is not what the docstrings say: run python tests/algorithm_tables.py"
    assert page(DOCS.replace("`gspo` |", "`gspo` | changed |")) == DOCS != DOCS.replace("`gspo` |", "`gspo` | changed |")
    with pytest.raises(ValueError, match="expected one section '## Reductions' with a table, found 0"):
        page(DOCS.replace("## Reductions", "## Others"))


def test_every_public_function_is_in_it_once():
    found = [(each.kind, each.name) for each in entries()]
    assert len(set(found)) == len(found)
    public = [
        name
        for module in (advantages, losses, corrections, preferences, algorithm_settings)
        for name, f in vars(module).items()
        if inspect.isfunction(f) and f.__module__ == module.__name__ and not name.startswith("_")
    ]
    assert sorted(set(public) - TOOLS) == sorted({name for kind, name in found if kind != "reduction"})
    assert [name for kind, name in found if kind == "loss"] == list(LOSS_CONSTANTS)
    assert [name for kind, name in found if kind == "reduction"] == list(REDUCTIONS)
    assert list(PRESETS) == list(NOTES)


def test_an_entry_is_its_docstring_and_its_signature():
    found, said = entry("loss", "aipo"), " ".join((losses.aipo.__doc__ or "").split())
    assert found.formula == "-sg[min(rho, cap)] A log pi, rho = pi / mu" and found.constants == {"cap": 5.0}
    assert said == f"{found.formula}. Source: {found.source} When: {found.when}. Cost: {found.cost}."
    assert entry("preference", "kto").constants == {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}


def test_lines_that_go_on_belong_to_their_part():
    assert parsed("loss", "f", GOOD) == Entry("loss", "f", "A formula", "a paper, 2402.03300", "often. Or not.", "nothing")


@pytest.mark.parametrize("part", ["formula", *PARTS])
def test_a_docstring_without_a_part_is_an_error(part):
    lines = (
        GOOD.replace("Source: a paper,\n    2402.03300.", "Source: a paper.")
        .replace("often. Or\nnot.", "often.")
        .split("\n")
    )
    left = [line for line in lines if not line.startswith("A formula" if part == "formula" else part)]
    with pytest.raises(ValueError, match=f"'f' lacks {part}: expected"):
        parsed("loss", "f", "\n".join(left))
    if part != "formula":
        with pytest.raises(ValueError, match=f"lacks {part}"):
            parsed("loss", "f", re.sub(rf"{part}: .*", f"{part}:", "\n".join(lines)))


@pytest.mark.parametrize("text", ["A.\nWhen: b.\nSource: c.\nCost: d.", "A.\nSource: c.\nWhen: b.\nCost: d.\nWhen: e."])
def test_parts_come_once_and_in_order(text):
    with pytest.raises(ValueError, match="lacks their order"):
        parsed("loss", "f", text)


def shown(markdown: str) -> list[list[str]]:
    """The cells of every table, as a reader sees them."""
    cells: list[list[str]] = []
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        if token.type == "tr_open":
            cells.append([])
        elif token.type == "inline" and token.level >= 4:  # within a cell
            assert {child.type for child in token.children or ()} <= {"text", "code_inline", "link_open", "link_close"}, (
                token
            )
            cells[-1].append("".join(child.content for child in token.children or ()))
    return cells


def test_a_reader_sees_what_was_written():
    """Neither pipes nor stars nor brackets of a formula are taken for Markdown."""
    rows = shown(DOCS)
    for each in entries():
        cells = (each.name, each.formula, each.source, each.when, each.cost, constants_as(each.constants) or "–")
        assert [cell.replace("`", "") for cell in cells] in rows
    assert [row[-1] for row in rows if row[0] in PRESETS and len(row) == 7] == list(NOTES.values())
    assert shown(table(("a", "b"), [("x | y", "1 * 2")])) == [["a", "b"], ["x | y", "1 * 2"]]
    with pytest.raises(AssertionError):
        shown(table(("a", "b"), [("*x*", "")]))


def test_what_is_written_by_hand_holds():
    others = section("Settings that are no functions").split("| name |")[0]
    settings = set(option_names(AlgorithmSettings)) - {"name", "advantage", "loss", "reduction"}
    assert {name for name in settings if f"`{name}" not in others and not name.startswith("corrections.")} == set()
    assert all(f"`{name}`" in section("Advantages").split("| name |")[0] for name in USING_GIVEN)
    assert all(f"`{name}`" in section("Policy losses").split("| name |")[0] for name in PER_SEQUENCE)


class Recipe(Config):
    algorithm: AlgorithmSettings


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCS, re.DOTALL)


def test_the_examples_of_recipes_are_accepted():
    lines = blocks("toml")[0].splitlines()
    own = re.findall(r"`(algorithm = \{.*?\})`", section("A part of your own"))
    for line in (*lines, *own):
        build(Recipe, tomllib.loads(line))
    assert len(lines) == 6 and own


def test_the_examples_of_functions_do_what_they_say(tmp_path: Path):
    (tmp_path / "parts.py").write_text(blocks("python")[0])
    parts = f"{tmp_path / 'parts.py'}:"
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    a, of = torch.tensor([1.0, 1.0, -2.0]), torch.tensor([0, 0, 1])
    loss = loss_by_name(LossSpec(f"{parts}soft_clip", {"width": 0.3}))
    x = LossInput(logprobs, logprobs.detach(), logprobs.detach(), a, of, 2)
    loss(x).terms.sum().backward()
    assert logprobs.grad is not None and torch.equal(logprobs.grad, -a)  # on policy that of -A log pi
    scores = Scores(np.array([1.0, 0.0, 0.5]), np.array([0, 0, 1]), np.array([2, 1, 1]))
    assert advantage_by_name(f"{parts}above_step", {"limit": 0.25})(scores).tolist() == [0.25, 0.25, -0.25, 0.0]
    ratios = Ratios(np.zeros(3), np.zeros(3), np.ones(3), np.array([3]), np.array([0, 1, 2]))
    assert correction_by_name(f"{parts}fresh", {})(ratios).tolist() == [1.0, 1.0, 0.0]
    mine = entry("loss", f"{parts}soft_clip")
    assert mine.formula == "-width tanh((rho - 1) / width) A, rho = pi / mu" and mine.constants == {"width": 0.2}
    assert mine.source == ""


def test_the_catalogue_loads_no_torch():
    code = "import sys, tidemill.cli.algorithm_reference; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "False"
