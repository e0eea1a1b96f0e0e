"""`tidemill explain RECIPE`: which gradient a recipe asks for, and what that comes to, before anything is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from tidemill.algorithms.losses import loss_by_name
from tidemill.algorithms.mixture import algorithm_of
from tidemill.algorithms.preferences import PREFERENCES
from tidemill.algorithms.presets import NOTES
from tidemill.algorithms.settings import AlgorithmSettings
from tidemill.catalogue.entries import number
from tidemill.commands import sizing
from tidemill.commands.given_tasks import task_rows, tasks_of
from tidemill.commands.in_force import differing, p_hat, parts_of
from tidemill.commands.screen import console, print_json, print_rows
from tidemill.config import ConfigError
from tidemill.engine.cache_size import device_of, free_memory, kv_pages
from tidemill.memory import Models, in_words, parameters, processes, refusal, row_tokens
from tidemill.model_folder import architecture_of, check_companions
from tidemill.recipe import RunConfig, load_recipe

PASSES = (("p_hat", "policy"), ("reference", "reference"), ("critic", "critic"))  # forward passes, and whose
Row = tuple[str | Text, str | Text]


def explain(recipe: Path, overrides: Sequence[str], as_json: bool) -> int:
    config = load_recipe([recipe], overrides)
    about = explained(config)
    if as_json:
        print_json({"recipe": str(recipe), **about})
    else:
        _show(recipe, config, about)
    return 0


def explained(config: RunConfig) -> dict[str, Any]:
    """All that is printed, as plain data. Raises ConfigError for what `train` would refuse of algorithm and model."""
    algorithms, longest = config.algorithms, config.rollout.max_tokens
    try:
        asks = algorithm_of(algorithms, longest).asks
        about = {name: _explained(each, longest) for name, each in algorithms.items()}
        memory = _memory(config)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    first = sizing.first_algorithm(config)
    step = sizing.step_size(config, None if memory is None else memory["context"])
    asked = {name: int(who in asks) for name, who in PASSES}
    return {
        **next(iter(about.values())),
        "tasks": tasks_of(config, about),
        "step": asdict(step),
        "passes": {"policy": first.updates.epochs, **asked},
        "reduction": {"name": first.reduction, "denominator": _denominator(config, step)},
        "steps": config.steps,
        "samples": config.steps * step.sequences,
        "max_lag": config.max_lag,
        "slots": (config.max_lag + 1) * step.groups - config.rollout.window + 1,
        "memory": memory,
    }


def _explained(given: AlgorithmSettings, max_tokens: int) -> dict[str, Any]:
    settings = given.with_longest(max_tokens)  # what follows from the longest reply is filled in
    loss_by_name(settings.loss_spec())
    parts = parts_of(settings, max_tokens)
    return {
        **{"preset": settings.name, "note": NOTES[settings.name], "differs": differing(given)},
        **{"parts": [asdict(part) for part in parts], "p_hat": p_hat(settings)},
    }


def _memory(config: RunConfig) -> dict[str, Any] | None:
    """None where the model's folder is not here."""
    arch = architecture_of(config.model)
    if arch is None:
        return None
    models = Models.of(config, arch)
    if models.complete(config):
        check_companions(config.reference, config.critic, config.model)
    free = free_memory(device_of(config.engine.device))
    found = processes(config, models)
    return {
        "model": config.model,
        **{"parameters": parameters(arch), "context": row_tokens(config.engine, arch, free)},
        "processes": {p.name: {"count": p.count, "bytes": {h.what: h.bytes for h in p.held}} for p in found},
        "total": sum(p.count * p.bytes for p in found),
        "free": free_memory("cpu"),
        "refused": refusal(found),
        "without_reference": config.reference is not None and models.reference is None,
        "short_of_kv": kv_pages(config.engine, arch, free)[1],
    }


def _show(recipe: Path, config: RunConfig, about: Mapping[str, Any]) -> None:
    screen = console()
    own = about["tasks"]["algorithms"]
    sections = (
        ("tasks", task_rows(about["tasks"])),
        *((_titled(recipe, name, len(own)), _algorithm(each)) for name, each in own.items()),
        ("a step", _step(config, about)),
        ("the run", _run(config, about)),
        ("memory, an estimate", _memory_rows(config, about["memory"])),
    )
    width = max(len(str(label)) for _, rows in sections for label, _ in rows)
    for title, rows in sections:
        screen.print(Text(title, "bold"))
        print_rows(screen, [(str(label).ljust(width), said) for label, said in rows])


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


