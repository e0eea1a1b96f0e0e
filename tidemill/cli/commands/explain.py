"""`tidemill explain RECIPE`: the gradient that a recipe asks for, and its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.losses import loss_by_name
from tidemill.algorithms.presets import NOTES
from tidemill.cli.algorithm_reference import number
from tidemill.cli.commands.algorithm_in_force import differing, p_hat, parts_of
from tidemill.cli.commands.plan_sections import figures, sections, show
from tidemill.cli.commands.screen import Row, print_json
from tidemill.core.errors import ConfigError
from tidemill.envs.curriculum import EXPLORE, REST
from tidemill.envs.environment_settings import environments_of
from tidemill.run.hub_names import fetched
from tidemill.run.recipe import RunConfig, load_recipe

ORDERS = {
    "shuffled": "every task once a round, each round in another order",
    "frontier": "nearest to a pass rate of one half first, of those that are passed sometimes",
    "easy_first": "the highest pass rate first, of those that are not retired",
    "mixed": "half nearest to a pass rate of one half, half shuffled",
}


def explain(recipe: Path, overrides: Sequence[str], as_json: bool) -> int:
    """Show what a recipe asks for. Nothing is started."""
    config = load_recipe([recipe], overrides)
    with suppress(ConfigError):  # a recipe can be explained without its model
        config = fetched(config, data=False)
    about = explained(config)
    if as_json:
        print_json({"recipe": str(recipe), **about})
    else:
        _show(recipe, config, about)
    return 0


def explained(config: RunConfig) -> dict[str, Any]:
    """The explanation as plain data. Raises ConfigError for what `train` would refuse."""
    try:
        about = {name: _explained(each, config.rollout.max_tokens) for name, each in config.algorithms.items()}
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return {**next(iter(about.values())), "tasks": _tasks_of(config, about), **figures(config)}


def _explained(given: AlgorithmSettings, max_tokens: int) -> dict[str, Any]:
    settings = given.with_longest(max_tokens)  # with values that follow from the longest reply
    loss_by_name(settings.loss_spec())
    parts = parts_of(settings, max_tokens)
    about = {"preset": settings.name, "note": NOTES[settings.name], "differs": differing(given)}
    return about | {"parts": [asdict(part) for part in parts], "p_hat": p_hat(settings)}


def _show(recipe: Path, config: RunConfig, about: Mapping[str, Any]) -> None:
    own = about["tasks"]["algorithms"]
    algorithms = [(_titled(recipe, name, len(own)), _algorithm(each)) for name, each in own.items()]
    step, run, (title, memory) = sections(config, about)
    if about["memory"] is not None and (refused := about["memory"]["refused"]):
        memory = [*memory, ("would be refused", Text(refused, "bold red"))]
    show([("tasks", _task_rows(about["tasks"])), *algorithms, step, run, (title, memory)], about["memory"])


def _tasks_of(config: RunConfig, algorithms: Mapping[str, Any]) -> dict[str, Any]:
    environments, data = environments_of(config.env), config.data
    total = sum(each.weight for each in environments)
    named = [
        {
            "name": each.name,
            "kind": each.kind,
            "share": each.weight / total,
            "algorithm": (each.own_algorithm or config.algorithm).name,
        }
        for each in environments
    ]
    return {
        "order": data.order,
        "shuffled_share": 1 / EXPLORE[data.order],
        "retire": data.retire,
        "environments": named,
        "algorithms": dict(algorithms),
    }


def _task_rows(about: Mapping[str, Any]) -> list[Row]:
    order, share = about["order"], about["shuffled_share"]
    more = ""
    if share < 1:
        rests = f"a task rests while groups for 1/{REST} of the known ones are given"
        more = f"; one turn of {1 / share:.0f} is shuffled, and {rests}"
    retired = "off: every task comes again"
    if about["retire"]:
        retired = f"a task of which a whole group was passed at {about['retire']:g} or more does not come again"
    environments = [
        (each["name"], f"{100 * each['share']:.1f} % of the groups, {each['kind']}, {each['algorithm']}")
        for each in about["environments"]
    ]
    rows = [("order", f"{order}: {ORDERS[order]}{more}"), ("retirement", retired)]
    return [*rows, *(environments if len(environments) > 1 else [])]


def _titled(recipe: Path, environment: str, algorithms: int) -> str:
    return str(recipe) if algorithms == 1 else f"{recipe}, {environment or 'the other environments'}"


def _algorithm(about: Mapping[str, Any]) -> list[Row]:
    differs = [f"{key} = {_value(each['value'])}, not {_value(each['preset'])}" for key, each in about["differs"].items()]
    rows: list[Row] = [("preset", f"{about['preset']}: {about['note']}"), ("differs", "\n".join(differs) or "nothing")]
    for part in about["parts"]:
        said = Text.assemble((part["name"], "bold"))
        if part["weight"] is not None:
            said.append(f" × {number(part['weight'])}")
        if part["constants"]:
            said.append(f"   {', '.join(f'{key} = {_value(value)}' for key, value in part['constants'].items())}")
        said.append(f"\n{part['formula']}")
        if part["source"]:
            said.append(f"\n{part['source']}", "dim")
        rows.append((part["role"], said))
    return [*rows, ("p_hat", about["p_hat"])]


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_called(each) for each in value) or "none"
    return number(value)


def _called(correction: Mapping[str, Any]) -> str:
    constants = ", ".join(f"{key} = {number(value)}" for key, value in correction["constants"].items())
    return f"{correction['name']} ({constants})" if constants else correction["name"]
