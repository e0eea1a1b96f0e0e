"""`tidemill train` and `tidemill demo`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from tidemill.commands.ending import tell
from tidemill.commands.screen import print_json
from tidemill.errors import ConfigError
from tidemill.observability.display import ProgressDisplay
from tidemill.protocols import PeerLost
from tidemill.recipe import RunConfig, load_recipe
from tidemill.session import Ended, run

DEMO = Path(__file__).parents[2] / "recipes" / "demo.toml"


def train(recipe: Path, overrides: Sequence[str], as_json: bool) -> int:
    """Run a recipe to its end, or on from where it was. The exit status: 0 done, 3 stopped before its last step."""
    config = load_recipe([recipe], overrides)
    ended = _run(config, as_json)
    if as_json:
        print_json({"kind": "report", **ended.report})
    else:
        tell(config, recipe, ended, newcomer=recipe.resolve() == DEMO.resolve())
    return 0 if ended.complete else 3


def demo(overrides: Sequence[str], as_json: bool) -> int:
    if not DEMO.is_file():
        raise ConfigError(f"{DEMO} does not exist: the demo is part of the repository, run it from a clone")
    return train(DEMO, overrides, as_json)


def _run(config: RunConfig, as_json: bool) -> Ended:
    display = ProgressDisplay(config.steps, mode="json" if as_json else "auto")
    try:
        return asyncio.run(run(config, display))
    except (PeerLost, asyncio.CancelledError, KeyboardInterrupt) as error:
        ended = asyncio.CancelledError() if isinstance(error, KeyboardInterrupt) else error  # that one typer would hide
        ended.add_note("the same command goes on from what is recorded")
        raise ended from error.__cause__
