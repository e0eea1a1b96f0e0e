"""The floors of imports, the weight of the command line, the length of the option list, and that every recipe parses."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import structure
from sources import nodes

from tidemill.core.config import Config
from tidemill.run.recipe import RunConfig, load_recipe

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tidemill"

FLOOR = {package: number for number, packages in enumerate(structure.FLOORS) for package in packages}
LOOP = ["controller", "train_step", "admission_buffer"]  # they decide what is trained on, and know interfaces only
CONTROLLER_NEVER = {"torch", "transformers", "ray", "zmq", "sqlite3"}


def imported(path: Path) -> Iterator[tuple[str, int]]:
    for node in nodes(path):  # lazy and TYPE_CHECKING imports count too
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [node.module or ""] if node.module != "tidemill" else [f"tidemill.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            yield name, node.lineno


def modules() -> list[tuple[str, Path]]:
    found = [(p.relative_to(PACKAGE).parts[0].removesuffix(".py"), p) for p in sorted(PACKAGE.rglob("*.py"))]
    return [(package, path) for package, path in found if package not in ("__init__", "__main__")]


def test_every_module_lies_in_a_package_with_a_floor():
    assert {package for package, _ in modules()} == set(FLOOR)


def test_the_list_of_modules_is_current():
    assert structure.PAGE.read_text() == structure.page(), "run: python tests/structure.py"


def test_a_package_imports_from_lower_floors_only():
    bad = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for package, path in modules()
        for name, line in imported(path)
        if name.startswith("tidemill.") and (other := name.split(".")[1]) != package and FLOOR[other] >= FLOOR[package]
    ]
    assert not bad, "\n".join(bad)


def test_module_names_are_told_apart():
    """Two modules share a name only where their packages make the difference plain."""
    names = Counter(path.stem for _, path in modules() if not path.stem.startswith("__"))
    assert {name for name, count in names.items() if count > 1} <= {"ledger"}  # the ledger, and the command


def test_public_classes_are_told_apart():
    """No two public classes share a name."""
    classes = Counter(
        node.name
        for _, path in modules()
        for node in nodes(path)[0].body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not {name for name, count in classes.items() if count > 1}


FRAGMENT = re.compile(r"(What|Of|Whether|That|How|By|Until|Which|Where|Who|Whose|Why|The same)\b")


def test_first_lines_of_docstrings_stand_alone():
    """A first line is a sentence or a noun phrase, never a clause that hangs on the name above it."""
    found = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {first}"
        for path in PACKAGE.rglob("*.py")
        for node in nodes(path)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if FRAGMENT.match(first := (ast.get_docstring(node) or "").partition("\n")[0])
    ]
    assert not found, "\n".join(found)


def test_files_stay_readable():
    """No file of the package is longer than 400 lines."""
    assert not [p for p in PACKAGE.rglob("*.py") if len(p.read_text().splitlines()) > 400]


def test_functions_are_short():
    """No function of the package is longer than 60 lines."""
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines"
        for _, path in modules()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > 60
    ]
    assert not long, long


@pytest.mark.parametrize("module", LOOP)
def test_the_loop_knows_interfaces_only(module):
    names = {name for name, _ in imported(PACKAGE / "controller" / f"{module}.py")}
    assert not {name.split(".")[0] for name in names} & CONTROLLER_NEVER
    ours = {name.split(".")[1] for name in names if name.startswith("tidemill.")}
    assert ours <= {"core", "observability", "controller"}


LIGHT = dict.fromkeys(
    ["tidemill.cli.main", "tidemill.controller.controller", "tidemill.run.recipe", "tidemill", "tidemill.run.api"], ()
)
LIGHT["tidemill.envs.reward_workers.reward_worker"] = ("pydantic",)  # there are many of them


@pytest.mark.parametrize("module", LIGHT)
def test_light_imports(module):
    heavy = ("torch", "transformers", "ray", *LIGHT[module])
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


def option_names(kind: type[Config], prefix: str = "") -> Iterator[str]:
    from tidemill.core.config import tables_of

    for name, info in kind.model_fields.items():
        nested = tables_of(info.annotation)
        for model in nested:
            yield from option_names(model, f"{prefix}{name}.")
        if not nested:
            yield prefix + name


def test_option_list_is_frozen():
    """A new option is a decision: write it down in tests/options.txt, and describe it in its settings class."""
    names = sorted(set(option_names(RunConfig)))
    frozen = (ROOT / "tests" / "options.txt").read_text().split()
    assert names == frozen
    assert len(names) <= 180


def test_settings_classes_are_small():
    def all_settings(kind: type[Config]) -> set[type[Config]]:
        from tidemill.core.config import tables_of

        nested = {m for f in kind.model_fields.values() for m in tables_of(f.annotation)}
        return {kind} | {s for n in nested for s in all_settings(n)}

    def own(kind: type[Config]) -> int:
        """The class's own fields that are no tables; those of its bases count there."""
        from tidemill.core.config import tables_of

        return sum(
            not list(tables_of(kind.model_fields[name].annotation))
            for name in kind.__annotations__
            if name in kind.model_fields
        )

    assert not [s.__name__ for s in all_settings(RunConfig) if own(s) > 15]


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda p: p.stem)
def test_every_recipe_parses(recipe):
    config = load_recipe([recipe])
    assert config.steps >= 1


def test_the_starter_recipe_has_at_most_twelve_keys():
    import tomllib

    def keys(tree: dict) -> int:
        return sum(keys(v) if isinstance(v, dict) else 1 for v in tree.values())

    assert keys(tomllib.loads((ROOT / "recipes" / "demo.toml").read_text())) <= 12
