"""Steps on a CUDA device as graphs: captured once for each shape, then replayed.

A small model's step is hundreds of kernels of a few microseconds each: launched one by one, the device would wait for
Python. So for each shape, rounded up to one of a few, the decoder is run once while CUDA records the launches, and replayed
from then on with other numbers in the same memory. A step's integers go to the device in one copy. Padding tokens are
written to the null page, and their results are ignored. Decoding rows and chunks of prompts stand side by side in every
product, and each kind has its own attention kernel. A graph holds the addresses of its weights: the two decoders that take
turns in serving have graphs of their own, and an update writes into the same memory.

A step is launched before the tokens of the previous step have come back: it reads them on the device, which does not wait
for planning or recording. Steps of several policies are launched like that, too, but kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from tidemill.engine.native.paged_attention import PagedCache
from tidemill.engine.native.sampler import RowParams, Sampled, finite
from tidemill.engine.native.staged_weights import Weights
from tidemill.engine.native.step_plan import Plan
from tidemill.models.architecture import Architecture
from tidemill.models.decoder import AttendHeads, Decoder
from tidemill.models.kernels.cuda.launchers import Gpu
from tidemill.models.kernels.cuda.tiles import cut
from tidemill.models.kernels.cuda.transfers import pinned, sent
from tidemill.models.kernels.library import gpu
from tidemill.models.kernels.rotation import Rotation


@dataclass(frozen=True, slots=True)
class GraphShape:
    """Shape of a step: N tokens, of which the first D decode, and T tiles of the other queries."""

    tokens: int
    rows: int
    tiles: int

    @property
    def before_table(self) -> int:
        """The count of numbers before the table."""
        return 1 + 3 * self.tokens + self.rows + 4 * self.tiles


@dataclass(slots=True)
class Inputs:
    """Inputs of a step on the device: int32 views of one row of numbers."""

    width: Tensor  # [1] pages in a row of the table
    tokens: Tensor  # [N] token ids; -1 - i stands for token i that the previous step sampled
    positions: Tensor  # [N]
    writes: Tensor  # [N] where the KV goes: page * page_size + offset
    lengths: Tensor  # [D] tokens that a decoding row attends to
    tiles: Tensor  # [T, 4] row of the table, first token, its position, tokens: see `Gpu.attend_tiles`
    table: Tensor  # [(D + chunks) * width] the pages of each decoding row, and of each chunk's sequence

    @classmethod
    def of(cls, numbers: Tensor, shape: GraphShape) -> Inputs:
        sizes = [1, shape.tokens, shape.tokens, shape.tokens, shape.rows, 4 * shape.tiles]
        width, tokens, positions, writes, lengths, tiles = numbers[: shape.before_table].split(sizes)
        table = numbers[shape.before_table :]
        return cls(width, tokens, positions, writes, lengths, tiles.view(-1, 4), table)


def shape_of(plan: Plan, tile: int) -> GraphShape:
    """The exact shape of a plan. tile: the most queries of one tile."""
    return GraphShape(len(plan.tokens), len(plan.singles), sum(-(-chunk.count // tile) for chunk in plan.chunks))


def recorded_shape(exact: GraphShape, slots: int, tile: int) -> GraphShape | None:
    """The recorded shape that holds `exact`; None if `exact` has too many tiles."""
    most = row_counts(slots)[-1]
    if not exact.tiles:
        rows = next(c for c in row_counts(slots) if c >= exact.rows)
        return GraphShape(rows, rows, 0)
    rows = next(c for c in (most // 16, most // 4, most) if c >= exact.rows)  # padding costs next to nothing here
    tokens = token_count(max(exact.tokens, rows))
    tiles = tokens // tile + max(8, tokens // 16)
    return GraphShape(tokens, rows, tiles) if exact.tiles <= tiles else None


@lru_cache(maxsize=8)
def row_counts(most: int) -> list[int]:
    """Recorded numbers of rows if all decode; from 64 on at most a fifth is padding."""
    counts, step = [1, 2, 4, 8], 8
    while counts[-1] < most:
        if counts[-1] >= 8 * step:
            step *= 2
        counts.append(counts[-1] + step)
    return counts


def token_count(least: int) -> int:
    """Recorded number of tokens if not all decode; from 64 on at most a fifth is padding."""
    step = max(16, 2 ** ((least - 1).bit_length() - 3))
    return -(-least // step) * step


def numbers_of(plan: Plan, table: np.ndarray, page_size: int, tile: int, shape: GraphShape) -> np.ndarray:
    """The numbers behind the `Inputs` of a plan, padded to the shape.

    Padding is tokens that are written to the null page, rows of no length and tiles of no queries, all of which are zeros.
    """
    chunks = plan.chunks
    width = -(-max(int(plan.lengths.max(initial=1)), *(c.start + c.count for c in chunks), 1) // page_size)
    numbers = np.zeros(shape.before_table + (shape.rows + len(chunks)) * width, np.int32)
    numbers[0], at = width, 1
    for values, room in (
        (plan.tokens, shape.tokens),
        (plan.positions, shape.tokens),
        (plan.writes, shape.tokens),
        (plan.lengths, shape.rows),
    ):
        numbers[at : at + len(values)] = values
        at += room
    pages = numbers[shape.before_table :].reshape(-1, width)
    pages[: len(plan.singles)] = table[plan.singles, :width]
    if chunks:
        slots, starts, counts, rows = (
            np.array([getattr(c, name) for c in chunks]) for name in ("slot", "start", "count", "row")
        )
        pages[shape.rows :] = table[slots, :width]
        of, begin = cut(counts, tile)
        tiles = numbers[at : at + 4 * len(of)].reshape(-1, 4)
        tiles[:, 0], tiles[:, 1], tiles[:, 2] = shape.rows + of, rows[of] + begin, starts[of] + begin
        tiles[:, 3] = np.minimum(tile, counts[of] - begin)
    return numbers


class AttendPages(AttendHeads):
    """The decoder's `attend` for one step."""

    def __init__(self, kernels: Gpu, kv: Tensor, windows: Sequence[int | None], inputs: Inputs) -> None:
        self.kernels, self.kv, self.windows, self.inputs = kernels, kv, windows, inputs

    def __call__(self, layer: int, heads: Tensor, how: Rotation) -> Tensor:
        inputs, window, pages = self.inputs, self.windows[layer], self.kv[layer]
        q = self.kernels.rotate_into(heads, how, pages, inputs.writes)
        out, rows, where = torch.empty_like(q), len(inputs.lengths), (inputs.table, inputs.width)
        if rows:
            self.kernels.attend(pages, q[:rows], *where, inputs.lengths, window, out[:rows])
        if len(inputs.tiles):  # last: padding rows overlap the chunks' tokens
            self.kernels.attend_tiles(pages, q, inputs.tiles, *where, window, out)
        return out


