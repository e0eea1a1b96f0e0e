"""What a recipe comes to before anything is run: the numbers of a step, and memory, process by process.

Numbers of a step are bounds that hold. Bytes are those of weights, optimizer and caches, which are known from the model's
shapes; activations, buffers of matrix products and what Python and torch take themselves come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from tidemill.algorithms.preferences import PREFERENCES
from tidemill.algorithms.settings import AlgorithmSettings, ReferenceSettings
from tidemill.engine.attention import page_bytes
from tidemill.engine.core import SHARE_OF_FREE_MEMORY
from tidemill.engine.settings import EngineSettings
from tidemill.envs.settings import AnyEnv, GuessSettings, PythonSettings, environments_of
from tidemill.kernels.library import BLOCK, STEP
from tidemill.loading import load_object
from tidemill.models.architecture import Architecture
from tidemill.recipe import RunConfig

ITEM = {"float32": 4, "bfloat16": 2}  # bytes of a number


@dataclass(frozen=True, slots=True)
class Held:
    """Memory of one process, and what for."""

    what: str
    bytes: int


@dataclass(frozen=True, slots=True)
class StepSize:
    groups: int
    group_size: int
    sequences: int
    updates: int
    replies: int | None  # of an attempt, at most; None: the environment decides
    sampled_tokens: int | None  # at most; None: neither replies nor context are known
    row_tokens: int | None  # run for the longest row, at most; None: the context is not known
    forward_micro_batches: int  # of one forward pass over all rows, at most
    train_micro_batches: int  # of all updates, at most
    denominator: int | None  # of one update, at most: what the sum of weighted terms is divided by


def step_size(config: RunConfig, context: int | None) -> StepSize:
    """context: tokens that a row may hold, None while the model is not known."""
    r, updates = config.rollout, first_algorithm(config).updates
    sequences, asked_for = r.groups * r.group_size, [replies_of(each) for each in environments_of(config.env)]
    known = [count for count in asked_for if count is not None]
    replies = max(known) if len(known) == len(asked_for) else None
    most = None if context is None else context - 1  # a prompt has a token at least
    given = bool(config.given)
    asked = None if given or replies is None else replies * r.max_tokens  # nothing bounds what a task gives
    each = most if asked is None else asked if most is None else min(asked, most)
    groups = -(-r.groups // updates.minibatches)  # of the largest update
    rows = groups * r.group_size
    together = 1 if most is None else max(1, config.trainer.micro_batch_tokens // most)  # rows that fit in any case
    parts = min(rows, -(-rows // together) + 1)  # those that have no gradient are run apart
    return StepSize(
        groups=r.groups,
        group_size=r.group_size,
        sequences=sequences,
        updates=updates.count,
        replies=replies,
        sampled_tokens=0 if given else None if each is None else sequences * each,
        row_tokens=most,
        forward_micro_batches=-(-sequences * (2 if first_algorithm(config).preference == "kto" else 1) // together),
        train_micro_batches=updates.count * parts,
        denominator=_denominator(config, groups, each),
    )


def first_algorithm(config: RunConfig) -> AlgorithmSettings:
    """The recipe's, where not every environment has its own; of several, each takes one update a step."""
    return next(iter(config.algorithms.values()))


def replies_of(env: AnyEnv) -> int | None:
    """A conversation asks as often as it likes. Raises ConfigError when the user's file does not load."""
    if isinstance(env, PythonSettings):
        return None if hasattr(load_object(env.path), "run") else 1  # a reward function is asked about one reply
    return env.turns if isinstance(env, GuessSettings) else 1


def _denominator(config: RunConfig, groups: int, each: int | None) -> int | None:
    s = first_algorithm(config).with_longest(config.rollout.max_tokens)
    rows = groups * (2 if s.preference in PREFERENCES else config.rollout.group_size)  # a pair is all that trains of a group
    match s.reduction:
        case "token":
            return None if each is None else rows * each
        case "prompt":
            return groups
        case "fixed":
            assert s.fixed_length is not None
            return rows * s.fixed_length
    return rows


def matrices(arch: Architecture) -> list[tuple[int, int]]:
    """[N, K] of every matrix that something is multiplied with, the head last."""
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    layer = [(q + 2 * kv, arch.hidden), (arch.hidden, q), (2 * arch.intermediate, arch.hidden)]
    return [*layer, (arch.hidden, arch.intermediate)] * arch.layers + [(arch.vocab, arch.hidden)]


