"""A recipe's numbers as data and as rows: a step, the run, memory by process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.preferences import PREFERENCES
from tidemill.cli.commands.screen import INDENT, Row, console, print_rows
from tidemill.core.amounts import amount
from tidemill.core.errors import ConfigError
from tidemill.core.hub import shown
from tidemill.core.import_object import load_object
from tidemill.engine.native.cache_size import device_of, free_memory, kv_pages
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.envs.environment_settings import (
    WORKERS,
    AgentSettings,
    AnyEnv,
    GuessSettings,
    PythonSettings,
    environments_of,
)
from tidemill.models.architecture import Architecture, parameters
from tidemill.run.build_controller import make_algorithm
from tidemill.run.planner.device_plan import DevicePlan, given_in, in_a_row
from tidemill.run.planner.device_rates import planned_devices
from tidemill.run.planner.memory_check import advised, refusal
from tidemill.run.planner.memory_model import Models, demands, in_words, processes, row_tokens
from tidemill.run.planner.plan import RunPlan, plan_of
from tidemill.run.planner.trainer_memory import trainer_lanes
from tidemill.run.recipe import RunConfig
from tidemill.run.storage.model_folder import architecture_of, check_companions, expect_model
from tidemill.weight_sync.sync_settings import BaseSyncSettings

PASSES = (("p_hat", "policy"), ("reference", "reference"), ("critic", "critic"))  # forward passes, and the model of each
MEMORY = "memory, an estimate"
ABOVE = ("model", "context")  # rows that stand above the memory table
MOST_PARTS = 2  # parts of a process's memory that are named
Section = tuple[str, list[Row]]


def figures(config: RunConfig, complete: bool = False) -> dict[str, Any]:
    """The numbers as plain data.

    Raises ConfigError for what `train` would refuse of algorithm and model, except for its size. complete: raises also if a
    model's folder is missing.
    """
    try:
        asks = make_algorithm(config).asks
        if complete:
            expect_model(config.model)
        arch = architecture_of(config.model)
        config = _with_players(config)
        devices, misplaced = (None, "") if arch is None else _devices(config, arch)
        if misplaced:
            if complete:
                raise ConfigError(misplaced)
            config = _anywhere(config)
        plan = plan_of(config, arch, devices)
        config = plan.config
        memory = None if arch is None else _memory(plan, arch, complete)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    first = first_algorithm(config)
    step = step_size(plan, None if memory is None else memory["context"])
    asked = {name: int(who in asks) for name, who in PASSES}
    return {
        "step": asdict(step),
        "passes": {"policy": first.updates.epochs, **asked},
        "reduction": {"name": first.reduction, "denominator": _denominator(config, step)},
        "exceptions": config.trainer.exceptions,
        "steps": config.steps,
        "samples": config.steps * step.sequences,
        "max_lag": config.max_lag,
        "slots": plan.slots,
        "devices": {**asdict(plan.devices), "said": plan.devices.said(), "refused": misplaced},
        "memory": memory,
    }


def _with_players(config: RunConfig) -> RunConfig:
    """The recipe with the number of worker processes that a user's environment will have."""
    placement = config.placement
    if placement.environment.workers is not None or not any(map(_plays, environments_of(config.env))):
        return config
    environment = placement.environment.model_copy(update={"workers": WORKERS})
    return config.model_copy(update={"placement": placement.model_copy(update={"environment": environment})})


def _plays(env: AnyEnv) -> bool:
    """True for a user's environment, False for a reward function, which is asked about one reply, and for other kinds."""
    return isinstance(env, PythonSettings) and hasattr(load_object(env.paths[0]), "run")


def _devices(config: RunConfig, arch: Architecture) -> tuple[DevicePlan | None, str]:
    """The device plan on this machine, or None with the reason why there is none."""
    try:
        return planned_devices(config, given_in(config), Models.of(config, arch)), ""
    except ConfigError as error:
        return None, str(error)


def _anywhere(config: RunConfig) -> RunConfig:
    """The recipe without the devices that it names."""
    trainer, placement = config.trainer.model_copy(update={"device": "auto"}), config.placement
    return config.model_copy(update={"trainer": trainer, "placement": placement.model_copy(update={"devices": "auto"})})


