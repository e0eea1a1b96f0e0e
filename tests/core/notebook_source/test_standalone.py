"""Functions of a notebook as modules of their own: what stands alone runs elsewhere as here, what is alive is named."""

from __future__ import annotations

import contextlib
import linecache
import re
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tidemill.core.errors import NotImportable
from tidemill.core.import_object import load_object
from tidemill.core.notebook_source.module_writer import reference_for, written
from tidemill.core.notebook_source.source_lookup import guarded


def notebook(*cells: str, namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the cells of a notebook define, with their text where IPython keeps it."""
    found = {"__name__": "__main__", "In": [], **(namespace or {})}
    for number, cell in enumerate(cells):
        name = f"/tmp/ipykernel_1/{abs(hash(cells))}_{number}.py"
        linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
        found["In"].append(cell)
        exec(compile(cell, name, "exec"), found)
    return found


def elsewhere(function: Callable[..., Any], folder) -> Callable[..., Any]:
    """The function as another process would load it: with nothing of this one's namespace."""
    loaded = load_object(reference_for(function, folder, "reward"))
    assert loaded.__globals__ is not function.__globals__
    return loaded


STAND_ALONE = {
    "nothing": ["def f(completion): return completion.strip()"],
    "imports": [
        "import re\nimport json as j\nfrom math import sqrt as root",
        "def f(c): return j.dumps([re.sub('a', 'b', c), root(4)])",
    ],
    "inner modules": [
        "import xml.etree.ElementTree",
        "def f(c): return xml.etree.ElementTree.fromstring(f'<a>{c}</a>').text",
    ],
    "constants": [
        "import re\nTAG = 'x'\nINF = float('inf')",
        "WORDS = {'a': [1, (2, None)], 'b': {3}}\nPATTERN = re.compile('(?i)A', re.M)",
        "def f(c): return [TAG, WORDS['a'], len(WORDS), PATTERN.sub(TAG, c), min(INF, 3), 'b' in WORDS]",
    ],
    "helpers that call one another": [
        "def even(n): return n == 0 or odd(n - 1)",
        "def odd(n): return n != 0 and even(n - 1)",
        "def f(c): return even(len(c))",
    ],
    "a helper under another name": ["def helper(c): return c * 2\nagain = helper", "def f(c): return again(c)"],
    "the latest of two": ["def helper(c): return 1", "def helper(c): return 2", "def f(c): return helper(c)"],
    "decorated": [
        "import functools\ndef loud(g):\n    @functools.wraps(g)\n    def inner(c): return g(c).upper()\n    return inner",
        "@functools.lru_cache(maxsize=None)\ndef cached(c): return c + '!'",
        "@loud\ndef helper(c): return cached(c)",
        "def f(c): return cached(c)",
    ],
    "classes": [
        "from dataclasses import dataclass\n@dataclass\nclass Pair:\n    a: str\n    b: int = 3",
        "class Longer(Pair):\n    def text(self): return f'{self.a}{self.b}'",
        "def f(c): return Longer(c).text()",
    ],
    "defaults": ["LIMIT = 2", "def f(c, limit=LIMIT): return c[:limit]"],
    "annotations": [
        "from __future__ import annotations\nfrom typing import Optional",
        "from __future__ import annotations\ndef f(c: Optional[Unknown]) -> list[str]: return [c]",
    ],
    "a lambda": ["f = lambda completion: completion.upper()"],
    "own functions and comprehensions": [
        "N = 2",
        "def f(c):\n    def g(x): return x * N\n    return [g(x) for x in c if (y := x)]",
    ],
    "a builtin's name": ["def len(c): return 7", "def f(c): return len(c) + max(1, 2)"],
    "our types": ["from tidemill import Score", "def f(c): return Score(float(len(c)))"],
    "quotes and indents": ['def f(c):\n    """a \\\' b"""\n    return c + """\n  two\n"""'],
}


@pytest.mark.parametrize("cells", STAND_ALONE.values(), ids=STAND_ALONE)
def test_what_stands_alone_does_elsewhere_what_it_does_here(cells, tmp_path):
    here = notebook(*cells)["f"]
    assert elsewhere(here, tmp_path)("abc") == here("abc")


def test_a_function_inside_a_function_stands_alone_where_it_closes_over_nothing(tmp_path):
    here = notebook("import math\ndef make():\n    def f(c): return math.floor(len(c) / 2)\n    return f\nf = make()")["f"]
    assert elsewhere(here, tmp_path)("abc") == 1


class Client:
    def ask(self, c):
        return c


ALIVE = {
    "a client": (["def f(c): return client.ask(c)"], "it uses client, a Client of this process"),
    "through a helper": (["def helper(c): return client.ask(c)", "def f(c): return helper(c)"], "it uses client, a Client"),
    "an open file": (["def f(c): return log.write(c)"], "it uses log, a TextIOWrapper"),
    "a closure": (["def make(n):\n    def f(c): return n\n    return f\nf = make(3)"], "it closes over n"),
    "what it fills": (["seen = []", "def f(c):\n    seen.append(c)\n    return len(seen)"], "it may change seen, a list"),
    "what it fills deep inside": (["t = {'a': []}", "def f(c): t['a'].append(c)"], "it may change t, a dict"),
    "what it sets": (["t = {}", "def f(c): t[c] = 1"], "it may change t, a dict"),
    "what it hands on": (["t = {}", "def g(x): x[1] = 2", "def f(c): g(t)"], "it may change t, a dict"),
    "a counter": (["n = 0", "def f(c):\n    global n\n    n += 1\n    return n"], "it sets n, a variable"),
    "an attribute of its own": (["def f(c): return f.calls", "f.calls = 1"], "it has the attribute calls"),
    "a class of a function": (
        ["def make():\n    class A: pass\n    return A\nA = make()", "def f(c): return A()"],
        "it uses A, a type",
    ),
    "no source": (["exec('def f(c): return 1')"], "the source of f is not to be had here"),
}


@pytest.mark.parametrize(("cells", "message"), ALIVE.values(), ids=ALIVE)
def test_what_is_alive_is_named(cells, message, tmp_path):
    with open(tmp_path / "log", "w") as log:
        namespace = notebook(*cells, namespace={"client": Client(), "log": log, "lock": threading.Lock()})
        with pytest.raises(NotImportable, match=re.escape(message)):
            reference_for(namespace["f"], tmp_path / "source", "reward")
    assert not (tmp_path / "source").exists()


@pytest.mark.parametrize("given", [Client(), Client().ask, len, re.compile("a").sub])
def test_what_is_no_function_is_alive(given, tmp_path):
    with pytest.raises(NotImportable, match="of this process, not a function"):
        reference_for(given, tmp_path, "reward")


def test_a_module_beside_the_notebook_is_found_from_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "helper_of_notebook.py").write_text("def twice(c): return c * 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    here = notebook("from helper_of_notebook import twice\ndef f(c): return twice(c)")["f"]
    file = written(here, tmp_path / "source", "reward").rpartition(":")[0]
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(tmp_path)])
    monkeypatch.delitem(sys.modules, "helper_of_notebook")
    assert load_object(f"{file}:f")("ab") == "abab"


