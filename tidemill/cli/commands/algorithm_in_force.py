"""The parts of an algorithm that are in force, and how it differs from its preset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill.algorithms.advantages import USING_GIVEN
from tidemill.algorithms.algorithm_settings import AlgorithmSettings, CriticSettings, ReferenceSettings
from tidemill.algorithms.presets import ANCHORED, CROSS_ENTROPY, PRESETS, SCORE
from tidemill.cli.algorithm_reference import entry, flat
from tidemill.core.config import Config, dump


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