def _step(config: RunConfig, about: Mapping[str, Any]) -> list[Row]:
    step, passes, replies = about["step"], about["passes"], about["step"]["replies"]
    asked = "as many as its environment asks for" if replies is None else f"at most {_n(replies, 'reply')} an attempt"
    tokens = "not known" if step["sampled_tokens"] is None else f"at most {step['sampled_tokens']:,}"
    sampled = f"{tokens} tokens: {config.rollout.max_tokens:,} a reply, {asked}"
    if config.given:
        sampled = f"nothing: the tasks give the {config.given}"
    rows = f"rows of at most {step['row_tokens']:,}" if step["row_tokens"] else "rows that the model's context bounds"
    forward = [who for who, key in (("p_hat", "p_hat"), ("pi_ref", "reference"), ("V", "critic")) if passes[key]]
    ran = [f"forward and backward {'once' if passes['policy'] == 1 else _n(passes['policy'], 'time')} over every attempt"]
    mismatched = (
        ", also over each prompt with the next one's reply" if sizing.first_algorithm(config).preference == "kto" else ""
    )
    ran += [f"forward for {' and for '.join(forward)}{mismatched}"] if forward else []
    batches = [f"at most {step['train_micro_batches']:,} with gradients"]
    batches += [f"{step['forward_micro_batches']:,} for each forward pass"] if forward else []
    attempts = f"{step['groups']:,} groups × {step['group_size']:,} = {step['sequences']:,}"
    if step["replayed"]:
        again = f"at most {_n(step['replayed'], 'group')} of the {config.data.replay.within:,} steps before"
        attempts += f", and {again} are trained once more"
    return [
        ("attempts", attempts),
        ("sampled", sampled),
        ("updates", f"{step['updates']:,}"),
        ("passes", "; ".join(ran)),
        ("micro-batches", f"{', '.join(batches)}: {config.trainer.micro_batch_tokens:,} tokens each, {rows}"),
        ("denominator", about["reduction"]["denominator"]),
    ]


def _denominator(config: RunConfig, step: sizing.StepSize) -> str:
    """What the weighted sum of an update is divided by, in words."""
    if len(config.algorithms) > 1:
        return "each algorithm's own, of its groups; each counts by its share of the step's groups"
    s, most = sizing.first_algorithm(config), step.denominator
    groups = -(-(step.groups + step.replayed) // s.updates.minibatches)
    attempts = f"{groups * (2 if s.preference in PREFERENCES else step.group_size):,} attempts"
    words = {
        "token": "the tokens trained on" + ("" if most is None else f", at most {most:,}"),
        "sequence": f"each attempt's tokens, then {attempts}",
        "prompt": f"the tokens of each prompt, then {groups:,} prompts",
        "attempt": attempts,
        "fixed": f"{attempts} × a constant length = {most}",
    }
    of = "of an update: " if s.updates.count > 1 else ""
    return f"{of}{words[s.reduction]}{'' if s.given else '; those without a score do not count'}"


def _run(config: RunConfig, about: Mapping[str, Any]) -> list[Row]:
    drops = any(each.zero_variance == "drop" for each in config.algorithms.values())
    more = "; more are sampled, as groups without a difference are dropped" if drops else ""
    window = f" - {config.rollout.window} + 1" if config.rollout.window > 1 else ""
    behind = "synchronous: nothing trained on is stale"
    if config.max_lag:
        behind = f"nothing trained on is more than {_n(config.max_lag, 'version')} old"
    if about["step"]["replayed"]:
        behind += f"; what is trained once more is of the {_n(config.data.replay.within, 'step')} before"
    slots = f"({config.max_lag} + 1) × {about['step']['groups']}{window} = {about['slots']:,}"
    if config.given:
        behind = "how many steps ahead tasks are read; nothing is sampled, so nothing is stale"
    return [
        ("steps", f"{about['steps']:,} of {about['step']['sequences']:,} attempts = {about['samples']:,}{more}"),
        ("max_lag", f"{config.max_lag}: {behind}"),
        ("slots", f"{slots} groups in flight or waiting"),
    ]


def _memory_rows(config: RunConfig, memory: Mapping[str, Any] | None) -> list[Row]:
    if memory is None:
        return [("model", f"{config.model} is no folder here: nothing is known of its size")]
    kv = " (short of full contexts)" if memory["short_of_kv"] else ""
    rows: list[Row] = [
        ("model", f"{config.model}, {memory['parameters']:,} parameters, rows of at most {memory['context']:,} tokens")
    ]
    for process, found in memory["processes"].items():
        held, times = found["bytes"], f", each of {found['count']}" if found["count"] > 1 else ""
        each = [f"{in_words(size)} {what}{kv if what.startswith('KV') else ''}" for what, size in held.items()]
        rows.append((process, f"{in_words(sum(held.values()))}{times}: {', '.join(each)}"))
    left = "the reference, whose folder is not here, and " if memory["without_reference"] else ""
    beside = f"beside it: {left}what Python and torch take in each process"
    rows.append(("together", f"{in_words(memory['total'])}, of {in_words(memory['free'])} that are free; {beside}"))
    refused = memory["refused"]
    return [*rows, ("would be refused", Text(refused, "bold red"))] if refused else rows


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_called(each) for each in value) or "none"
    return number(value)


def _called(correction: Mapping[str, Any]) -> str:
    constants = ", ".join(f"{key} = {number(value)}" for key, value in correction["constants"].items())
    return f"{correction['name']} ({constants})" if constants else correction["name"]


def _n(count: int, noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"
