"""Estimate of the memory of a run's processes, from the shapes of its models.

Bytes of weights, optimizer and caches are exact. Activations are an upper bound for the largest micro-batch, or the largest
step of an engine. Python and torch count with the memory that a small process shares with no other; the rest of them, and
buffers of matrix products, come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tidemill.algorithms.algorithm_settings import begins_as
from tidemill.core.errors import ConfigError
from tidemill.engine.engine_kinds import BaseEngineSettings
from tidemill.engine.native.cache_size import device_of, free_memory, kv_pages, page_bytes
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.paged_attention import GATHER_BYTES, MOST_PAIRS
from tidemill.models.architecture import Architecture, matrices, parameters
from tidemill.models.kernels.cpu.bindings import BLOCK, STEP, Native
from tidemill.models.kernels.library import native
from tidemill.models.logprobs import chunk_rows
from tidemill.models.trained_linear import MIXES, floats_are_quicker, pairs_are_ours, prepares_sizes
from tidemill.run.planner.device_plan import DevicePlan, as_configured, resolved
from tidemill.run.planner.plan import RunPlan, plan_of, warm_up_plan
from tidemill.run.planner.rank_memory import per_rank
from tidemill.run.recipe import RunConfig
from tidemill.run.storage.model_folder import architecture_of
from tidemill.trainer.micro_batches import filled
from tidemill.trainer.parallel_micro_batches import lanes_for
from tidemill.trainer.trainer_kinds import TrainerSettings

MIB, GIB = 2**20, 2**30
ONE_MACHINE = "This machine is the end: a run on several does not exist yet"
ITEM = {"float32": 4, "bfloat16": 2}  # bytes of a number
ATTEMPT = 5 << 10  # bytes of an attempt under way in the controller: its coroutines, calls and record, without its tokens
PYTHON = 16 << 20  # bytes of Python and torch that a process does not share: its heap, and pages that it wrote to
AUTOCAST = 0.8  # upper bound of kept bytes relative to float32: norms and attention stay in float32 on CPU


@dataclass(frozen=True, slots=True)
class Held:
    """An amount of one process's memory, and its use."""

    what: str
    bytes: int
    lever: str = ""  # the change that would lower it
    lazy: bool = False  # grows with use, and is sized by the free memory
    host: bool = False  # in the machine's own memory, wherever the process computes
    divided: bool = False  # several ranks divide it among all of them, whatever else each holds


@dataclass(frozen=True, slots=True)
class Process:
    """Processes of one kind, with the memory of each."""

    name: str
    devices: tuple[str, ...]  # of each: cpu, cuda, cuda:N
    held: list[Held]

    @property
    def count(self) -> int:
        return len(self.devices)

    @property
    def bytes(self) -> int:
        return sum(h.bytes for h in self.held)


@dataclass(frozen=True, slots=True)
class Models:
    """The architectures of a run; None: there is none, or its folder is not here."""

    policy: Architecture
    reference: Architecture | None = None
    critic: Architecture | None = None  # a critic with a model of its own

    @classmethod
    def of(cls, config: RunConfig, policy: Architecture) -> Models:
        """The architectures that a recipe names, for a given policy."""
        return cls(policy, *(begins_as(each, policy, architecture_of) for each in (config.reference, config.critic)))

    def complete(self, config: RunConfig) -> bool:
        """True when every architecture that the recipe asks for is known."""
        own_critic = config.critic is not None and config.critic.model != "policy"
        return (self.reference is not None) is (config.reference is not None) and (self.critic is not None) is own_critic


def processes(config: RunConfig, models: Models, longest: int = 0, devices: DevicePlan | None = None) -> list[Process]:
    """The processes of a run, with their memory. longest: tokens of the longest row. devices: None: nothing is placed."""
    devices = devices or as_configured(config)
    config = resolved(config, devices)
    placement, own = config.placement, config.placement.processes
    learning, *sampling = (
        [name or device_of(kind) for name in names]
        for names, kind in (
            (devices.trainer, config.trainer.device),
            (devices.engines, config.engine.device),
            (devices.reference, config.engine.device),
        )
    )
    free = free_memory(sampling[0][0])
    held = trainer_memory(config, models.policy, models.reference, models.critic, longest)
    found = _processes("trainer", learning, held, "" if own else None)
    count, held = placement.engines, engine_memory(config.engine, models.policy, free)
    found += _processes("engine", sampling[0], held, f"fewer placement.engines (now {count:,})" if own else None)
    if models.reference is not None and (count := placement.reference_engines):
        held = engine_memory(config.engine, models.reference, free, updated=False)
        lever = f"fewer placement.reference_engines (now {count:,})"
        found += _processes("reference engine", sampling[1], held, lever if own else None)
    found += _processes("controller", ["cpu"], [attempts_memory(config)], "")
    if config.judged and (count := config.scoring.workers):
        found += _processes("scorer", ["cpu"] * count, [], f"fewer scoring.workers (now {count:,})")
    if count := placement.environment.workers:
        found += _processes("environment", ["cpu"] * count, [], f"fewer placement.environment.workers (now {count:,})")
    return found