def parameters(arch: Architecture) -> int:
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    vectors = 2 * arch.hidden + 2 * arch.head_dim * arch.qk_norm + (q + 2 * kv) * arch.qkv_bias + arch.hidden * arch.o_bias
    vectors += (2 * arch.intermediate + arch.hidden) * arch.mlp_bias
    embedding = 0 if arch.tied else arch.vocab * arch.hidden
    return sum(n * k for n, k in matrices(arch)) + embedding + arch.layers * vectors + arch.hidden


def trainer_memory(
    config: RunConfig, arch: Architecture, reference: Architecture | None, critic: Architecture | None = None
) -> list[Held]:
    """reference, critic: those of the other policy and of a critic of its own, where there are any whose folder is known."""
    own, asked = 4 * parameters(arch), config.reference
    held = [Held("weights", own), Held("gradients", own), Held("two moments", 2 * own)]
    moves = 0
    if asked is not None and reference is not None and not config.placement.reference_engines:
        held.append(Held("reference", 4 * parameters(reference)))
        moves = 4 * parameters(reference) if asked.every else 0
    if critic is not None:  # without the head, a vocabulary's worth, where that is not the embedding
        size = 4 * (parameters(critic) - (0 if critic.tied else critic.vocab * critic.hidden))
        held.append(Held("critic, its gradients and moments", 4 * size))
        moves += 3 * size
    held.append(Held("copy while a checkpoint is written", 3 * own + moves))
    if config.placement.sync.carrier == "shared_memory":
        held.append(Held("two versions on their way to engines", 2 * parameters(arch) * ITEM[config.trainer.serving_dtype]))
    return held


def reference_of(reference: ReferenceSettings | None, model: str) -> str | None:
    """The model that the reference begins as."""
    return None if reference is None else model if reference.model == "initial" else reference.model


def engine_memory(settings: EngineSettings, arch: Architecture, free: int | None = None, updated: bool = True) -> list[Held]:
    """Of one engine, at most. free: memory that its KV cache takes a share of; None: not known. updated: versions come."""
    size = ITEM[settings.dtype]
    own, on_cpu = size * parameters(arch), on_device(settings) == "cpu"
    packs = [(n, k) for n, k in matrices(arch) if on_cpu and not settings.batch_invariant and (size == 4 or k % STEP == 0)]
    held = [Held("weights", own), *([Held("spare for the next version", own)] if updated else [])]
    if packs:
        packed = len(held) * sum(-(-n // BLOCK) * BLOCK * k for n, k in packs)
        of = "copies of both" if updated else "copy"
        held.append(Held(f"packed {of}, where the processor has a product for them", packed * size))
    elif size == 2:
        held.append(Held("head in float32", 4 * arch.vocab * arch.hidden))
    pages, _ = kv_pages(settings, arch, free)
    cache = "KV cache, taken as it is used" if on_cpu else "KV cache"
    return [*held, Held(cache, pages * _page(settings, arch))]


def kv_pages(settings: EngineSettings, arch: Architecture, free: int | None = None) -> tuple[int, bool]:
    """Pages of the KV cache, and whether it is less than full contexts for all sequences."""
    context = min(settings.context or arch.context, arch.context)
    wanted = settings.max_sequences * -(-context // settings.page_size) + 1
    if settings.kv_memory_mb is not None:
        pages = (settings.kv_memory_mb << 20) // _page(settings, arch)
    else:
        share = SHARE_OF_FREE_MEMORY[on_device(settings)]
        pages = wanted if free is None else min(wanted, int(free * share) // _page(settings, arch))
    return pages, pages < wanted


def context_of(settings: EngineSettings, arch: Architecture, free: int | None = None) -> int:
    """Tokens that a row may hold."""
    pages, _ = kv_pages(settings, arch, free)
    return max(2, min(settings.context or arch.context, arch.context, (pages - 1) * settings.page_size))


def _page(settings: EngineSettings, arch: Architecture) -> int:
    return page_bytes(arch, settings.page_size, getattr(torch, settings.dtype))


def on_device(settings: EngineSettings) -> str:
    return settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def free_memory(settings: EngineSettings) -> int | None:
    """Of this machine now; None for a device that it lacks."""
    if on_device(settings) == "cpu":
        return psutil.virtual_memory().available
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
