"""A step whose rows' bits depend on nothing but their own tokens and the weights: `batch_invariant = true`.

A kernel chooses its order of summation by the shape it is given. So here every shape is fixed: a step is cut into blocks of
BLOCK tokens (the last one is filled up), and decoder, head and sampler only ever see whole blocks. What is left to vary is a
row's place in its block and its company there. The kernels do not mind either; `invariance_check` looks whether that is so.
(The bits are those of one machine, one number of threads and one page size.)

Attention has one path: each token, decoding or of a prompt, is a row with one query that walks over its keys in tiles of
fixed shape that begin at fixed positions. A tile that holds nothing for a row changes nothing: its weights are exactly 0, so
a row may walk as far as the longest of its block does.

A step's tokens are computed in order of position, block after block. A token reads what lies before it only, so whatever it
reads is written by then, in whichever sequence's page. It also brings rows of like length together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.core.types import MOST_TOP_LOGPROBS
from tidemill.engine.native.paged_attention import PagedCache
from tidemill.engine.native.runner import Output, Probe, Probed
from tidemill.engine.native.sampler import RowParams, Sampled, alternatives, sample
from tidemill.engine.native.scheduler import Plan
from tidemill.engine.native.staged_weights import Weights
from tidemill.models.decoder import Attend

BLOCK = 32  # rows: a multiple of the widest unrolled vector loop, whose remainder would be computed by another formula
TILE = 64  # keys, at least
ALIGN = 16  # floats of a cache line: within a batch of products every operand begins at one, else they round differently
LOWEST = -1e30  # where a running maximum begins: below every score, and finite, so that LOWEST - LOWEST is 0


@dataclass(slots=True)
class Rows:
    """BLOCK tokens, in order of position; all arrays [BLOCK] int64."""

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray  # whose row of the table says where its keys are
    writes: np.ndarray  # where its own key and value go


@dataclass(slots=True)
class Tile:
    """The same stretch of positions for every row of a block."""

    index: Tensor  # [BLOCK * K * pages of a tile] int64 into [pages * K]
    mask: Tensor  # [BLOCK, 1, T] float32, added to the scores


@torch.inference_mode()
def run_invariant(
    weights: Weights, cache: PagedCache, plan: Plan, table: np.ndarray, ask: RowParams, top: int, probes: list[Probe]
) -> Output:
    """One step, as `runner.run` does it."""
    hidden = _hidden(weights, cache, plan, table)
    cache.copy(plan.copies)
    sampled, top_ids, top_logprobs = _sample(hidden[plan.sample_rows], weights.head, ask, top)
    probed = [_probe(hidden[p.first : p.last], weights.head, p) for p in probes]
    return Output(sampled, top_ids, top_logprobs, probed)


def _hidden(weights: Weights, cache: PagedCache, plan: Plan, table: np.ndarray) -> Tensor:
    """[N, D] in the plan's order."""
    slots = np.concatenate([plan.singles, *(np.full(c.count, c.slot) for c in plan.chunks)])
    # Of two rows at one position the one whose write is discarded reads what the other writes: it comes second.
    order = np.lexsort((plan.writes < cache.page_size, plan.positions))
    parts = []
    for picked, _ in _blocks(order):
        rows = Rows(plan.tokens[picked], plan.positions[picked], slots[picked], plan.writes[picked])
        parts.append(compute(weights, cache, rows, table))
    hidden = torch.empty(len(order), parts[0].shape[1])
    hidden[torch.from_numpy(order)] = torch.cat(parts)[: len(order)]
    return hidden


def _blocks(rows: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """([BLOCK] of `rows`, how many of them count): the last block is filled up with its last row, which writes the same."""
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
    whole = math.lcm(size, ALIGN) // size  # so many heads fill whole cache lines
    padded = -(-group // whole) * whole

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.write(layer, writes, k, v)
        query = q.new_zeros(BLOCK * heads, padded, size)
        query[:, :group] = q.reshape(BLOCK * heads, group, size) * size**-0.5
        seen = _walk(cache, layer, query, tiles[cache.windows[layer]])
        return seen[:, :group].reshape(q.shape)

    return attend


def _walk(cache: PagedCache, layer: int, query: Tensor, tiles: list[Tile]) -> Tensor:
    """Attention of query [BLOCK * K, G, E], scaled, over the tiles (the online softmax of 1805.02867)."""
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
    """From the first position that any row of the block sees to the last."""
    unit = math.lcm(cache.page_size, ALIGN)
    length = -(-TILE // unit) * unit  # whole pages, whole cache lines
    low = np.maximum(rows.positions + 1 - (window or math.inf), 0)  # [BLOCK] the first position that each row sees
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
    """(logits [BLOCK, V], which rows of `hidden` [n, D] they are of): the last block is filled up, its rows are fewer."""
    for picked, count in _blocks(np.arange(len(hidden))):
        yield F.linear(hidden[torch.from_numpy(picked)], head), picked[:count]


def _sample(hidden: Tensor, head: Tensor, ask: RowParams, top: int) -> tuple[Sampled, np.ndarray | None, np.ndarray | None]:
    """What was sampled for `hidden` [S, D], and alternatives [S, k] when `top` is not 0."""
    count = len(hidden)
    most = min(MOST_TOP_LOGPROBS, head.shape[0]) if top else 0  # not as many as are asked for: others ask for other numbers
    result = Sampled(np.empty(count, np.int64), np.empty(count, np.float32), np.empty(count, np.float32))
    ids, logprobs = np.empty((count, most), np.int32), np.empty((count, most), np.float32)
    for logits, rows in _logits(hidden, head):
        _sample_block(logits, ask, rows, result)
        if top:
            found = alternatives(torch.log_softmax(logits, dim=-1), most)
            ids[rows], logprobs[rows] = found[0][: len(rows)], found[1][: len(rows)]
    return result, ids if top else None, logprobs if top else None


def _sample_block(logits: Tensor, ask: RowParams, rows: np.ndarray, into: Sampled) -> None:
    """Rows with a way of their own one by one, the others as one block: how far truncation looks depends on who is looked
    at."""
    own = ask.truncated[rows] | np.isin(rows, list(ask.adjustments))
    if not own.all():
        plain = replace(_take(ask, _filled(rows)), adjustments={})
        plain.top_p[:], plain.top_k[:], plain.min_p[:] = 1.0, 0, 0.0
        _merge(into, sample(logits, plain), np.flatnonzero(~own), rows)
    for i in np.flatnonzero(own).tolist():
        one = sample(logits[i : i + 1].clone(), _take(ask, rows[i : i + 1]))
        _merge(into, one, np.zeros(1, np.int64), rows[i : i + 1])


def _take(ask: RowParams, rows: np.ndarray) -> RowParams:
    arrays = {field.name: getattr(ask, field.name)[rows] for field in fields(ask) if field.name != "adjustments"}
    adjustments = {i: ask.adjustments[row] for i, row in enumerate(rows.tolist()) if row in ask.adjustments}
    return RowParams(**arrays, adjustments=adjustments)


def _merge(into: Sampled, part: Sampled, picked: np.ndarray, rows: np.ndarray) -> None:
    """Rows `picked` of `part` are rows `rows[picked]` of the whole."""
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
