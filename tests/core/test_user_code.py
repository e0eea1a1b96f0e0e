"""An exception of a user's code is told with the file and line of theirs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.core.bounded_await import bounded, bounded_call
from tidemill.core.errors import ConfigError
from tidemill.core.import_object import load_object
from tidemill.core.user_code import raised

FILE = """
import json, sys
from tidemill.core.import_object import load_object
from installed import fails

def own():
    raise ValueError("no such column")
def standard():
    return json.loads("{")
def ours():
    load_object("nowhere")
def library():
    fails()
def made():
    exec("1 / 0")
def exits():
    sys.exit(3)
def long():
    raise ValueError("x" * 10**6)
class Mute(Exception):
    def __str__(self):
        raise KeyError("no text")
def mute():
    raise Mute
async def exits_later():
    sys.exit(3)
"""
LINES = {"own": 7, "standard": 9, "ours": 11, "library": 13, "made": 15, "mute": 24}


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a user's file, which calls an installed package."""
    installed = tmp_path / "lib" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "installed.py").write_text("def fails():\n    raise OSError('no place')\n")
    monkeypatch.syspath_prepend(str(installed))
    (tmp_path / "agent.py").write_text(FILE)
    return str(tmp_path / "agent.py")


def caught(agent: str, name: str) -> BaseException:
    function = load_object(f"{agent}:{name}")
    with pytest.raises(Exception) as found:
        function()
    trace = found.value.__traceback__
    assert trace is not None
    return found.value.with_traceback(trace.tb_next)  # without this file, which is a user's, too


@pytest.mark.parametrize("name", LINES)
def test_the_innermost_line_of_the_user_is_told(agent: str, name: str) -> None:
    assert raised(caught(agent, name)).endswith(f" (agent.py:{LINES[name]})")


def test_its_text_stands_before_it(agent: str) -> None:
    assert raised(caught(agent, "own")) == "ValueError: no such column (agent.py:7)"
    assert raised(caught(agent, "mute")) == "Mute: it has no text (agent.py:24)"
    long = raised(caught(agent, "long"))
    assert len(long) < 400 and long.endswith("xxx... (1000000 characters) (agent.py:19)")


def test_code_that_is_no_users_has_no_place() -> None:
    found = subprocess.run(
        [sys.executable, "-c", "import json\nfrom tidemill.core.user_code import raised\ntry: json.loads('{')\n"
         "except ValueError as error: print(raised(error))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    with pytest.raises(json.JSONDecodeError) as error:
        json.loads("{")
    assert found.stdout == f"JSONDecodeError: {error.value}\n"


async def test_one_that_is_contained_keeps_its_place(agent: str) -> None:
    with pytest.raises(RuntimeError) as later:
        await bounded(load_object(f"{agent}:exits_later")(), 60.0)
    assert raised(later.value) == "RuntimeError: SystemExit: 3 (agent.py:26)"
    with pytest.raises(RuntimeError) as here:
        await asyncio.wait_for(bounded_call(load_object(f"{agent}:exits"), 60.0), 60.0)
    assert raised(here.value) == "RuntimeError: SystemExit: 3 (agent.py:17)"


def test_a_file_that_does_not_import_tells_its_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import json\n\njson.loads(nothing)\n")
    with pytest.raises(ConfigError, match=r"does not import: NameError: name 'nothing' is not defined \(broken\.py:3\)$"):
        load_object(f"{tmp_path}/broken.py:f")
