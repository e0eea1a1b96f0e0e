"""A step whose rows have the same bits in any batch: `batch_invariant = true`.

A row's bits depend only on its own tokens and the weights. A kernel chooses its order of summation by the shape of its
input, so here every shape is fixed: a step is cut into blocks of BLOCK tokens (the last one is padded), and decoder, head
and sampler only ever see whole blocks. Only a row's place in its block and the other rows there can vary. The kernels do
not depend on either, which `check_machine` verifies. (The bits are those of one machine, one number of threads and one
page size.)

Attention has one path: each token, decoding or of a prompt, is a row with one query that walks over its keys in tiles of
fixed shape that begin at fixed positions. A tile without keys for a row changes nothing: its weights are exactly 0, so a row
may walk as far as the longest of its block does.

A step's tokens are computed in order of position, block after block. A token reads only keys before it, so all that it reads
is already written, in whichever sequence's page. This order also brings rows of similar length together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tidemill.core.errors import ConfigError
from tidemill.core.types import MOST_TOP_LOGPROBS
from tidemill.engine.native.paged_attention import PagedCache
from tidemill.engine.native.runner import Output, Probe, Probed
from tidemill.engine.native.sampler import RowParams, Sampled, alternatives, sample
from tidemill.engine.native.staged_weights import Weights
from tidemill.engine.native.step_plan import Plan
from tidemill.models.decoder import Attend, Decoder, RMSNorm

BLOCK = 32  # rows: a multiple of the widest unrolled vector loop, whose remainder would be computed by another formula
TILE = 64  # keys of a tile, at least
PROMPT = -(-2 * TILE // BLOCK) * BLOCK  # tokens of the check: more than one tile, whole blocks
ALIGN = 16  # floats of a cache line: operands of a batch of products begin at one, or they would round differently
T = TypeVar("T")
LOWEST = -1e30  # start of a running maximum: below every score, and finite, so that LOWEST - LOWEST is 0


@dataclass(slots=True)
class Rows:
    """BLOCK tokens, in order of position; all arrays [BLOCK] int64."""

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray  # row of the table with the pages of its keys
    writes: np.ndarray  # place of its own key and value


@dataclass(slots=True)
class Tile:
    """One stretch of positions, shared by every row of a block."""

    index: Tensor  # [BLOCK * K * pages of a tile] int64 into [pages * K]
    mask: Tensor  # [BLOCK, 1, T] float32, added to the scores


@torch.inference_mode()
def run_invariant(
    weights: Weights, cache: PagedCache, plan: Plan, table: np.ndarray, ask: RowParams, top: int, probes: list[Probe]
) -> Output:
    """Run one step: see `runner.run`."""
    hidden = _hidden(weights, cache, plan, table)
    cache.copy(plan.copies)
    sampled, top_ids, top_logprobs = _sample(hidden[plan.sample_rows], weights.head, ask, top)
    probed = [_probe(hidden[p.first : p.last], weights.head, p) for p in probes]
    return Output(sampled, top_ids, top_logprobs, probed)


def _hidden(weights: Weights, cache: PagedCache, plan: Plan, table: np.ndarray) -> Tensor:
    """Hidden states [N, D] in the plan's order."""
    slots = np.concatenate([plan.singles, *(np.full(c.count, c.slot) for c in plan.chunks)])
    # Two rows at one position: the one whose write is discarded reads the other's write, so it comes second.
    order = np.lexsort((plan.writes < cache.page_size, plan.positions))
    parts = []
    for picked, _ in _blocks(order):
        rows = Rows(plan.tokens[picked], plan.positions[picked], slots[picked], plan.writes[picked])
        parts.append(compute(weights, cache, rows, table))
    hidden = torch.empty(len(order), parts[0].shape[1])
    hidden[torch.from_numpy(order)] = torch.cat(parts)[: len(order)]
    return hidden


