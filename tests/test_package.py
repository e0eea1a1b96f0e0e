"""What is installed: every import is of a declared package, one version, and a wheel in which nothing is missing."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from sources import nodes

import tidemill

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = {"datasets", "triton", "_typeshed"}  # asked for by name where they are needed; for types alone


def name_of(requirement: str) -> str:
    return re.split(r"[<>=\[;~! ]", requirement)[0].lower().replace("_", "-")


def imports() -> set[str]:
    every = [node for path in (ROOT / "tidemill").rglob("*.py") for node in nodes(path)]
    found = {node.module for node in every if isinstance(node, ast.ImportFrom) and node.module}
    found |= {alias.name for node in every if isinstance(node, ast.Import) for alias in node.names}
    return {name.partition(".")[0] for name in found} - sys.stdlib_module_names - {"tidemill"}


def test_every_import_is_of_a_package_that_is_declared():
    extras = PROJECT["optional-dependencies"]
    given = [*PROJECT["dependencies"], *(each for name in extras if name != "dev" for each in extras[name])]
    declared, distributions = {name_of(each) for each in given}, packages_distributions()
    missing = {
        name
        for name in imports() - OPTIONAL
        if not {each.lower().replace("_", "-") for each in distributions.get(name, [name])} & declared
    }
    assert not missing, f"imported, and neither in dependencies nor in an extra of pyproject.toml: {sorted(missing)}"


def test_the_version_stands_in_one_place():
    assert "version" in PROJECT["dynamic"] and re.fullmatch(r"\d+\.\d+\.\d+", tidemill.__version__)
    assert f"## [{tidemill.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


FIRST = """
import sys
from importlib.machinery import PathFinder

class Told:
    def find_spec(self, name, path=None, target=None):
        if name in ("numpy", "tidemill.run.recipe", "tidemill.run.session"):
            print("heavy")

sys.meta_path.insert(0, Told())
from tidemill.cli.main import main
sys.argv = ["tidemill", *sys.argv[1:]]
main()
"""


def test_the_first_line_comes_before_anything_heavy_is_imported(tmp_path: Path):
    for args, first in (
        (["train", "no.toml", "steps=3"], "  starting to train by no.toml steps=3 ..."),
        (["demo", "steps=0", "--json"], '{"kind": "note", "text": "starting the demo: a small model, '),
    ):
        done = subprocess.run([sys.executable, "-c", FIRST, *args], capture_output=True, text=True, timeout=60, cwd=tmp_path)
        lines = done.stdout.splitlines()
        assert lines[0].startswith(first) and "heavy" in lines[1:], done.stdout + done.stderr
        assert done.returncode == 2 and "Traceback" not in done.stderr


def test_a_wheel_holds_the_package_and_the_recipes_and_nothing_else():
    """Asked of the build backend, which builds nothing: C sources and recipes are read when the package runs."""
    builder = WheelBuilder(str(ROOT))
    packed = {file.distribution_path for file in builder.recurse_included_files()}
    there = {
        path.relative_to(ROOT) for name in ("tidemill", "recipes") for path in (ROOT / name).rglob("*") if path.is_file()
    }
    expected = {path.as_posix() for path in there if "__pycache__" not in path.parts}
    assert packed == {name if name.startswith("tidemill/") else f"tidemill/{name}" for name in expected}
    assert {Path(name).suffix for name in packed} == {".py", ".c", ".h", ".toml"} and "tidemill/recipes/demo.toml" in packed
    assert builder.metadata.version == tidemill.__version__


@pytest.mark.slow
def test_a_wheel_has_all_that_the_package_reads_and_the_demo_runs_from_it(tmp_path: Path):
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = tmp_path.glob("tidemill-*.whl")
    assert wheel.name.startswith(f"tidemill-{tidemill.__version__}-")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        packed.extractall(tmp_path / "site")
        metadata = next(packed.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    ours = subprocess.run(["git", "ls-files", "tidemill", "recipes"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = {name if name.startswith("tidemill/") else f"tidemill/{name}" for name in ours.stdout.split()}
    assert files <= names and not [name for name in names - files if ".dist-info/" not in name and "__pycache__" not in name]
    assert f"\nVersion: {tidemill.__version__}\n" in metadata
    few = ["steps=1", "warmup.accuracy=0", "placement=inline", "rollout.groups=1", "eval.final_tasks=4", "scoring.workers=1"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    where = [sys.executable, "-c", "import tidemill; print(tidemill.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.startswith(str(tmp_path / "site"))
    command = [sys.executable, "-m", "tidemill", "demo", *few, "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 1 and (tmp_path / "runs" / "demo" / "final").is_dir()
