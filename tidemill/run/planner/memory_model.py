"""Estimate of the memory of a run's processes, from the shapes of its models.

Bytes of weights, optimizer and caches are exact. Activations are an upper bound for the largest micro-batch, or the largest
step of an engine. Python and torch count with the memory that a small process shares with no other; the rest of them, and
buffers of matrix products, come on top.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tidemill.algorithms.algorithm_settings import begins_as
from tidemill.engine.engine_kinds import BaseEngineSettings
from tidemill.engine.native.cache_size import device_of, free_memory, kv_pages, page_bytes
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.paged_attention import GATHER_BYTES, MOST_PAIRS
from tidemill.engine.remote.server_settings import ServerSettings
from tidemill.envs.environment_settings import AgentSettings, environments_of, workers_of
from tidemill.models.adapter_config import AdapterConfig
from tidemill.models.architecture import Architecture, matrices, parameters
from tidemill.models.kernels.cpu.bindings import BLOCK, STEP, Native
from tidemill.models.kernels.library import native
from tidemill.models.trained_linear import MIXES
from tidemill.run.planner.device_plan import ENGINES, TRAINER, DevicePlan, as_configured, resolved
from tidemill.run.planner.held_memory import ITEM, Held
from tidemill.run.planner.plan import plan_of
from tidemill.run.planner.server_memory import server_memory
from tidemill.run.planner.trainer_memory import tensor_sizes, trainer_memory
from tidemill.run.recipe import RunConfig
from tidemill.run.storage.model_folder import architecture_of

MIB, GIB = 2**20, 2**30
ATTEMPT = 5 << 10  # bytes of an attempt under way in the controller: its coroutines, calls and record, without its tokens
PYTHON = 16 << 20  # bytes of Python and torch that a process does not share: its heap, and pages that it wrote to


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
            (devices.reference, config.serves_reference.device),
        )
    )
    free = free_memory(sampling[0][0])
    turns = plan_of(config, devices=devices).takes_turns
    held = trainer_memory(config, models.policy, models.reference, models.critic, longest, turns)
    found, count = _processes("trainer", learning, held, "" if own else None), placement.engines
    for name, held in _engines(config, models.policy, free, turns):
        found += _processes(name, sampling[0], held, f"fewer placement.engines (now {count:,})" if own else None)
    if models.reference is not None and (count := placement.reference_engines):
        held = engine_memory(config.serves_reference, models.reference, free, updated=False)
        lever = f"fewer placement.reference_engines (now {count:,})"
        found += _processes("reference engine", sampling[1], held, lever if own else None)
    found += _processes("controller", ["cpu"], [attempts_memory(config)], "")
    if config.judged and (count := config.scoring.workers):
        found += _processes("scorer", ["cpu"] * count, [], f"fewer scoring.workers (now {count:,})")
    return [*found, *_players(config)]


def _players(config: RunConfig) -> Iterator[Process]:
    """The worker processes of environments, and agents that live as long as their worker."""
    own = config.placement.environment
    counts = [(env, workers_of(env, own)) for env in environments_of(config.env)]
    most = max(count for _, count in counts)
    lever = f"fewer placement.environment.workers (now {most:,})" if most else ""
    if count := sum(count for _, count in counts):
        yield from _processes("environment", ["cpu"] * count, [], lever)
    kept = [max(count, 1) for env, count in counts if isinstance(env, AgentSettings) and env.lifetime == "run"]
    if kept:
        yield Process("agent", ("cpu",) * sum(kept), [Held("the program itself, at least", PYTHON, lever, host=True)])


def _engines(config: RunConfig, policy: Architecture, free: int | None, turns: bool) -> Iterator[tuple[str, list[Held]]]:
    """The kinds of a run's engines, each with the memory of one: of all adapters, and of each whole model."""
    if not config.policies or config.side_by_side:
        how: dict[str, Any] = {"adapted": config.adapter_rank > 0, "beside": served_adapters(config)}
        yield "engine", engine_memory(config.engine, policy, free, turns=turns, **how)
    folders = config.frozen_folders
    for name in config.whole_policies:
        served = Architecture.from_folder(folders[name]) if name in folders else policy
        yield f"engine of {name}", engine_memory(config.engine, served, free, updated=name not in folders)


