"""The way from the command to the loop: few functions of ours stand above the controller when it admits the first group."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

import tidemill
from tidemill.cli import main
from tidemill.controller.controller import Controller
from tidemill.ledger.ledger import SqliteLedger

PACKAGE = str(Path(tidemill.__file__).parent)
RECIPE = """
model = "new:0.1m"
env = { kind = "guess", low = 1, high = 4, turns = 1 }
steps = 1
placement = { kind = "inline", environment = { workers = 0 } }
rollout = { groups = 1, group_size = 2, max_tokens = 2 }
algorithm = { name = "grpo", zero_variance = "keep" }
eval = { every = 0, tasks = 1, final_tasks = 1 }
record = { checkpoint_every = 0, trace = false, probe_every = 0 }
"""


def outside_of_the_loop(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames below the event loop, which is one for all tasks."""
    while frame is not None and frame.f_code is not asyncio.run.__code__:
        frame = frame.f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def awaiting() -> Iterator[FrameType]:
    """The frames of the coroutine that awaits the controller, and of the controller, the outermost first."""
    for task in asyncio.all_tasks():
        found, coroutine = [], task.get_coro()
        while (frame := getattr(coroutine, "cr_frame", None)) is not None:
            found.append(frame)
            coroutine = coroutine.cr_await
        if any(frame.f_code is Controller.run.__code__ for frame in found):
            yield from found
            return


def test_five_functions_stand_above_the_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, admit, seen = tmp_path / "recipe.toml", SqliteLedger.admit, list[list[str]]()
    recipe.write_text(RECIPE)

    def admitted(*given) -> None:
        if not seen:
            frames = [*reversed([*outside_of_the_loop(sys._getframe())]), *awaiting()]
            seen.append([frame.f_code.co_name for frame in frames if frame.f_code.co_filename.startswith(PACKAGE)])
        admit(*given)

    monkeypatch.setattr(SqliteLedger, "admit", admitted)
    monkeypatch.setattr("tidemill.cli.commands.safe_output.guard", lambda: lambda: None)
    monkeypatch.setattr(sys, "argv", ["tidemill", "train", str(recipe), f"run_dir={tmp_path / 'run'}"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 0
    (names,) = seen
    above = names[: len(names) - 1 - names[::-1].index("run")]  # the last `run` is the controller's
    assert above == ["main", "train_recipe", "by_recipe", "run", "train"]
