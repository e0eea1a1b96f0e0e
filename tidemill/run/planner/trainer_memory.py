"""Estimate of a trainer's memory: weights, gradients, moments, copies and activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from tidemill.algorithms.algorithm_settings import begins_as
from tidemill.engine.native.cache_size import device_of
from tidemill.models.adapter_config import AdapterConfig
from tidemill.models.adapter_dropout import PIECE as PIECE_OF_MASKS
from tidemill.models.architecture import Architecture, matrices, parameters, wide_matrices
from tidemill.models.decoder import recomputed
from tidemill.models.hf_weights import empty_decoder
from tidemill.models.kernels.cpu.bindings import Native
from tidemill.models.kernels.library import native
from tidemill.models.logprobs import chunk_rows
from tidemill.models.lora import adapters, attach
from tidemill.models.quantised_weights import BYTES
from tidemill.models.trained_linear import floats_are_quicker, pairs_are_ours, prepares_sizes
from tidemill.run.planner.device_plan import TRAINER
from tidemill.run.planner.held_memory import ITEM, Held
from tidemill.run.planner.plan import RunPlan, plan_of, warm_up_plan
from tidemill.run.planner.rank_memory import per_rank
from tidemill.run.recipe import RunConfig
from tidemill.trainer.micro_batches import filled
from tidemill.trainer.moments import BLOCK, PIECE, SMALL
from tidemill.trainer.parallel_micro_batches import lanes_for
from tidemill.trainer.trainer_kinds import TrainerSettings

DECODED = 40  # most bytes of a number while a part of 8-bit moments is stepped: both moments, and what encodes them
DEQUANTISED = 12  # most bytes of a number while its matrix is made of few bits, with what the product makes of it
MASKED = 16  # most bytes of a number while it is decided which numbers are dropped
AUTOCAST = 0.8  # upper bound of kept bytes relative to float32: norms and attention stay in float32 on CPU


def trainer_memory(
    config: RunConfig,
    arch: Architecture,
    reference: Architecture | None,
    critic: Architecture | None = None,
    longest: int = 0,
    turns: bool = False,
) -> list[Held]:
    """Memory of the trainer, with the models that are known and of their own. turns: it shares its device by turns."""
    own, asked, smaller = 4 * parameters(arch) * trained_models(config), config.reference, "a smaller model"
    lora = config.trainer.lora if isinstance(config.trainer, TrainerSettings) else None
    sizes = trained_sizes(config, arch)
    trained = 4 * sum(sizes)
    if lora is not None and begins_as(asked, None, str) is None:
        reference = None  # it is the policy without its adapter
    if not isinstance(config.trainer, TrainerSettings):
        return [Held("weights; the rest is not known", own, smaller)]
    mine = TRAINER if turns else ""
    lighter = smaller if lora is None else "a lower trainer.lora.rank"
    narrowed = 0 if lora is None else quantised(arch, lora.base_dtype)
    own -= 4 * wide_matrices(arch) if narrowed else 0
    held = [Held("weights", own + (trained if lora else 0), smaller), Held("gradients", trained, lighter, turn=mine)]
    held += [Held("quantised weights", narrowed, smaller)] * bool(narrowed)
    held += _moments(sizes, config.trainer, turns)
    moves = 0
    if asked is not None and reference is not None and not config.placement.reference_engines:
        held.append(Held("reference", 4 * parameters(reference), "a smaller algorithm.reference.model"))
        moves = 4 * parameters(reference) if asked.every else 0
    size = 0
    if critic is not None:
        size, more = _of_critic(critic, config.trainer, turns)
        held += more
        moves += 3 * size
    held.append(Held("copy while a checkpoint is written", 3 * trained + moves, smaller, host=True, divided=True))
    held += _sent(config, arch, trained + size)
    settings = config.trainer
    plan, budget = plan_of(config, arch), settings.micro_batch_tokens
    every = plan.most_rows * plan.context
    fills = prepares_sizes(device_of(settings.device), settings.dtype == "bfloat16")  # as in `Compute.pack`
    tokens = max(longest, min(filled(every, budget) if fills else every, budget))
    lanes = max(map(trainer_lanes, [plan, *([warm_up_plan(config)] if config.warmup.accuracy else [])]))
    each_policy = [settings.model_copy(update={"lora": own}) for own in config.adapters.values()] or [settings]
    alive = max(activations(arch, own, tokens, lanes) for own in each_policy)  # one policy follows the other
    alive += activations(critic, settings, tokens, lanes) if critic is not None else 0
    alive = max(alive, _part_of_moments(arch, settings))  # one follows the other
    checkpointing = "" if settings.checkpointing else ", or trainer.checkpointing = true"
    lever = f"a lower trainer.micro_batch_tokens (now {budget:,}){checkpointing}: no result depends on it"
    if longest > budget:  # the row is a micro-batch by itself: a smaller budget splits no row
        shorter = "shorter rows" if config.offline else f"a lower rollout.max_tokens (now {config.rollout.max_tokens:,})"
        lever = shorter + checkpointing
    held.append(Held(f"activations of at most {tokens:,} tokens", alive, lever, turn=mine))
    return per_rank(held, settings, [arch, *([] if critic is None else [replace(critic, tied=True)])])


def _of_critic(critic: Architecture, settings: TrainerSettings, turns: bool) -> tuple[int, list[Held]]:
    """(bytes of its trained weights, memory) of a critic with a model of its own, without its head, which is one row."""
    critic, lora, lever = replace(critic, tied=True), settings.lora, "algorithm.critic.model = 'policy'"  # no other head
    sizes = tensor_sizes(critic, lora and lora.config)
    trained, own = 4 * sum(sizes), 4 * parameters(critic)
    narrowed = 0 if lora is None else quantised(critic, lora.base_dtype)
    own += (trained if lora else 0) - (4 * wide_matrices(critic) if narrowed else 0)
    held = [Held("critic", own, lever), Held("gradients of the critic", trained, lever, turn=TRAINER if turns else "")]
    held += [Held("quantised weights of the critic", narrowed, lever)] * bool(narrowed)
    return trained, [*held, *_moments(sizes, settings, turns, " of the critic")]


def _sent(config: RunConfig, arch: Architecture, trained: int) -> list[Held]:
    """Memory of sums over replicas and of publications. trained: bytes of the weights that are trained."""
    held, settings = list[Held](), config.trainer
    if isinstance(settings, TrainerSettings) and settings.reduce != "float32":
        lever = "trainer.reduce = 'float32'"
        held.append(Held("errors of sums over replicas", trained, lever))
        held.append(Held("copy of these errors for a checkpoint", trained, lever, host=True))
    size = parameters(arch) * ITEM[settings.serving_dtype] * trained_models(config)
    if config.adapter_rank and not config.warmup.accuracy:  # which sends whole weights
        size = 4 * sum(trained_sizes(config, arch))
    if config.placement.sync.kind_name == "shared_memory":
        lever = "trainer.serving_dtype = 'bfloat16'" if settings.serving_dtype == "float32" else ""
        held.append(Held("two versions on their way to engines", 2 * size, lever, host=True, divided=True))
    if config.placement.sync.every_full > 1:
        lever = "placement.sync.full_every = 1"
        held.append(Held("copy of the version that was sent last", size, lever, host=True, divided=True))
    return held


def _moments(sizes: Sequence[int], settings: TrainerSettings, turns: bool, of: str = "") -> list[Held]:
    """The moments of trained tensors of these sizes, where they lie, and what a step of them takes."""
    eight, away = settings.moments == "int8", device_of(settings.device) != "cpu"
    size = sum(8 * n if n < SMALL or not eight else 2 * -(-n // BLOCK) * (BLOCK + 4) for n in sizes)
    host = away and settings.moments_on == "host"
    lever = " or ".join(
        [*([] if eight else ["trainer.moments = 'int8'"]), *(["trainer.moments_on = 'host'"] if away and not host else [])]
    )
    held = [Held(f"two moments{of}", size, lever or "a smaller model", host=host, turn=TRAINER if turns and away else "")]
    if turns and away and not host:
        held.append(Held(f"moments{of} in the engines' turn", size, lever, host=True))
    return held


def _part_of_moments(arch: Architecture, settings: TrainerSettings) -> int:
    """Bytes of the numbers that are stepped at a time, where this is not done where the moments are held."""
    apart = settings.moments_on == "host" and device_of(settings.device) != "cpu"
    each = DECODED if settings.moments == "int8" else 8 if apart else 0
    return each * min(PIECE, max(tensor_sizes(arch, settings.lora and settings.lora.config)))


def quantised(arch: Architecture, kind: str) -> int:
    """Bytes of the layers' matrices as a base of this kind holds them; 0 for "float32"."""
    return int(BYTES.get(kind, 0) * wide_matrices(arch))


