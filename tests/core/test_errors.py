"""Exceptions that cross a package's border are all in one module, and what a command prints follows from their base."""

from __future__ import annotations

import ast
import builtins
import subprocess
import sys
from pathlib import Path

import pytest
from sources import nodes

from tidemill.core import errors
from tidemill.core.errors import CheckpointError, ConfigError, RunFolderError, TidemillError
from tidemill.runtime.wire_format import failure, rebuild

PACKAGE = Path(errors.__file__).parents[1]
BUILT_IN = {name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)}
OURS = {name for name, kind in vars(errors).items() if isinstance(kind, type)}


def modules() -> list[tuple[str, list[ast.AST]]]:
    return [(path.relative_to(PACKAGE).as_posix(), nodes(path)) for path in PACKAGE.rglob("*.py")]


def exceptions_of(module: list[ast.AST]) -> set[str]:
    """Names of the exception classes that a module defines."""
    known, found = BUILT_IN | OURS, set[str]()
    for node in module:
        if isinstance(node, ast.ClassDef) and {ast.unparse(base).rpartition(".")[2] for base in node.bases} & (
            known | found
        ):
            found.add(node.name)
    return found


def test_an_exception_that_another_package_imports_is_in_the_module_of_errors() -> None:
    homes = {name: path for path, module in modules() if path != "core/errors.py" for name in exceptions_of(module)}
    assert {"FaultError", "Unreadable"} <= set(homes), "local ones are found, or nothing is checked"
    crossing = [
        f"{path}:{node.lineno} imports {alias.name} of {homes[alias.name]}"
        for path, module in modules()
        for node in module
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in homes and path.split("/")[0] != homes[alias.name].split("/")[0]
    ]
    assert not crossing, crossing


def test_no_module_hands_an_error_on() -> None:
    """An error is imported from its home only."""
    wrong = [
        f"{path}:{node.lineno}"
        for path, module in modules()
        for node in module
        if isinstance(node, ast.ImportFrom) and node.module != "tidemill.core.errors"
        if {alias.name for alias in node.names} & OURS
    ]
    assert not wrong, wrong


def test_all_have_one_base_and_say_what_they_mean() -> None:
    for name in OURS - {"RenamedKey"}:
        kind = getattr(errors, name)
        assert issubclass(kind, TidemillError) and kind.__doc__, name
        assert len(kind.__mro__) <= 9, f"{name}: a shallow hierarchy"


def test_errors_import_nothing() -> None:
    heavy = "{'numpy', 'msgspec', 'pydantic', 'torch'}"
    code = f"import sys; import tidemill.core.errors; print(sorted({heavy} & set(sys.modules)))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("error", "status"),
    [(ConfigError("x"), 2), (RunFolderError("x"), 2), (errors.RunFailed("x"), 1), (errors.PeerDied("engine-0", "died"), 1)],
)
def test_a_command_prints_each_in_one_sentence(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tidemill.cli import main
    from tidemill.cli.commands import safe_output

    def fails() -> None:
        raise error

    monkeypatch.setattr(main, "app", fails)
    monkeypatch.setattr(safe_output, "guard", lambda: lambda: None)  # it would replace this process's stdout
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == status
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_checkpoint_error_of_another_process_is_one_here_too() -> None:
    """A resume goes on from an older checkpoint when the trainer, in its own process, cannot load the newest."""
    error = rebuild(failure(3, CheckpointError("optimizer.bin: cut short")), "trainer")
    assert type(error) is CheckpointError and str(error) == "optimizer.bin: cut short"