def _processes(name: str, devices: Sequence[str], held: list[Held], lever: str | None) -> list[Process]:
    """Equal processes; on GPUs, also the part of their memory that lies in the host's memory.

    devices: of each. lever: advice to have fewer of them; None: they are not processes of their own.
    """
    held = held if lever is None else [*held, Held("Python itself", PYTHON, lever, host=True)]
    if devices[0] == "cpu":
        return [Process(name, (*devices,), held)]
    host = Process(f"{name}'s host", ("cpu",) * len(devices), [h for h in held if h.host])
    return [Process(name, (*devices,), [h for h in held if not h.host]), *([host] if host.held else [])]


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes that a run needs on one device. free: None if this machine lacks the device."""

    needed: int  # without caches that adapt to the free memory
    total: int
    free: int | None


def demands(found: Sequence[Process]) -> dict[str, Demand]:
    devices = dict.fromkeys(device for p in found for device in p.devices)
    return {each: Demand(_needed(found, each, False), _needed(found, each, True), free_memory(each)) for each in devices}


def _needed(found: Sequence[Process], device: str, lazy: bool) -> int:
    """Bytes on a device: what stays, and what either turn takes, whichever is more. lazy: with caches that adapt."""
    sizes: dict[str, int] = dict.fromkeys(("", TRAINER, ENGINES), 0)
    for process in found:
        for held in process.held:
            if lazy or not held.lazy:
                sizes[held.turn] += process.devices.count(device) * held.bytes
    return sizes[""] + max(sizes[TRAINER], sizes[ENGINES])


def attempts_memory(config: RunConfig) -> Held:
    """Memory of attempts that were admitted and are not trained yet, in the controller."""
    rollout = config.rollout
    count = min(plan_of(config).slots, config.steps * rollout.groups) * rollout.group_size
    lever = f"fewer rollout.groups (now {rollout.groups:,}), or a lower max_lag"
    return Held(f"{count:,} attempts under way, without their tokens", count * ATTEMPT, lever)


def engine_memory(
    settings: BaseEngineSettings,
    arch: Architecture,
    free: int | None = None,
    updated: bool = True,
    turns: bool = False,
    adapted: bool = False,
    beside: Sequence[AdapterConfig] = (),
) -> list[Held]:
    """The most memory of one engine; of a kind that is not known here, its weights.

    free: bytes of which the KV cache takes a share; None: not known. updated: whether the engine receives new versions.
    turns: it sleeps while the trainer computes. adapted: its versions are adapters of its folder's weights. beside: the
    adapters that it serves side by side; none: it serves one policy.
    """
    size = ITEM[settings.dtype]
    if settings.elsewhere:
        return []
    if isinstance(settings, ServerSettings):
        return server_memory(settings, arch, parameters(arch), device_of(settings.device) == "cpu", free, updated, adapted)
    if not isinstance(settings, EngineSettings):
        return [Held("weights; the rest is not known", size * parameters(arch), "a smaller model")]
    own, on_cpu, spare = size * parameters(arch), device_of(settings.device) == "cpu", updated and not turns and not beside
    packs = [(n, k) for n, k in matrices(arch) if on_cpu and not settings.batch_invariant and (size == 4 or k % STEP == 0)]
    lower = "engine.dtype = 'bfloat16'" if settings.dtype == "float32" else "a smaller model"
    held = [Held("weights", own, lower), *([Held("spare for the next version", own, lower)] if spare else [])]
    decoders = len(held)
    if beside:
        sizes = [sum(tensor_sizes(arch, each)) for each in beside]
        held.append(Held(f"adapters of {len(beside)} policies", size * sum(sizes), "a lower trainer.lora.rank"))
        held.append(Held("next version of an adapter", (size + 4) * max(sizes), "a lower trainer.lora.rank"))
    elif adapted:
        held.append(Held("frozen base, to which adapters are added", own, "trainer.lora.publish = 'merged'", host=True))
    if packs:
        packed = decoders * sum(-(-n // BLOCK) * BLOCK * k for n, k in packs)
        of = "copies of both" if spare else "copy"
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
    size = pages * page_bytes(arch, settings.page_size, getattr(torch, settings.dtype))
    held.append(Held(cache, size, lever, lazy=not given))
    return [replace(each, turn=ENGINES) for each in held] if turns else held


def served_adapters(config: RunConfig) -> list[AdapterConfig]:
    """The adapters that an engine serves side by side; none if there is one policy."""
    if not config.policies:
        return []
    frozen = [AdapterConfig.from_folder(each) for name, each in config.frozen_folders.items() if name in config.side_by_side]
    return [*(each.config for each in config.adapters.values()), *frozen]


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