def test_the_file_has_no_name_that_would_hide_a_module(tmp_path):
    here = notebook("import json\ndef random(c): return json.dumps(c)")["random"]
    assert elsewhere(here, tmp_path)("a") == '"a"'
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["reward_random.py"]


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("if __name__ == '__main__':\n    pass\n", "program.py"),
        ("raise SystemExit('it trains')\n", "reward_f.py"),
    ],
)
def test_a_program_is_imported_only_where_its_guard_makes_that_safe(tail, expected, tmp_path, monkeypatch):
    file = tmp_path / "program.py"
    file.write_text("N = 2\ndef f(c): return c * N\n" + tail)
    program = ModuleType("__main__")
    program.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "__main__", program)
    with contextlib.suppress(SystemExit):
        exec(compile(file.read_text(), str(file), "exec"), vars(program))
    reference = reference_for(program.f, tmp_path / "source", "reward")
    assert reference.rpartition("/")[2] == f"{expected}:f"
    assert load_object(reference)("ab") == "abab"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import os\nif __name__ == '__main__':\n    main()", True),
        ("if '__main__' == __name__: main()", True),
        ("def f():\n    if __name__ == '__main__': pass\nmain()", False),
        ("main()", False),
        ("not python (", False),
    ],
)
def test_a_guard_is_seen(text, expected):
    assert guarded(text) is expected
