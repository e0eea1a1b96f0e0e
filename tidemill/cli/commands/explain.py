"""`tidemill explain RECIPE`: the gradient that a recipe asks for, and its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.text import Text

from tidemill.algorithms.advantages import USING_GIVEN
from tidemill.algorithms.algorithm_settings import AlgorithmSettings, CriticSettings, ReferenceSettings
from tidemill.algorithms.losses import loss_by_name
from tidemill.algorithms.mixture import COMMON
from tidemill.algorithms.presets import ANCHORED, CROSS_ENTROPY, NOTES, PRESETS, SCORE
from tidemill.cli.algorithm_reference import entry, flat, number
from tidemill.cli.commands.plan_sections import figures, sections, show
from tidemill.cli.commands.screen import Row, print_json
from tidemill.core.config import Config, dump
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
            "algorithm": (own.get(each.name) or own[COMMON]).name,
            **({"policy": config.policy_of[each.name]} if config.policies else {}),
        }
        for each in environments
        for own in [config.policy_algorithms[config.policy_of[each.name]]]
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
        (each["name"], f"{100 * each['share']:.1f} % of the groups, {each['kind']}, {each['algorithm']}{_trains(each)}")
        for each in about["environments"]
    ]
    rows = [("order", f"{order}: {ORDERS[order]}{more}"), ("retirement", retired)]
    return [*rows, *(environments if len(environments) > 1 else [])]


def _trains(environment: Mapping[str, Any]) -> str:
    return f", trains {environment['policy']}" if "policy" in environment else ""


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


@dataclass(frozen=True, slots=True)
class Part:
    """One part of an algorithm, with its constants."""

    role: str
    name: str
    formula: str
    source: str
    constants: dict[str, Any] = field(default_factory=dict)  # in force
    weight: float | None = None  # of a part that is added to others


def parts_of(settings: AlgorithmSettings, max_tokens: int) -> list[Part]:
    """The parts of complete settings in the order in which they act."""
    found = []
    if settings.overlong.treat == "penalty":
        found.append(_part("reward", "reward", "overlong", {"limit": max_tokens, "cache": settings.overlong.cache}))
    if settings.kl_in_reward:
        at = "at each token" if settings.advantage in USING_GIVEN else "summed over each attempt"
        formula = f"-log(p_hat / pi_ref), {at}: a reward"
        found.append(Part("reward", "KL", formula, "as in REINFORCE++, 2501.03262", weight=settings.kl_in_reward))
    if settings.given != "answers":  # their loss uses no advantage
        kind = "preference" if settings.preference else "advantage"
        found.append(_part(kind, kind, settings.preference or settings.advantage, settings.constants_for(kind)))
    if (reference := settings.reference) is not None and reference.distil:
        found.append(_part("advantage", "reward", "distilled", {}, reference.distil))
    found += [_part("correction", "correction", each.name, each.constants) for each in settings.corrections]
    spec = settings.loss_spec()
    found.append(_part("loss", "term" if spec.name in (CROSS_ENTROPY, SCORE) else "loss", spec.name, spec.params))
    found += [_part("term", "term", each.name, each.params, each.weight) for each in spec.also]
    if (entropy := settings.entropy).target is not None:
        given = {"change": entropy.change} if entropy.change is not None else {}
        found.append(_part("term", "reward", "adaptive_entropy", {"target": entropy.target, **given}))
    length = {"fixed_length": settings.fixed_length} if settings.reduction == "fixed" else {}
    return [*found, _part("reduction", "reduction", settings.reduction, length)]


def _part(role: str, kind: str, name: str, constants: Mapping[str, Any], weight: float | None = None) -> Part:
    each = entry(kind, name)
    return Part(role, name, each.formula, each.source, {**each.constants, **constants}, weight)


def p_hat(settings: AlgorithmSettings) -> str:
    """A sentence on what p_hat, and so the ratios, are under these settings."""
    if settings.given:
        if settings.recomputes:
            return (
                "the trainer's own, at the start of the step: what the preference is of. Nothing is sampled: there is no mu"
            )
        return "not needed, and there is no mu: nothing is sampled"
    if not settings.recomputes:
        if settings.loss in ANCHORED:
            return "mu stands in for it: k = 1, r = rho, and what the loss does to r it does to staleness and mismatch"
        return "mu stands in for it: k = 1"
    if settings.updates.count > 1:
        return "the trainer's own, at the start of the step: r moves with each update, k holds staleness and mismatch"
    own = "the trainer's own, and a step is one update: r = 1 but for rounding, k holds staleness and mismatch"
    if settings.loss in ANCHORED:
        own += f". The gradient is that of -A log pi: the constants of {settings.loss} do nothing"
    return own


def differing(settings: AlgorithmSettings) -> dict[str, dict[str, Any]]:
    """Settings that differ from the preset, by dotted name: the value, and the preset's or None."""
    ours, preset = dump(settings), {key: value for key, value in PRESETS[settings.name].items() if key != "constants"}
    constants = ours.pop("constants")
    usual = AlgorithmSettings.model_validate(ours).constants  # the defaults of these functions
    theirs = {**_defaults(AlgorithmSettings), **preset}
    theirs["corrections"] = [
        {"name": each["name"], "constants": each.get("constants", {})} for each in theirs["corrections"]
    ]
    for key, kind in (("reference", ReferenceSettings), ("critic", CriticSettings)):
        if ours[key] is not None:
            theirs[key] = {**_defaults(kind), **(preset.get(key) or {"model": None})}
    mine, other = flat(ours) | constants, {"name": settings.name, **flat(theirs), **usual}
    return {key: {"value": mine[key], "preset": other.get(key)} for key in mine if mine[key] != other.get(key)}


def _defaults(kind: type[Config]) -> dict[str, Any]:
    values = {key: f.get_default(call_default_factory=True) for key, f in kind.model_fields.items() if not f.is_required()}
    return {key: dump(value) if isinstance(value, Config) else value for key, value in values.items()}