def _blocks(rows: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """Blocks [BLOCK] of `rows`, each with the number of rows that count.

    The last block is padded with its last row, which writes the same values.
    """
    for at in range(0, len(rows), BLOCK):
        yield _filled(rows[at : at + BLOCK]), min(BLOCK, len(rows) - at)


def _filled(rows: np.ndarray) -> np.ndarray:
    return rows[np.minimum(np.arange(BLOCK), len(rows) - 1)]


def compute(weights: Weights, cache: PagedCache, rows: Rows, table: np.ndarray) -> Tensor:
    """Hidden states [BLOCK, D] of one block; its keys and values are in the cache afterwards."""
    tokens, positions = torch.from_numpy(rows.tokens), torch.from_numpy(rows.positions)
    return weights.decoder(tokens, positions, _attend(cache, rows, table))


def _attend(cache: PagedCache, rows: Rows, table: np.ndarray) -> Attend:
    writes = cache.write_index(rows.writes)
    tiles = {window: _tiles(cache, rows, table, window) for window in set(cache.windows)}
    heads, size = cache.arch.kv_heads, cache.arch.head_dim
    group = cache.arch.heads // heads
    whole = math.lcm(size, ALIGN) // size  # this many heads fill whole cache lines
    padded = -(-group // whole) * whole

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.write(layer, writes, k, v)
        query = q.new_zeros(BLOCK * heads, padded, size)
        query[:, :group] = q.reshape(BLOCK * heads, group, size) * size**-0.5
        seen = _walk(cache, layer, query, tiles[cache.windows[layer]])
        return seen[:, :group].reshape(q.shape)

    return attend


def _walk(cache: PagedCache, layer: int, query: Tensor, tiles: list[Tile]) -> Tensor:
    """Attention of scaled queries [BLOCK * K, G, E] over the tiles (online softmax, 1805.02867)."""
    n, group, size = query.shape
    best = query.new_full((n, group, 1), LOWEST)
    total, out = query.new_zeros(n, group, 1), torch.zeros_like(query)
    for tile in tiles:
        kv = cache.gather(layer, tile.index).view(n, -1, 2 * size)
        scores = torch.bmm(query, kv[..., :size].transpose(1, 2))  # [BLOCK * K, G, T]
        scores.view(BLOCK, -1, scores.shape[-1]).add_(tile.mask)
        higher = torch.maximum(best, scores.amax(dim=-1, keepdim=True))
        scores.sub_(higher).exp_()
        shrink = best.sub_(higher).exp_()
        total.mul_(shrink).add_(scores.sum(dim=-1, keepdim=True))
        out.mul_(shrink).add_(torch.bmm(scores, kv[..., size:]))
        best = higher
    return out.div_(total)


def _tiles(cache: PagedCache, rows: Rows, table: np.ndarray, window: int | None) -> list[Tile]:
    """Tiles from the first position that any row of the block sees to the last."""
    unit = math.lcm(cache.page_size, ALIGN)
    length = -(-TILE // unit) * unit  # whole pages, whole cache lines
    low = np.maximum(rows.positions + 1 - (window or math.inf), 0)  # [BLOCK] first position that each row sees
    tiles = []
    for tile in range(int(low.min()) // length, int(rows.positions.max()) // length + 1):
        key = tile * length + np.arange(length)
        seen = (key <= rows.positions[:, None]) & (key >= low[:, None])
        mask = np.where(seen, np.float32(0), np.float32(-np.inf))[:, None]
        begins = np.full(BLOCK, tile * length // cache.page_size)
        index = cache.page_index(table, rows.slots, begins, length // cache.page_size)
        tiles.append(Tile(index, cache.tensor(mask)))
    return tiles


def _logits(hidden: Tensor, head: Tensor) -> Iterator[tuple[Tensor, np.ndarray]]:
    """Logits [BLOCK, V] of each block, with the rows of `hidden` [n, D] that they belong to."""
    for picked, count in _blocks(np.arange(len(hidden))):
        yield F.linear(hidden[torch.from_numpy(picked)], head), picked[:count]


def _sample(hidden: Tensor, head: Tensor, ask: RowParams, top: int) -> tuple[Sampled, np.ndarray | None, np.ndarray | None]:
    """Samples for `hidden` [S, D], and alternatives [S, k] if `top` is not 0."""
    count = len(hidden)
    most = min(MOST_TOP_LOGPROBS, head.shape[0]) if top else 0  # a fixed number: the requests ask for different ones
    result = Sampled(np.empty(count, np.int64), np.empty(count, np.float32), np.empty(count, np.float32))
    ids, logprobs = np.empty((count, most), np.int32), np.empty((count, most), np.float32)
    for logits, rows in _logits(hidden, head):
        _sample_block(logits, ask, rows, result)
        if top:
            found = alternatives(torch.log_softmax(logits, dim=-1), most)
            ids[rows], logprobs[rows] = found[0][: len(rows)], found[1][: len(rows)]
    return result, ids if top else None, logprobs if top else None


def _sample_block(logits: Tensor, ask: RowParams, rows: np.ndarray, into: Sampled) -> None:
    """Sample a block: rows with truncation, adjustments or masks one by one, all others together.

    The truncation's search width depends on the rows that it is given.
    """
    own = ask.truncated[rows] | np.isin(rows, [*ask.adjustments, *ask.masks])
    if not own.all():
        plain = replace(_take(ask, _filled(rows)), adjustments={}, masks={})
        plain.top_p[:], plain.top_k[:], plain.min_p[:] = 1.0, 0, 0.0
        _merge(into, sample(logits, plain), np.flatnonzero(~own), rows)
    for i in np.flatnonzero(own).tolist():
        one = sample(logits[i : i + 1].clone(), _take(ask, rows[i : i + 1]))
        _merge(into, one, np.zeros(1, np.int64), rows[i : i + 1])


def _take(ask: RowParams, rows: np.ndarray) -> RowParams:
    def own(of: dict[int, T]) -> dict[int, T]:
        return {i: of[row] for i, row in enumerate(rows.tolist()) if row in of}

    by_row = ("adjustments", "masks")
    arrays = {field.name: getattr(ask, field.name)[rows] for field in fields(ask) if field.name not in by_row}
    return RowParams(**arrays, adjustments=own(ask.adjustments), masks=own(ask.masks))


def _merge(into: Sampled, part: Sampled, picked: np.ndarray, rows: np.ndarray) -> None:
    """Copy rows `picked` of `part` to rows `rows[picked]` of the whole."""
    into.tokens[rows[picked]] = part.tokens[picked]
    into.logprobs[rows[picked]] = part.logprobs[picked]
    into.model_logprobs[rows[picked]] = part.model_logprobs[picked]
    into.supports.update({int(rows[i]): ids for i, ids in part.supports.items()})


def _probe(hidden: Tensor, head: Tensor, probe: Probe) -> Probed:
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for logits, rows in _logits(hidden, head):
        logprobs = torch.log_softmax(logits / probe.temperature, dim=-1)[: len(rows)]
        chosen = logprobs.gather(1, torch.from_numpy(probe.targets[rows])[:, None]).squeeze(1).numpy()
        parts.append((chosen, *alternatives(logprobs, probe.top_k)))
    return Probed(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def expect_cpu(device: str) -> None:
    """Raise ConfigError for another device than a CPU."""
    if device != "cpu":
        raise ConfigError(
            f"engine.batch_invariant with device='auto', which is {device!r} here: it is for float32 on the CPU; "
            "set engine.device='cpu', or turn batch_invariant off"
        )


@torch.inference_mode()
def check_machine(weights: Weights, page_size: int) -> None:
    """Raise ConfigError if a row's bits depend on its place or on the other rows of a block.

    No library promises that they do not. It mostly depends on the number of threads: with three of them a vector loop may be
    cut in the middle of a row, and its remainder is computed by another formula. So an engine checks before it serves, with
    its own weights: a sequence is computed in order, then its last block again in other orders and among other rows. Inputs
    and outputs of every module are compared, because a difference in the last place may be rounded away before the end.
    """
    pages = -(-PROMPT // page_size)
    cache = PagedCache(weights.decoder.arch, pages + 1, page_size, torch.float32, torch.device("cpu"))
    table = np.arange(1, pages + 1)[None]

    def values(positions: np.ndarray) -> list[Tensor]:
        rows = Rows(positions * 7919 % len(weights.head), positions, np.zeros_like(positions), positions + page_size)
        with _watched(weights.decoder) as seen:
            logits = F.linear(compute(weights, cache, rows, table), weights.head)
        logprobs = torch.log_softmax(logits, dim=-1)
        return [*seen, logits, logprobs, logprobs.exp()]

    for begin in range(0, PROMPT - BLOCK, BLOCK):
        values(np.arange(begin, begin + BLOCK))
    block = np.arange(PROMPT - BLOCK, PROMPT)
    expected = values(block)
    every, odd = np.arange(BLOCK), np.arange(1, BLOCK, 2)
    for order in (*(np.roll(every, by) for by in (1, 2, BLOCK // 2)), every[::-1].copy()):
        company = block[order]
        company[::2] -= block[0]
        for positions, rows in ((block[order], every), (company, odd)):
            found = values(positions)
            if not all(_equal(f[rows], e[order[rows]]) for f, e in zip(found, expected, strict=True)):
                raise ConfigError(
                    f"engine.batch_invariant: on this machine, with {torch.get_num_threads()} threads, a row's bits depend "
                    "on the rows beside it; give the engine one thread (placement.engine_threads=1) or turn it off"
                )


@contextmanager
def _watched(decoder: Decoder) -> Iterator[list[Tensor]]:
    """Collect the inputs and outputs of the decoder's norms and projections, all [BLOCK, ...]."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        seen.extend((given[0], result))

    hooks = [m.register_forward_hook(keep) for m in decoder.modules() if isinstance(m, nn.Linear | RMSNorm)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _equal(a: Tensor, b: Tensor) -> bool:
    """True when two tensors are equal bit for bit, NaNs included."""
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))
