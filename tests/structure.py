"""Write `docs/structure.md`, the one list of modules, from their docstrings: python tests/structure.py"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tidemill"
PAGE = ROOT / "docs" / "structure.md"

# A package may import only from packages earlier in this list; packages on one floor do not know one another.
FLOORS = [
    ("core",),
    ("observability", "algorithms", "models"),
    ("runtime", "weight_sync", "ledger", "api_formats"),
    ("tools", "sandbox", "web_server"),
    ("gateway",),
    ("envs", "engine", "trainer"),
    ("controller",),
    ("run",),
    ("cli",),
]

HEAD = """# Structure

Every module, with the first line of its docstring. `python tests/structure.py` writes this page.

A package imports only from packages of a smaller floor number, which stand above it here; packages of one floor do not
know one another. `tests/test_layers.py` holds it. To understand the system, read `controller/controller.py`, then
`controller/admission_buffer.py` and `controller/train_step.py`, then `run/session.py`.

Beside the package: `recipes/` (one file per thing to do), `benchmarks/` (a script for each claim of speed), `tests/`
(mirrors the tree), `LOG.md` (what was tried and did not work, with its numbers).
"""


def first_line(path: Path) -> str:
    """The first line of the module's docstring. Raises ValueError where there is none."""
    said = ast.get_docstring(ast.parse(path.read_text()))
    if not said:
        raise ValueError(f"{path.relative_to(ROOT)} has no docstring: say in one line what the module is for")
    return said.splitlines()[0].rstrip(".")


def section(folder: Path, level: int) -> list[str]:
    """A package's heading, its purpose and its modules, then those of the packages in it."""
    lines = [f"{'#' * level} `{folder.relative_to(PACKAGE)}/`", "", f"{first_line(folder / '__init__.py')}.", ""]
    modules = [path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("__")]
    lines += [f"* `{path.name}`: {first_line(path)}." for path in modules]
    lines += [""] if modules else []
    for inner in sorted(path.parent for path in folder.glob("*/__init__.py")):
        lines += section(inner, level + 1)
    return lines


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    for number, packages in enumerate(FLOORS, 1):
        lines += [f"## Floor {number}", ""]
        for package in packages:
            lines += section(PACKAGE / package, 3)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