class GpuCache(PagedCache):
    """The paged cache on a device with kernels for it."""

    ahead = True

    def __init__(
        self, arch: Architecture, pages: int, page_size: int, dtype: torch.dtype, device: torch.device, kernels: Gpu
    ) -> None:
        super().__init__(arch, pages, page_size, dtype, device)
        self._kernels = kernels
        self._tile = kernels.tile(arch.heads, arch.kv_heads)
        self._numbers = torch.empty(0, dtype=torch.int32, device=device)  # inputs of recorded steps
        self._sampled = torch.empty(0, dtype=torch.int32, device=device)  # tokens of the previous step
        self._recorded: WeakKeyDictionary[Decoder, dict[GraphShape, tuple[Callable[[], None], Tensor]]] = WeakKeyDictionary()
        self._pool = None  # memory that the graphs share: they run one after another

    def hidden(self, weights: Weights, plan: Plan, table: np.ndarray, wanted: np.ndarray) -> Tensor:
        exact = shape_of(plan, self._tile)
        shape = recorded_shape(exact, len(table), self._tile)
        if weights.adapters is not None:
            weights.adapters.begin(plan.policies, None, self.tensor)
            shape = None  # how many rows each policy has differs from step to step
        numbers = numbers_of(plan, table, self.page_size, self._tile, shape or exact)
        if len(self._sampled) < len(table):
            self._sampled = torch.zeros(len(table), dtype=torch.int32, device=self.device)
        if shape is None:
            hidden = self._compute(weights.decoder, Inputs.of(self.tensor(numbers), exact))
        else:
            self._make_room(shape.before_table + (shape.rows + len(table)) * table.shape[1])
            hidden = self._replay(weights.decoder, numbers, shape)[: exact.tokens]
        rows = self.chosen(wanted, exact.tokens)
        return hidden if rows is None else hidden.index_select(0, rows)

    def sampling(self, logits: Tensor, ask: RowParams) -> Callable[[], Sampled]:
        found = self._kernels.sampling(logits, ask.temperature, ask.uniform, self._sampled)
        return lambda: finite(Sampled(*found()))

    def tensor(self, array: np.ndarray) -> Tensor:
        return sent(array, self.device)

    def _compute(self, decoder: Decoder, inputs: Inputs) -> Tensor:
        tokens = self._kernels.feed(inputs.tokens, self._sampled)
        return decoder(tokens, inputs.positions, AttendPages(self._kernels, self.kv, self.windows, inputs))

    def _make_room(self, needed: int) -> None:
        """Enlarge the memory for a step's numbers. Recorded graphs hold its old address: drop them."""
        if len(self._numbers) >= needed:
            return
        self._recorded.clear()
        self._numbers = torch.zeros(2 * needed, dtype=torch.int32, device=self.device)

    def _replay(self, decoder: Decoder, numbers: np.ndarray, shape: GraphShape) -> Tensor:
        self._numbers[: len(numbers)].copy_(pinned(numbers, self.device), non_blocking=True)
        recorded = self._recorded.setdefault(decoder, {})
        if shape not in recorded:
            inputs = Inputs.of(self._numbers, shape)
            recorded[shape] = self._record(lambda: self._compute(decoder, inputs))
        replay, hidden = recorded[shape]
        replay()
        return hidden

    def _record(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Record a computation. Returns a function that repeats it, and its result's tensor."""
        compute()  # the first call allocates outside of the recording
        if not any(self._recorded.values()):  # a pool without graphs cannot be used again
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls must be recordable: another thread may be staging weights.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden = compute()
        return graph.replay, hidden


def paged_cache(arch: Architecture, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> PagedCache:
    """The cache for a device, with compiled kernels if some fit."""
    fits = device.type == "cuda" and Gpu.attends(dtype, arch.heads, arch.kv_heads, arch.head_dim)
    if fits and (kernels := gpu()) is not None:
        return GpuCache(arch, pages, page_size, dtype, device, kernels)
    return PagedCache(arch, pages, page_size, dtype, device)