def sections(config: RunConfig, found: Mapping[str, Any]) -> list[Section]:
    """Rows for people, by section. found: the result of `figures`."""
    return [
        ("a step", _step(config, found)),
        ("the run", _run(config, found)),
        (MEMORY, _memory_rows(config, found["memory"])),
    ]


def show(all_of: list[Section], memory: Mapping[str, Any] | None) -> None:
    """Print the sections with one label column, and the memory table within the last."""
    screen = console()
    width = max(len(str(label)) for _, rows in all_of for label, _ in rows)
    for title, rows in all_of:
        screen.print(Text(title, "bold"))
        about = [(str(label).ljust(width), said) for label, said in rows]
        if title != MEMORY or memory is None:
            print_rows(screen, about)
            continue
        model = [row for row, (label, _) in zip(about, rows, strict=True) if label in ABOVE]
        print_rows(screen, model)
        for line in screen.render_lines(_processes(memory, width), pad=False):
            drawn = Text.assemble(*((part.text, part.style or "") for part in line))
            drawn.rstrip()
            screen.print(drawn, soft_wrap=True)
        print_rows(screen, about[len(model) :])


def _processes(memory: Mapping[str, Any], width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("  process", min_width=width + INDENT, style="dim")
    table.add_column("number", justify="right")
    table.add_column("each", justify="right", no_wrap=True)
    table.add_column("most of it")
    kv = " (short of full contexts)" if memory["short_of_kv"] else ""
    for process, found in memory["processes"].items():
        held = sorted(found["bytes"].items(), key=lambda part: -part[1])
        most = [f"{in_words(size)} {what}{kv if what.startswith('KV') else ''}" for what, size in held[:MOST_PARTS]]
        rest = sum(size for _, size in held[MOST_PARTS:])
        most += [f"{in_words(rest)} more"] if rest else []
        table.add_row(f"  {process}", f"{found['count']:,}", in_words(sum(found["bytes"].values())), ", ".join(most))
    return table


def _memory(plan: RunPlan, arch: Architecture, complete: bool) -> dict[str, Any]:
    """The memory estimate. complete: the folders of reference and critic must be there."""
    config = plan.config
    models, devices = Models.of(config, arch), plan.devices
    if complete or models.complete(config):
        check_companions(config)
    free = free_memory(plan.devices.engines[0] or device_of(config.engine.device))
    found, context = processes(config, models, 0, devices), row_tokens(config.engine, arch, free)
    refused = advised(config, models, 0, devices)
    return {
        "model": shown(config.model),
        **{"parameters": parameters(arch), "context": context},
        "processes": {p.name: {"count": p.count, "bytes": {h.what: h.bytes for h in p.held}} for p in found},
        "devices": {device: asdict(demand) for device, demand in demands(found).items()},
        "refused": "" if refused is None else str(refused),
        "too_large": "" if refused is None else refused.too_large,
        "helps": [] if refused is None else [*(f"it would fit with {each}" for each in refused.fits), *refused.helps],
        "refused_at_context": refusal(processes(config, models, context, devices))
        is not None,  # with the longest possible row
        "without_reference": config.reference is not None and models.reference is None,
        "context_cut": plan.context_cut,
        "short_of_kv": isinstance(config.engine, EngineSettings) and kv_pages(config.engine, arch, free)[1],
    }


def _step(config: RunConfig, about: Mapping[str, Any]) -> list[Row]:
    step, passes, replies = about["step"], about["passes"], about["step"]["replies"]
    asked = "as many as its environment asks for" if replies is None else f"at most {amount(replies, 'reply')} an attempt"
    tokens = "not known" if step["sampled_tokens"] is None else f"at most {step['sampled_tokens']:,}"
    most = min(filter(None, (config.rollout.max_tokens, step["row_tokens"])))
    sampled = f"{tokens} tokens: {most:,} a reply, {asked}"
    if config.offline:
        sampled = f"nothing: the tasks give the {config.offline}"
    rows = f"rows of at most {step['row_tokens']:,}" if step["row_tokens"] else "rows that the model's context bounds"
    forward = [who for who, key in (("p_hat", "p_hat"), ("pi_ref", "reference"), ("V", "critic")) if passes[key]]
    often = "once" if passes["policy"] == 1 else amount(passes["policy"], "time")
    ran = [f"forward and backward {often} over every attempt"]
    mismatched = ", also over each prompt with the next one's reply" if first_algorithm(config).preference == "kto" else ""
    ran += [f"forward for {' and for '.join(forward)}{mismatched}"] if forward else []
    batches = [f"at most {step['train_micro_batches']:,} with gradients"]
    batches += [f"{step['forward_micro_batches']:,} for each forward pass"] if forward else []
    tokens_each = f"{config.trainer.micro_batch_tokens:,} tokens each"
    if step["lanes"] > 1:
        tokens_each = f"at most {step['lanes']:,} at a time, {config.trainer.micro_batch_tokens:,} tokens together"
    attempts = f"{step['groups']:,} groups × {step['group_size']:,} = {step['sequences']:,}"
    if step["replayed"]:
        again = f"at most {amount(step['replayed'], 'group')} of the {config.data.replay.within:,} steps before"
        attempts += f", and {again} are trained once more"
    return [
        ("attempts", attempts),
        ("sampled", sampled),
        ("updates", f"{step['updates']:,}"),
        ("passes", "; ".join(ran)),
        ("micro-batches", f"{', '.join(batches)}: {tokens_each}, {rows}"),
        ("denominator", about["reduction"]["denominator"]),
        *([("exceptions", "\n".join(about["exceptions"]))] if about["exceptions"] else []),
    ]


def _denominator(config: RunConfig, step: StepSize) -> str:
    """The divisor of an update's weighted sum, in words."""
    if len(config.policies) > 1:
        return "each policy's own, of its groups, as if it were trained alone"
    if len(config.algorithms) > 1:
        return "each algorithm's own, of its groups; each counts by its share of the step's groups"
    s, most = first_algorithm(config), step.denominator
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
        behind = f"nothing trained on is more than {amount(config.max_lag, 'version')} old"
    if about["step"]["replayed"]:
        behind += f"; what is trained once more is of the {amount(config.data.replay.within, 'step')} before"
    slots = f"({config.max_lag} + 1) × {about['step']['groups']:,}{window} = {about['slots']:,}"
    if config.offline:
        behind = "how many steps ahead tasks are read; nothing is sampled, so nothing is stale"
    placed = about["devices"]["refused"] or about["devices"]["said"]
    return [
        ("steps", f"{about['steps']:,} of {about['step']['sequences']:,} attempts = {about['samples']:,}{more}"),
        ("max_lag", f"{config.max_lag}: {behind}"),
        ("slots", f"{slots} groups in flight or waiting"),
        ("weights", _weights(config.placement.sync)),
        *([("devices", placed)] if placed else []),
    ]


def _weights(sync: BaseSyncSettings) -> str:
    """The transport of new weights, in words."""
    near = "trainer and engines on one machine" if sync.same_host else "trainer and engines share a disk"
    full = f"; what changed, and every {sync.every_full} versions all weights" if sync.every_full > 1 else ""
    return f"{sync.kind_name}: {near}" + ("; sent while engines receive" if sync.live else "") + full


def _memory_rows(config: RunConfig, memory: Mapping[str, Any] | None) -> list[Row]:
    if memory is None:
        return [("model", f"{config.model} is no folder here: nothing is known of its size")]
    rows: list[Row] = [
        ("model", f"{memory['model']}, {memory['parameters']:,} parameters, rows of at most {memory['context']:,} tokens")
    ]
    if memory["context_cut"]:
        rows.append(("context", memory["context_cut"]))
    left = "the reference, whose folder is not here, and " if memory["without_reference"] else ""
    if any(isinstance(env, AgentSettings) and env.lifetime == "episode" for env in environments_of(config.env)):
        left += "a process of the agent's command for each episode under way, and "
    beside = f"beside it: {left}what processes share of Python and torch"
    for devices, demand in alike(memory["devices"]):
        free = "what is free is not known here" if demand["free"] is None else f"of {in_words(demand['free'])} that are free"
        where = "together" if len(memory["devices"]) == 1 else f"on {in_a_row(devices)}"
        each = " each" if len(devices) > 1 else ""
        rows.append((where, f"{in_words(demand['total'])}{each}, {free}{f'; {beside}' if devices == ['cpu'] else ''}"))
    return rows


def alike(devices: Mapping[str, Any]) -> list[tuple[list[str], dict[str, Any]]]:
    """Devices with equal demands together, with that demand and what is free on the fullest."""
    found = dict[tuple[int, int], list[str]]()
    for device, demand in devices.items():
        found.setdefault((demand["needed"], demand["total"]), []).append(device)
    return [(each, min((devices[device] for device in each), key=lambda d: d["free"] or 0)) for each in found.values()]


@dataclass(frozen=True, slots=True)
class StepSize:
    groups: int
    group_size: int
    sequences: int
    replayed: int  # replayed groups, at most
    updates: int
    replies: int | None  # replies of an attempt, at most; None: the environment decides
    sampled_tokens: int | None  # tokens sampled in a step, at most; None: neither replies nor context are known
    row_tokens: int | None  # tokens computed for the longest row, at most; None: the context is not known
    forward_micro_batches: int  # micro-batches of one forward pass over all rows, at most
    train_micro_batches: int  # micro-batches of all updates, at most
    lanes: int  # parallel micro-batches, at most; they share the token budget of one
    denominator: int | None  # divisor of one update's weighted sum, at most


def step_size(plan: RunPlan, context: int | None) -> StepSize:
    """The numbers of a step. context: tokens that a row may hold, or None if it is not known."""
    config, r, updates = plan.config, plan.config.rollout, first_algorithm(plan.config).updates
    asked_for = [replies_of(each) for each in environments_of(config.env)]
    known = [count for count in asked_for if count is not None]
    replies = max(known) if len(known) == len(asked_for) else None
    most = None if context is None else context - 1  # a prompt has at least one token
    asked = None if config.offline or replies is None else replies * r.max_tokens  # nothing bounds an offline reply
    each = most if asked is None else asked if most is None else min(asked, most)
    groups = -(-(r.groups + plan.replayed) // updates.minibatches)  # groups of the largest update
    rows = groups * r.group_size
    lanes = trainer_lanes(plan)
    together = 1 if most is None else max(1, config.trainer.micro_batch_tokens // lanes // most)  # rows that always fit
    spread = 2 * lanes if lanes > 1 else 0  # more, to spread few rows over all lanes
    parts = min(rows, -(-rows // together) + 1 + 2 * spread)  # rows without a gradient run apart
    return StepSize(
        groups=r.groups,
        group_size=r.group_size,
        sequences=plan.samples,
        replayed=plan.replayed,
        updates=updates.count,
        replies=replies,
        sampled_tokens=0 if config.offline else None if each is None else plan.samples * each,
        row_tokens=most,
        forward_micro_batches=min(plan.step_rows, -(-plan.step_rows // together) + spread),
        train_micro_batches=updates.count * parts,
        lanes=lanes,
        denominator=_divisor(config, groups, each),
    )


def first_algorithm(config: RunConfig) -> AlgorithmSettings:
    """The first algorithm. If there are several, each takes one update a step."""
    return next(iter(config.algorithms.values()))


def replies_of(env: AnyEnv) -> int | None:
    """Replies of one attempt; None if a conversation asks as often as it likes."""
    if isinstance(env, PythonSettings):
        return None if _plays(env) else 1
    if isinstance(env, AgentSettings):
        return None
    return env.turns if isinstance(env, GuessSettings) else 1


def _divisor(config: RunConfig, groups: int, each: int | None) -> int | None:
    s = first_algorithm(config).with_longest(config.rollout.max_tokens)
    rows = groups * (2 if s.preference in PREFERENCES else config.rollout.group_size)  # only a pair of each group is trained
    match s.reduction:
        case "token":
            return None if each is None else rows * each
        case "prompt":
            return groups
        case "fixed":
            assert s.fixed_length is not None
            return rows * s.fixed_length
    return rows
