"""`tidemill check RECIPE`: the numbers of a step, and whether its memory fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from tidemill.cli.commands.plan_sections import alike, figures, sections, show
from tidemill.cli.commands.screen import print_json
from tidemill.core.errors import ConfigError
from tidemill.run.hub_names import fetched
from tidemill.run.planner.device_plan import in_a_row
from tidemill.run.planner.memory_check import ONE_MACHINE
from tidemill.run.planner.memory_model import in_words
from tidemill.run.recipe import RunConfig, load_recipe
from tidemill.run.storage.model_folder import expect_readable


def check(recipe: Path, overrides: Sequence[str], as_json: bool) -> int:
    """Show a recipe's figures. Raises ConfigError after that if it does not fit."""
    config = fetched(load_recipe([recipe], overrides), data=False)
    found = figures(config, complete=True)
    try:
        expect_readable(config)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    refused = found["memory"]["too_large"]
    if as_json:
        print_json({"recipe": str(recipe), "fits": not refused, **found})
    else:
        _show(config, found)
    if refused:
        raise ConfigError(refused)
    return 0


def _show(config: RunConfig, found: Mapping[str, Any]) -> None:
    memory, parts = found["memory"], sections(config, found)
    if not memory["refused"]:
        needed = [
            f"{in_words(each['needed'])} on {'each of ' if len(devices) > 1 else ''}{in_a_row(devices)}"
            for devices, each in alike(memory["devices"])
        ]
        said = f"yes: {' and '.join(needed)} {'has' if len(needed) == 1 else 'have'} to be free"
        if memory["refused_at_context"]:
            said += (
                f"; but a task with a row of {memory['context']:,} tokens, which is a micro-batch by itself, would not (the "
                "tasks are not read here): bound it with a lower engine.context"
            )
        parts[-1][1].append(("fits", said))
    else:
        parts[-1][1].append(("fits", Text("no", "bold red")))
        parts[-1][1].append(("what helps", "\n".join([*memory["helps"], ONE_MACHINE[0].lower() + ONE_MACHINE[1:]])))
    show(parts, memory)