def _processes(name: str, devices: Sequence[str], held: list[Held], lever: str | None) -> list[Process]:
    """Equal processes; on GPUs, also the part of their memory that lies in the host's memory.

    devices: of each. lever: advice to have fewer of them; None: they are not processes of their own.
    """
    held = held if lever is None else [*held, Held("Python itself", PYTHON, lever, host=True)]
    if devices[0] == "cpu":
        return [Process(name, (*devices,), held)]
    host = Process(f"{name}'s host", ("cpu",) * len(devices), [h for h in held if h.host])
    return [Process(name, (*devices,), [h for h in held if not h.host]), *([host] if host.held else [])]


def check_memory(config: RunConfig, policy: Architecture, longest: int = 0, devices: DevicePlan | None = None) -> None:
    """Raise ConfigError, with advice, if a run needs more than is free on a device."""
    if why := refusal(processes(config, Models.of(config, policy), longest, devices)):
        raise ConfigError(str(why))


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes that a run needs on one device. free: None if this machine lacks the device."""

    needed: int  # without caches that adapt to the free memory
    total: int
    free: int | None


def demands(found: Sequence[Process]) -> dict[str, Demand]:
    return {
        device: Demand(
            sum(p.devices.count(device) * h.bytes for p in found for h in p.held if not h.lazy),
            sum(p.devices.count(device) * p.bytes for p in found),
            free_memory(device),
        )
        for device in dict.fromkeys(device for p in found for device in p.devices)
    }


@dataclass(frozen=True, slots=True)
class MemoryRefusal:
    """The reason why a run cannot fit, and the settings that would help, the best first."""

    too_large: str
    helps: tuple[str, ...] = ()

    def __str__(self) -> str:
        first = f". What takes the most first: {'; '.join(self.helps)}. {ONE_MACHINE}" if self.helps else ""
        return f"{self.too_large}{first}"


def refusal(found: Sequence[Process]) -> MemoryRefusal | None:
    """The first reason why these processes do not fit, or None."""
    for device, demand in demands(found).items():
        if demand.free is None:
            names = " and ".join(p.name for p in found if device in p.devices)
            return MemoryRefusal(
                f"{names} on {device!r}: no such device is visible here; set trainer.device and engine.device to 'auto', "
                "which takes what there is, or to 'cpu'"
            )
        if demand.needed <= demand.free:
            continue
        parts = [(p.devices.count(device), p, h) for p in found if device in p.devices for h in p.held if not h.lazy]
        parts.sort(key=lambda part: -part[0] * part[2].bytes)
        count, process, most = parts[0]
        levers = [h.lever for _, _, h in parts if h.lever]
        return MemoryRefusal(
            f"this recipe needs {in_words(demand.needed)} of memory on {device}, and {in_words(demand.free)} is free; the "
            f"most is {in_words(count * most.bytes)} of {_owner(process, count)}: {most.what}",
            tuple([*dict.fromkeys(levers)][:3]),
        )
    return None


def _owner(process: Process, count: int) -> str:
    return f"the {process.name}" if count == 1 else f"{count:,} {process.name}s"


def attempts_memory(config: RunConfig) -> Held:
    """Memory of attempts that were admitted and are not trained yet, in the controller."""
    rollout = config.rollout
    count = min(plan_of(config).slots, config.steps * rollout.groups) * rollout.group_size
    lever = f"fewer rollout.groups (now {rollout.groups:,}), or a lower max_lag"
    return Held(f"{count:,} attempts under way, without their tokens", count * ATTEMPT, lever)


def trainer_memory(
    config: RunConfig,
    arch: Architecture,
    reference: Architecture | None,
    critic: Architecture | None = None,
    longest: int = 0,
) -> list[Held]:
    """Memory of the trainer, with the models that are known and of their own."""
    own, asked, smaller = 4 * parameters(arch), config.reference, "a smaller model"
    if not isinstance(config.trainer, TrainerSettings):
        return [Held("weights; the rest is not known", own, smaller)]
    held = [Held("weights", own, smaller), Held("gradients", own, smaller), Held("two moments", 2 * own, smaller)]
    moves = 0
    if asked is not None and reference is not None and not config.placement.reference_engines:
        held.append(Held("reference", 4 * parameters(reference), "a smaller algorithm.reference.model"))
        moves = 4 * parameters(reference) if asked.every else 0
    size = 0
    if critic is not None:  # without a head of its own
        size = 4 * (parameters(critic) - (0 if critic.tied else critic.vocab * critic.hidden))
        held.append(Held("critic, its gradients and moments", 4 * size, "algorithm.critic.model = 'policy'"))
        moves += 3 * size
    held.append(Held("copy while a checkpoint is written", 3 * own + moves, smaller, host=True, divided=True))
    if config.trainer.reduce != "float32":
        lever = "trainer.reduce = 'float32'"
        held.append(Held("errors of sums over replicas", own + size, lever))
        held.append(Held("copy of these errors for a checkpoint", own + size, lever, host=True))
    if config.placement.sync.kind_name == "shared_memory":
        size = 2 * parameters(arch) * ITEM[config.trainer.serving_dtype]
        lever = "trainer.serving_dtype = 'bfloat16'" if config.trainer.serving_dtype == "float32" else ""
        held.append(Held("two versions on their way to engines", size, lever, host=True, divided=True))
    settings = config.trainer
    plan, budget = plan_of(config, arch), settings.micro_batch_tokens
    every = plan.most_rows * plan.context
    fills = prepares_sizes(device_of(settings.device), settings.dtype == "bfloat16")  # as in `Compute.pack`
    tokens = max(longest, min(filled(every, budget) if fills else every, budget))
    lanes = max(map(trainer_lanes, [plan, *([warm_up_plan(config)] if config.warmup.accuracy else [])]))
    alive = sum(activations(each, settings, tokens, lanes) for each in (arch, critic) if each is not None)
    checkpointing = "" if settings.checkpointing else ", or trainer.checkpointing = true"
    lever = f"a lower trainer.micro_batch_tokens (now {budget:,}){checkpointing}: no result depends on it"
    if longest > budget:  # the row is a micro-batch by itself: a smaller budget splits no row
        shorter = "shorter rows" if config.offline else f"a lower rollout.max_tokens (now {config.rollout.max_tokens:,})"
        lever = shorter + checkpointing
    held.append(Held(f"activations of at most {tokens:,} tokens", alive, lever))
    return per_rank(held, settings, [arch, *([] if critic is None else [replace(critic, tied=True)])])


def trainer_lanes(plan: RunPlan) -> int:
    """The most micro-batches that the trainer runs in parallel."""
    trainer = plan.config.trainer
    return lanes_for(plan.lanes if device_of(trainer.device) == "cpu" else 1, trainer.micro_batch_tokens, 0)


def activations(arch: Architecture, settings: TrainerSettings, tokens: int, lanes: int = 1) -> int:
    """The most bytes alive between the passes of micro-batches that hold `tokens`.

    A layer keeps, for each token: its input, its input plus the attention, the projections q|k|v, rotated q and k, the
    attention's output, and gate|up. Without compiled kernels it also keeps both norms' outputs, the product of gate and up,
    rotated, padded and normed copies, and silu. The head's chunks of logits and widened operands are included.
    """
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    on_cpu, narrows = device_of(settings.device) == "cpu", settings.dtype == "bfloat16"
    if on_cpu and native() is not None and Native.trains(torch.float32, arch.head_dim):
        narrow = 2 * (q + kv + arch.intermediate)  # outputs of products and of attention
        layer, share = 2 * arch.hidden + q + kv + arch.heads + narrow * (0.5 if narrows else 1), 1.0
    else:
        layer = 4 * (arch.hidden + arch.intermediate) + 7 * q + 9 * kv + (q + kv) * arch.qk_norm + 8
        share = AUTOCAST if narrows else 1.0
    copies = 2 * parameters(arch) if narrows else 0
    if narrows and on_cpu and pairs_are_ours():
        copies *= 2  # one for the forward products, one for the backward ones
    elif narrows and on_cpu and floats_are_quicker():
        copies = 8 * lanes * max(n * k for n, k in matrices(arch)[:-1])  # one matrix at a time: widened, and its gradient
    kept = layer + arch.layers * arch.hidden if settings.checkpointing else arch.layers * layer
    logits = 3 * 4 * min(tokens, lanes * chunk_rows(arch.vocab, device_of(settings.device))) * arch.vocab
    return int(4 * share * tokens * (kept + 4 * arch.hidden)) + copies + logits


def engine_memory(
    settings: BaseEngineSettings, arch: Architecture, free: int | None = None, updated: bool = True
) -> list[Held]:
    """The most memory of one engine; of a kind other than the native one, its weights.

    free: bytes of which the KV cache takes a share; None: not known. updated: whether the engine receives new versions.
    """
    size = ITEM[settings.dtype]
    if not isinstance(settings, EngineSettings):
        return [Held("weights; the rest is not known", size * parameters(arch), "a smaller model")]
    own, on_cpu = size * parameters(arch), device_of(settings.device) == "cpu"
    packs = [(n, k) for n, k in matrices(arch) if on_cpu and not settings.batch_invariant and (size == 4 or k % STEP == 0)]
    lower = "engine.dtype = 'bfloat16'" if settings.dtype == "float32" else "a smaller model"
    held = [Held("weights", own, lower), *([Held("spare for the next version", own, lower)] if updated else [])]
    if packs:
        packed = len(held) * sum(-(-n // BLOCK) * BLOCK * k for n, k in packs)
        of = "copies of both" if updated else "copy"
        held.append(Held(f"packed {of}, where the processor has a product for them", packed * size, lower))
    elif size == 2 and (on_cpu or not MIXES):
        held.append(Held("head in float32", 4 * arch.vocab * arch.hidden))
    pages, _ = kv_pages(settings, arch, free)
    chunk, rows = settings.prefill_chunk, settings.max_sequences
    lever = f"a lower engine.prefill_chunk (now {chunk:,}) or engine.max_sequences (now {rows:,})"
    held.append(Held(f"a step of at most {chunk + rows:,} tokens", step_memory(settings, arch), lever))
    cache = "KV cache, taken as it is used" if on_cpu else "KV cache"
    given = settings.kv_memory_mb is not None
    lever = f"a lower engine.kv_memory_mb (now {settings.kv_memory_mb:,})" if given else ""
    return [
        *held,
        Held(cache, pages * page_bytes(arch, settings.page_size, getattr(torch, settings.dtype)), lever, lazy=not given),
    ]


def step_memory(settings: EngineSettings, arch: Architecture) -> int:
    """The most bytes alive during an engine's step, if all rows sample from the whole vocabulary.

    For each token: its input and the sum added to it, q|k|v before and after rotation, the attention's output, gate|up and
    their product; without compiled kernels also normed copies, silu, and gathered keys and values. For each row that
    samples: its logits, and without a kernel their logarithms, with and without the temperature, and probabilities.
    """
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    size, on_cpu = ITEM[settings.dtype], device_of(settings.device) == "cpu"
    fits = Native.attends(getattr(torch, settings.dtype), arch.heads, arch.kv_heads, arch.head_dim, settings.page_size)
    compiled = not on_cpu or (native() is not None and fits and not settings.batch_invariant)
    layer = 3 * arch.hidden + 2 * q + 2 * arch.head_dim + (2 if compiled else 4) * (q + 2 * kv)
    layer += (3 if compiled else 4) * arch.intermediate
    tokens, keys = settings.prefill_chunk + settings.max_sequences, settings.context_of(arch.context) * 2 * kv * 4
    gathered = 0 if compiled else 2 * max(GATHER_BYTES["cpu"], keys) + 5 * MOST_PAIRS  # a mask, as bytes and as floats
    logits = settings.max_sequences * (size * arch.hidden + (1 if compiled else 4) * 4 * arch.vocab)
    return max(size * tokens * layer, logits) + gathered  # layers and logits follow one another; the gathered buffer stays


def row_tokens(settings: BaseEngineSettings, arch: Architecture, free: int | None = None) -> int:
    """The most tokens that a row may hold."""
    if not isinstance(settings, EngineSettings):
        return settings.context_of(arch.context)
    pages, _ = kv_pages(settings, arch, free)
    return max(2, min(settings.context_of(arch.context), (pages - 1) * settings.page_size))


def in_words(size: int) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"
