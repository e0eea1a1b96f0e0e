"""The order of a recipe's tasks in words, for `tidemill explain`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from tidemill.envs.curriculum import EXPLORE, REST
from tidemill.envs.environment_settings import environments_of
from tidemill.run.recipe import RunConfig

ORDERS = {
    "shuffled": "every task once a round, each round in another order",
    "frontier": "nearest to a pass rate of one half first, of those that are passed sometimes",
    "easy_first": "the highest pass rate first, of those that are not retired",
    "mixed": "half nearest to a pass rate of one half, half shuffled",
}


def tasks_of(config: RunConfig, algorithms: Mapping[str, Any]) -> dict[str, Any]:
    """Order, retirement and environments as plain data. algorithms: descriptions by environment."""
    environments, data = environments_of(config.env), config.data
    total = sum(each.weight for each in environments)
    named = [
        {
            **{"name": each.name, "kind": each.kind, "share": each.weight / total},
            "algorithm": (each.own_algorithm or config.algorithm).name,
        }
        for each in environments
    ]
    explores = 1 / EXPLORE[data.order]
    return {
        **{"order": data.order, "shuffled_share": explores, "retire": data.retire},
        **{"environments": named, "algorithms": dict(algorithms)},
    }


def task_rows(about: Mapping[str, Any]) -> list[tuple[str | Text, str | Text]]:
    order, share = about["order"], about["shuffled_share"]
    more = ""
    if share < 1:
        rests = f"a task rests while groups for 1/{REST} of the known ones are given"
        more = f"; one turn of {1 / share:.0f} is shuffled, and {rests}"
    retired = "off: every task comes again"
    if about["retire"]:
        retired = f"a task of which a whole group was passed at {about['retire']:g} or more does not come again"
    rows: list[tuple[str | Text, str | Text]] = [("order", f"{order}: {ORDERS[order]}{more}"), ("retirement", retired)]
    if len(about["environments"]) > 1:
        rows += [
            (each["name"], f"{100 * each['share']:.1f} % of the groups, {each['kind']}, {each['algorithm']}")
            for each in about["environments"]
        ]
    return rows