def trained_sizes(config: RunConfig, arch: Architecture) -> tuple[int, ...]:
    """The numbers of each weight that is trained of the policy, or of all policies."""
    each = config.adapters.values()
    if not each:
        return tensor_sizes(arch) * trained_models(config)
    return tuple(size for own in each for size in tensor_sizes(arch, own.config))


def trained_models(config: RunConfig) -> int:
    """Models that a trainer holds: one under all adapters, or one for each policy."""
    return 1 if config.adapters else len(config.trained_policies)


@lru_cache(maxsize=16)
def tensor_sizes(arch: Architecture, lora: AdapterConfig | None = None) -> tuple[int, ...]:
    """The numbers of each trained weight of a model: of its adapter, if only that is trained."""
    decoder = empty_decoder(arch, device="meta")
    if lora is not None:
        attach(decoder, lora)
    return tuple(weight.numel() for weight in decoder.parameters() if weight.requires_grad)


@lru_cache(maxsize=16)
def adapter_rank_sum(arch: Architecture, lora: AdapterConfig) -> int:
    """The sum of the ranks of all matrices' adapters: numbers between A and B for each token."""
    decoder = empty_decoder(arch, device="meta")
    attach(decoder, lora)
    return sum(a.shape[0] for _, adapter in adapters(decoder) for a in adapter.a)


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
    adapted = 0  # of an adapter, whose products keep what they read
    if settings.lora is not None:
        adapted = 2 * arch.hidden + arch.intermediate
    if on_cpu and native() is not None and Native.trains(torch.float32, arch.head_dim):
        narrow = 2 * (q + kv + arch.intermediate) + adapted  # outputs of products and of attention
        layer, share = 2 * arch.hidden + q + kv + arch.heads + narrow * (0.5 if narrows else 1), 1.0
    else:
        layer = 4 * (arch.hidden + arch.intermediate) + 7 * q + 9 * kv + (q + kv) * arch.qk_norm + 8 + adapted
        share = AUTOCAST if narrows else 1.0
    if settings.lora is not None:
        layer += adapter_rank_sum(arch, settings.lora.config) / arch.layers  # the results between A and B
    copies = 2 * parameters(arch) if narrows else 0
    if narrows and on_cpu and pairs_are_ours():
        copies *= 2  # one for the forward products, one for the backward ones
    elif narrows and on_cpu and floats_are_quicker():
        copies = 8 * lanes * max(n * k for n, k in matrices(arch)[:-1])  # one matrix at a time: widened, and its gradient
    if settings.lora is not None and settings.lora.base_dtype != "float32":  # one matrix at a time
        copies = DEQUANTISED * lanes * max(n * k for n, k in matrices(arch)[:-1])
    if settings.lora is not None and settings.lora.config.dropout:  # one product at a time reads a copy of its input
        read = tokens * max(arch.hidden, q, arch.intermediate)
        copies += 4 * read + MASKED * min(read, lanes * PIECE_OF_MASKS)
    again = sum(recomputed(each, settings.checkpointing) for each in range(arch.layers))
    kept = (arch.layers - again + bool(again)) * layer + again * arch.hidden  # one layer at a time is computed again
    logits = 3 * 4 * min(tokens, lanes * chunk_rows(arch.vocab, device_of(settings.device))) * arch.vocab
    return int(4 * share * tokens * (kept + 4 * arch.hidden)) + copies + logits
