"""The paged KV cache, and attention over it for decoding rows and chunks of prompts.

Layout: [layers, pages, K, page_size, 2E], a token's key and value side by side. One `index_select` of pages by block table
then yields [rows * K, T, 2E], whose halves are the operands of two batched matrix products without another copy.
A compiled kernel reads the pages where they lie (`kernels`; on a CUDA device through `cuda`). On the CPU pages that several
rows begin with, siblings or tokens of one chunk, are read once for all of them. Another kernel attends to chunks that begin
a sequence, whose keys and values are all of this step. Without a kernel, rows are gathered a block at a time, decoding ones
and chunks each sorted by length. A block is padded to its longest row only, and small enough to stay in the processor's
cache until it is read. Decode attention is computed in float32 whatever the pages hold.

In steps with chunks, every layer writes the step's keys and values before it reads any, or the chunks are computed first. So
rows may share pages that this very step fills.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.engine.native.kv_blocks import NULL_PAGE
from tidemill.engine.native.sampler import RowParams, Sampled
from tidemill.engine.native.staged_weights import Weights
from tidemill.engine.native.step_plan import Chunk, Plan
from tidemill.models.architecture import Architecture
from tidemill.models.decoder import Attend, Decoder
from tidemill.models.kernels.cpu.bindings import Native
from tidemill.models.kernels.cpu.decode_pass import DecodingRows, DecodingWeights, parts_of
from tidemill.models.kernels.cpu.packed_sequences import Families
from tidemill.models.kernels.cpu.thread_thresholds import whole_pass
from tidemill.models.kernels.library import native

GATHER_BYTES = {
    "cpu": 4 << 20,
    "cuda": 256 << 20,
}  # bytes of keys and values in one block of rows, unless one row has more
QUERY_BLOCK = 512  # queries of a chunk attended at once, to bound the mask and to skip causally hidden keys
MOST_PAIRS = 16 * QUERY_BLOCK**2  # pairs of a query and a key in chunks that are attended together
PADDING = 1.25  # chunks are attended together if that computes at most this much more than one by one


@dataclass(slots=True)
class DecodeBlock:
    """Rows [first, last) of the step, one query each, padded to T tokens."""

    first: int
    last: int
    length: int  # T
    index: Tensor  # [rows * K * T / page_size] int64 into [pages * K]
    mask: Tensor  # [rows, 1, T] float32, added to the scores


@dataclass(slots=True)
class ChunkBlock:
    """Several chunks (or pieces of them), padded to C queries and T keys."""

    queries: Tensor  # [rows, C] int64 into the step's flat row; padding repeats the last query
    flat: Tensor  # [tokens] int64: indices of the rows * C that are not padding
    targets: Tensor  # [tokens] int64: their places in the step's flat row
    index: Tensor  # [rows * K * T / page_size] int64 into [pages * K]
    mask: Tensor  # [rows, 1, C, T] bool: may be seen


class PagedCache:
    """The KV pages of all layers, and the attention over them."""

    ahead = False  # True if a step can run before the previous step's tokens are read

    def __init__(self, arch: Architecture, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.arch, self.pages, self.page_size, self.device = arch, pages, page_size, device
        self.windows = arch.windows or (None,) * arch.layers
        shape = (arch.layers, pages, arch.kv_heads, page_size, 2 * arch.head_dim)
        self.kv = _zeros(shape, dtype, device)
        width = 2 * arch.head_dim
        self._by_page = self.kv.view(arch.layers, pages * arch.kv_heads, page_size * width)
        self._by_token = self.kv.view(arch.layers, pages * arch.kv_heads * page_size, width)
        self._row_bytes = arch.kv_heads * width * 4
        self._native = _native(arch, page_size, dtype, device)
        self._room = torch.empty(0, dtype=torch.uint8)  # scratch memory of `Native.decode`
        self._angles = (torch.empty(0), torch.empty(0))  # cos and sin of the first positions
        self._gathered = torch.empty(0, dtype=dtype, device=device)
        self._wide = torch.empty(0, dtype=torch.float32, device=device)

    def hidden(self, weights: Weights, plan: Plan, table: np.ndarray, wanted: np.ndarray) -> Tensor:
        """Hidden states [P, D] of the `wanted` [P] tokens among the step's N tokens.

        All N keys and values are in the cache afterwards. `table` as for `attend`. The next call may overwrite the result.
        """
        layers, count = weights.decoding, len(plan.singles)
        if self._native is not None and layers is not None and whole_pass(count, layers.largest):
            if not plan.chunks:
                return self._decoded(self._native, layers, weights.decoder, plan, table, wanted, torch.get_num_threads())
            if count:
                return self._apart(weights, plan, table, wanted)
        if weights.adapters is not None:
            weights.adapters.begin(plan.policies, wanted, self.tensor)
        tokens = torch.from_numpy(plan.tokens).to(self.device)
        positions = torch.from_numpy(plan.positions).to(self.device)
        return weights.decoder(tokens, positions, self.attend(plan, table), self.chosen(wanted, len(tokens)))

    def _apart(self, weights: Weights, plan: Plan, table: np.ndarray, wanted: np.ndarray) -> Tensor:
        """Hidden states of a mixed step, computed chunks first.

        Decoding rows may share pages that the chunks fill, and no row reads what decoding rows write.
        """
        count = len(plan.singles)
        chunks = [replace(chunk, row=chunk.row - count) for chunk in plan.chunks]
        none = plan.singles[:0]
        of_chunks = wanted >= count
        begin = _part(plan, slice(count, None), singles=none, lengths=none, chunks=chunks)
        begun = self.hidden(weights, begin, table, wanted[of_chunks] - count)
        decoded = self.hidden(weights, _part(plan, slice(count), chunks=[]), table, wanted[~of_chunks])
        out = torch.empty((len(wanted), decoded.shape[1]), dtype=decoded.dtype)
        out[self.tensor(of_chunks)], out[self.tensor(~of_chunks)] = begun, decoded
        return out

    def sampling(self, logits: Tensor, ask: RowParams) -> Callable[[], Sampled]:
        """Sample as `sample` does, for rows without truncation, if `ahead`.

        Calling the returned function waits for the tokens; the next step does not.
        """
        raise NotImplementedError

    def chosen(self, wanted: np.ndarray, count: int) -> Tensor | None:
        """Indices of the wanted tokens among `count`; None if they are all, in order."""
        return None if np.array_equal(wanted, np.arange(count)) else self.tensor(wanted)

    def _decoded(
        self,
        compiled: Native,
        layers: DecodingWeights,
        decoder: Decoder,
        plan: Plan,
        table: np.ndarray,
        wanted: np.ndarray,
        threads: int,
    ) -> Tensor:
        """Hidden states of a step in which every row decodes: each thread takes rows through all layers.

        No thread reads what another writes: of the pages that a step fills, only those of chunks are shared within it
        (`Scheduler._compute`), and the rows of a draft stay in one thread.
        """
        order = siblings_together(table[plan.singles, 0])
        if len(self._angles[0]) <= (furthest := int(plan.positions.max())):
            self._angles = decoder.rope(torch.arange(max(1024, 2 * furthest)), layers.dtype)
        given = plan.tokens, plan.positions, plan.singles, plan.lengths, plan.writes
        tokens, positions, slots, ends, writes = (values[order] for values in given)
        if self._room.nbytes < (needed := compiled.decoding_room(layers, parts_of(slots, threads))):
            self._room = torch.empty(needed, dtype=torch.uint8)
        of_layers, at = self._lows(ends), (tokens, positions, order, self._angles, self.kv, table, slots)
        out = compiled.decode(layers, DecodingRows(*at, of_layers, ends, writes, self._room), threads)
        rows = self.chosen(wanted, len(out))
        return out if rows is None else out.index_select(0, rows)

    def attend(self, plan: Plan, table: np.ndarray) -> Attend:
        """The decoder's `attend` for one step. `table` [slots, pages of a sequence] is the scheduler's."""
        if self._native is not None:
            return self._attend_natively(self._native, plan, table)
        chunks = {w: self._chunk_blocks(plan.chunks, table, w) for w in set(self.windows)}
        writes = self.write_index(plan.writes)
        decode = {w: self._decode_blocks(plan, table, w) for w in set(self.windows)}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.write(layer, writes, k, v)
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            window = self.windows[layer]
            if decode[window]:
                scaled = q[: len(plan.singles)].float() * self.arch.head_dim**-0.5
                for block in decode[window]:
                    out[block.first : block.last] = self._decode(layer, scaled[block.first : block.last], block)
            for block in chunks[window]:
                self.attend_chunks(layer, q, block, out)
            return out

        return attend

    def _attend_natively(self, compiled: Native, plan: Plan, table: np.ndarray) -> Attend:
        begins = [(c.row, c.count) for c in plan.chunks if not c.start]
        families = Families.apart(begins, len(plan.tokens)) if begins else None
        rows, slots, ends = _one_by_one(plan)
        at = self.tensor(rows) if begins else slice(None)
        lows, order, threads = self._lows(ends), siblings_together(table[slots, 0]), torch.get_num_threads()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pages = self.kv[layer]
            compiled.write(pages, k, v, plan.writes)
            seen = compiled.attend(pages, q[at], table, slots, lows[layer], ends, order, threads)
            if families is None:
                return seen
            out, _ = compiled.see(q, k, v, families, self.windows[layer])
            out[at] = seen
            return out

        return attend

    def _lows(self, ends: np.ndarray) -> list[np.ndarray]:
        """For each layer, the first token that each row sees. ends: [n] tokens of the rows."""
        lows = {w: np.maximum(ends - w, 0) if w else np.zeros_like(ends) for w in set(self.windows)}
        return [lows[window] for window in self.windows]

    def write_index(self, writes: np.ndarray) -> Tensor:
        """[N * K] int64 into all heads' tokens, for `writes` [N] as a plan has them."""
        heads = np.arange(self.arch.kv_heads)
        pages, offsets = np.divmod(writes, self.page_size)
        return self.tensor(((pages[:, None] * len(heads) + heads) * self.page_size + offsets[:, None]).reshape(-1))

    def write(self, layer: int, index: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v [N, K, E] to the places of `write_index`."""
        self._by_token[layer].index_copy_(0, index, torch.cat((k, v), dim=-1).view(-1, 2 * self.arch.head_dim))

    def copy(self, copies: np.ndarray) -> None:
        """Copy pages in all layers. copies: [C, 2] (source, target) of a plan."""
        if len(copies):
            sources, targets = self.tensor(copies).unbind(1)
            self.kv.index_copy_(1, targets, self.kv.index_select(1, sources))

    def _decode(self, layer: int, q: Tensor, block: DecodeBlock) -> Tensor:
        """q [n, H, E] float32, scaled -> [n, H, E] float32."""
        n, size, heads = block.last - block.first, self.arch.head_dim, self.arch.kv_heads
        kv = self.gather(layer, block.index).view(n * heads, block.length, 2 * size)
        scores = torch.bmm(q.reshape(n * heads, -1, size), kv[..., :size].transpose(1, 2))  # [n * K, G, T]
        scores.view(n, -1, block.length).add_(block.mask)
        return torch.bmm(torch.softmax(scores, dim=-1), kv[..., size:]).view(q.shape)

    def gather(self, layer: int, index: Tensor) -> Tensor:
        """Pages by index, in float32, in scratch memory that the next call overwrites."""
        shape = (len(index), self._by_page.shape[-1])
        size = shape[0] * shape[1]
        if self._gathered.numel() < size:
            self._gathered = torch.empty(size, dtype=self.kv.dtype, device=self.device)
            self._wide = torch.empty(size if self.kv.dtype != torch.float32 else 0, device=self.device)
        gathered = torch.index_select(self._by_page[layer], 0, index, out=self._gathered[:size].view(shape))
        return gathered if self.kv.dtype == torch.float32 else self._wide[:size].view(shape).copy_(gathered)

    def attend_chunks(self, layer: int, q: Tensor, block: ChunkBlock, out: Tensor) -> None:
        """Attention of a block of chunks, written into `out`."""
        n, queries = block.queries.shape
        size, heads = self.arch.head_dim, self.arch.kv_heads
        kv = self._by_page[layer].index_select(0, block.index).view(n, heads, -1, 2 * size)
        padded = q[block.queries.view(-1)].view(n, queries, -1, size).transpose(1, 2)
        seen = F.scaled_dot_product_attention(
            padded, kv[..., :size], kv[..., size:], attn_mask=block.mask, enable_gqa=q.shape[1] != heads
        )
        out[block.targets] = seen.transpose(1, 2).reshape(n * queries, -1, size)[block.flat]

    def _decode_blocks(self, plan: Plan, table: np.ndarray, window: int | None) -> list[DecodeBlock]:
        blocks = []
        first, total, size = 0, len(plan.singles), self.page_size
        begins = _first_page(plan.lengths, window, size)
        counts = -(-plan.lengths // size) - begins  # pages each row reads; descending, except with windows
        while first < total:
            length = int(counts[first]) * size
            last = min(total, first + max(1, GATHER_BYTES[self.device.type] // (length * self._row_bytes)))
            pages = int(counts[first:last].max())
            slots, begin = plan.singles[first:last], begins[first:last]
            position = begin[:, None] * size + np.arange(pages * size)
            low = np.maximum(plan.lengths[first:last] - (window or math.inf), 0)[:, None]
            seen = (position < plan.lengths[first:last, None]) & (position >= low)
            mask = np.where(seen, np.float32(0), np.float32(-np.inf))[:, None]
            index = self.page_index(table, slots, begin, pages)
            blocks.append(DecodeBlock(first, last, pages * size, index, self.tensor(mask)))
            first = last
        return blocks

    def _chunk_blocks(self, chunks: Sequence[Chunk], table: np.ndarray, window: int | None) -> list[ChunkBlock]:
        """Blocks for `attend_chunks`, of layers with this window."""
        pieces = [
            Chunk(c.slot, c.start + at, min(QUERY_BLOCK, c.count - at), c.row + at)
            for c in chunks
            for at in range(0, c.count, QUERY_BLOCK)
        ]
        keys = GATHER_BYTES[self.device.type] // self._row_bytes
        return [self._chunk_block(group, table, window) for group in _group(pieces, keys)]

    def _chunk_block(self, group: list[Chunk], table: np.ndarray, window: int | None) -> ChunkBlock:
        slots, starts, counts, rows = (
            np.array([getattr(p, name) for p in group]) for name in ("slot", "start", "count", "row")
        )
        begins = _first_page(starts + 1, window, self.page_size)
        pages = int((-(-(starts + counts) // self.page_size) - begins).max())
        at = np.arange(counts.max())
        real = at < counts[:, None]  # [n, C]
        queries = rows[:, None] + np.minimum(at, counts[:, None] - 1)
        position = (starts[:, None] + np.minimum(at, counts[:, None] - 1))[:, :, None]  # [n, C, 1]
        key = (begins[:, None] * self.page_size + np.arange(pages * self.page_size))[:, None]  # [n, 1, T]
        mask = (key <= position) & (key > position - (window or math.inf))
        return ChunkBlock(
            queries=self.tensor(queries),
            flat=self.tensor(np.flatnonzero(real)),
            targets=self.tensor(queries[real]),
            index=self.page_index(table, slots, begins, pages),
            mask=self.tensor(mask[:, None]),
        )

    def page_index(self, table: np.ndarray, slots: np.ndarray, begins: np.ndarray, pages: int) -> Tensor:
        """Indices [rows * K * pages] into the pages of all heads, row by row and head by head."""
        columns = begins[:, None] + np.arange(pages)
        inside = columns < table.shape[1]
        page = np.where(inside, table[slots[:, None], np.minimum(columns, table.shape[1] - 1)], NULL_PAGE).astype(np.int64)
        heads = np.arange(self.arch.kv_heads)
        return self.tensor((page[:, None, :] * len(heads) + heads[:, None]).reshape(-1))

    def tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def _one_by_one(plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows that are attended one by one: (rows, slots, tokens that each sees), each [n] int64.

    Left out are chunks that begin a sequence. A later chunk's tokens are rows like those that decode; their common pages are
    read once for many of them.
    """
    later = [chunk for chunk in plan.chunks if chunk.start]
    rows = [np.arange(len(plan.singles)), *(np.arange(c.row, c.row + c.count) for c in later)]
    slots = [plan.singles, *(np.full(c.count, c.slot) for c in later)]
    ends = [plan.lengths, *(np.arange(c.start, c.start + c.count) + 1 for c in later)]
    return np.concatenate(rows), np.concatenate(slots), np.concatenate(ends)


def _part(plan: Plan, rows: slice, **changed: Any) -> Plan:
    """A plan of some rows of the step's flat row."""
    given = {name: getattr(plan, name)[rows] for name in ("tokens", "positions", "writes", "policies")}
    return replace(plan, **given, **changed)


def _native(arch: Architecture, page_size: int, dtype: torch.dtype, device: torch.device) -> Native | None:
    """The compiled kernels, if they support this model and device."""
    fits = Native.attends(dtype, arch.heads, arch.kv_heads, arch.head_dim, page_size)
    return native() if fits and device.type == "cpu" else None


def siblings_together(pages: np.ndarray) -> np.ndarray:
    """An order [n] of rows that puts rows with equal first pages [n] side by side."""
    _, first, inverse = np.unique(pages, return_index=True, return_inverse=True)
    return np.argsort(first[inverse], kind="stable")


def _first_page(lengths: np.ndarray, window: int | None, page_size: int) -> np.ndarray:
    """The first page that the last of `lengths` tokens sees."""
    return np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0) // page_size


def _group(pieces: list[Chunk], most: int) -> list[list[Chunk]]:
    """Groups of pieces of chunks of similar size, as long as padding stays small. most: keys of one group."""
    groups: list[list[Chunk]] = []
    work = padded = queries = keys = seen = 0
    for piece in sorted(pieces, key=lambda p: (-p.count, -(p.start + p.count))):
        end = piece.start + piece.count
        if groups:
            work += piece.count * end
            seen = (len(groups[-1]) + 1) * max(keys, end)
            padded = max(queries, piece.count) * seen
        if not groups or padded > PADDING * work or padded > MOST_PAIRS or seen > most:
            groups.append([])
            work, queries, keys = piece.count * end, 0, 0
        groups[-1].append(piece)
        queries, keys = max(queries, piece.count), max(keys, end)
    return groups


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed memory; on the CPU only pages that are used become resident.

    Zeros, because a masked position has weight 0 and 0 times an uninitialised NaN would not be 0.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(shape, np.dtype(f"u{dtype.itemsize}"))).view(dtype)
