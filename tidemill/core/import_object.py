"""Import of a user's object from `path/to/file.py:name` or `package.module:name`.

A file is loaded once per process, under a module name of its own, with its folder on `sys.path` as when it is run as a
script.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from tidemill.core.errors import ConfigError

T = TypeVar("T")


def load_object(reference: str) -> Any:
    """The object that `reference` names. Raises ConfigError if it cannot be imported."""
    place, separator, name = reference.rpartition(":")
    if not separator or not place or not name:
        raise ConfigError(f"{reference!r}: expected FILE.py:NAME or MODULE:NAME")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{reference!r}: {place} has no {part!r}{_near(part, vars(module))}")
        found = getattr(found, part)
    return found


def reference_of(function: Callable[..., Any]) -> str:
    """FILE.py:NAME or MODULE:NAME of a function. Raises ValueError if other processes cannot import it."""
    name, module = function.__qualname__, function.__module__
    if "<" in name:
        raise ValueError(
            f"{name} is a lambda or is defined inside a function, so a scoring worker cannot import it: "
            "define it at the top of a file, or make it `async def` to have it run here"
        )
    source = Path(inspect.getsourcefile(function) or "")
    if module == "__main__" or module.startswith(_PREFIX):
        if not source.is_file():
            raise ValueError(f"{name} comes from no file, so a scoring worker cannot import it: put it into one")
        return f"{source.resolve()}:{name}"
    if source.is_file() and "." not in module:  # a file beside the script: a worker's search path need not lead there
        return f"{source.resolve()}:{name}"
    return f"{module}:{name}"


def bound(kind: str, name: str, constants: Mapping[str, float], known: Mapping[str, Callable[..., T]]) -> partial[T]:
    """A function, by a known name or as FILE.py:function, with `constants` (keyword-only parameters) bound.

    Raises ValueError for an unknown name, or a constant that the function does not take.
    """
    function = load_object(name) if ".py:" in name else known.get(name)
    if function is None:
        near = _near(name, dict(known))
        raise ValueError(f"{kind} {name!r}: expected one of {', '.join(known)}, or FILE.py:function{near}")
    accepted = constants_of(function)
    if unknown := sorted(set(constants) - set(accepted)):
        takes = f"it takes {', '.join(accepted)}" if accepted else "it takes none"
        raise ValueError(f"{kind} {name!r} has no constant {', '.join(unknown)}: {takes}")
    return partial(function, **constants)


def constants_of(function: Callable[..., Any]) -> dict[str, Any]:
    """A function's keyword-only parameters and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


_PREFIX = "_user_"
_loading: list[Path] = []  # files that are being imported, the outermost first


def check_not_loading(what: str) -> None:
    """Raise ConfigError while a file is imported that does `what` without being run as a program."""
    if _loading:
        raise ConfigError(f"{what} while {_loading[0].name} is being imported: put it under `if __name__ == '__main__':`")


def _load_file(path: Path) -> ModuleType:
    try:
        path = path.expanduser().resolve()
        there = path.is_file()
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise ConfigError(f"file {str(path)!r} cannot be looked for: {error.strerror}; give the path of a file") from None
    if not there:
        raise ConfigError(f"file {str(path)!r} does not exist")
    name = f"{_PREFIX}{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):  # imported under its own name before
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module  # before it runs: dataclasses and self-references look there
    _loading.append(path)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code: whatever it raises is about their file
        del sys.modules[name]
        raise ConfigError(f"file {str(path)!r} does not import: {_raised(error)}") from error
    finally:
        _loading.pop()
    return module


def _load_module(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a console script starts without the working folder
    try:
        return importlib.import_module(name)
    except Exception as error:  # the user's code, as above
        raise ConfigError(f"module {name!r} does not import: {_raised(error)}") from error


def _raised(error: Exception) -> str:
    from tidemill.core.user_code import raised  # only here: it loads NumPy

    return raised(error)


def _near(name: str, known: dict[str, Any]) -> str:
    near = difflib.get_close_matches(name, [k for k in known if not k.startswith("__")], n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
