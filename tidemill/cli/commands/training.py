"""`tidemill train` and `tidemill demo`: train by a recipe and show the result."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from tidemill.cli.commands.run_ending import tell
from tidemill.cli.commands.screen import print_json
from tidemill.core.errors import PeerLost
from tidemill.observability.console import ProgressDisplay
from tidemill.run.recipe import load_recipe
from tidemill.run.session import run

RECIPES = next(p for p in (Path(__file__).parents[2] / "recipes", Path(__file__).parents[3] / "recipes") if p.is_dir())
"""The recipes of an installed package, or of a clone."""
DEMO = RECIPES / "demo.toml"
MADE_WORDS = 'env={ kind = "python", path = "tidemill.envs.spelling:score" }'


def by_recipe(recipe: Path, overrides: Sequence[str], as_json: bool) -> int:
    """Train by a recipe, or resume. Returns 0 when done, 3 when stopped before the last step."""
    config = load_recipe([recipe], overrides)
    display = ProgressDisplay(config.steps, mode="json" if as_json else "auto")
    try:
        ended = asyncio.run(run(config, display))
    except (PeerLost, asyncio.CancelledError, KeyboardInterrupt) as error:
        cause = asyncio.CancelledError() if isinstance(error, KeyboardInterrupt) else error  # typer would hide it
        cause.add_note("the same command goes on from what is recorded")
        raise cause from error.__cause__
    if as_json:
        print_json({"kind": "report", **ended.report})
    else:
        tell(config, recipe, ended, newcomer=recipe.resolve() == DEMO.resolve())
    return 0 if ended.complete else 3


def demo(overrides: Sequence[str], as_json: bool) -> int:
    """Run the demo's recipe, with made-up words if reasoning-gym is not installed."""
    made = [] if importlib.util.find_spec("reasoning_gym") else [MADE_WORDS]
    if made and not as_json:
        print(
            "  reasoning-gym is not installed, so the words are made up here; pip install 'tidemill[gym]' brings real ones"
        )
    return by_recipe(DEMO, [*made, *overrides], as_json)
