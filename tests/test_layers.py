"""The direction of imports, the weight of the command line, the length of the option list, and that every recipe parses."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill.config import Config
from tidemill.recipe import RunConfig, load_recipe

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tidemill"

L0 = {
    "types",
    "protocols",
    "config",
    "errors",
    "codec",
    "seeds",
    "loading",
    "standalone",
    "durable",
    "faults",
    "processes",
    "threads",
    "machine",
    "anonymous",
    "cores",
    "observability",
}
L1 = {"hub", "breaker", "buffer", "drops", "algorithms", "catalogue", "diagnosis", "kernels", "rewards", "models"}
L2 = {"engine", "sync", "trainer", "envs", "scoring", "ledger", "orchestration"}
L3 = {"agreement", "pool", "supervision", "rollout", "given", "controller", "monitor", "evaluation", "served_reference"}
L3 |= {"gradient"}
L4 = {"recipe", "run_folder", "checkpoints", "model_folder", "build", "remote_worker", "warmup", "warm_start", "resume"}
L4 |= {
    "session",
    "assembly",
    "report",
    "api",
    "cli",
    "commands",
    "failures",
    "exact",
    "drill",
    "health",
    "serving",
    "parity",
    "replay",
    "reward_check",
}
L4 |= {"fetched", "checkpoint_manifest", "parts", "giving", "memory", "experience", "profiling", "preparation"}
L4 |= {"warm_start_cache", "unearned", "judging_code"}
L4 |= {"other_names", "run_files", "beside"}

CONTROLLER_NEVER = {"torch", "transformers", "ray", "zmq", "sqlite3"}


def may_import(module: str, other: str) -> bool:
    """Upwards only: L0 <- L1 <- L2 <- L3 <- L4. Mechanisms of L2 are blind to one another; the rest of a layer is not."""
    layers: tuple[set[str], ...] = (L0, L1, L2, L3, L4)
    mine = next(i for i, layer in enumerate(layers) if module in layer)
    theirs = next(i for i, layer in enumerate(layers) if other in layer)
    return module == other or theirs < mine or (theirs == mine and mine != 2)


def imported(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):  # lazy and TYPE_CHECKING imports count too
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
    return [(name, path) for name, path in found if name not in ("__init__", "__main__")]


def test_every_module_has_a_layer():
    unknown = {name for name, _ in modules()} - (L0 | L1 | L2 | L3 | L4)
    assert not unknown, f"say in tests/test_layers.py to which layer {unknown} belong"


def test_imports_point_up():
    bad = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for module, path in modules()
        for name, line in imported(path)
        if name.startswith("tidemill.") and not may_import(module, name.split(".")[1])
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("module", ["controller", "gradient"])
def test_the_controller_knows_protocols_only(module):
    names = {name.split(".")[0] for name, _ in imported(PACKAGE / f"{module}.py")}
    assert not names & CONTROLLER_NEVER
    ours = {name.split(".")[1] for name, _ in imported(PACKAGE / f"{module}.py") if name.startswith("tidemill.")}
    assert ours <= L0 | {"breaker", "buffer", "drops", "gradient"}


LIGHT = dict.fromkeys(["tidemill.cli", "tidemill.controller", "tidemill.recipe", "tidemill", "tidemill.api"], ())
LIGHT["tidemill.scoring.worker"] = ("pydantic",)  # there are many of them


@pytest.mark.parametrize("module", LIGHT)
def test_light_imports(module):
    heavy = ("torch", "transformers", "ray", *LIGHT[module])
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


def option_names(kind: type[Config], prefix: str = "") -> Iterator[str]:
    from tidemill.config import tables_of

    for name, info in kind.model_fields.items():
        nested = tables_of(info.annotation)
        for model in nested:
            yield from option_names(model, f"{prefix}{name}.")
        if not nested:
            yield prefix + name


def test_option_list_is_frozen():
    """A new option is a decision: write it down in tests/options.txt, and in its settings class what it does."""
    names = sorted(set(option_names(RunConfig)))
    frozen = (ROOT / "tests" / "options.txt").read_text().split()
    assert names == frozen
    assert len(names) <= 150


def test_settings_classes_are_small():
    def all_settings(kind: type[Config]) -> set[type[Config]]:
        from tidemill.config import tables_of

        nested = {m for f in kind.model_fields.values() for m in tables_of(f.annotation)}
        return {kind} | {s for n in nested for s in all_settings(n)}

    def own(kind: type[Config]) -> int:
        """Fields that are no tables of their own."""
        from tidemill.config import tables_of

        return sum(not list(tables_of(f.annotation)) for f in kind.model_fields.values())

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
