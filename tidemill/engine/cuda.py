"""A step on a CUDA device: its integers go there in one copy, and steps that only decode are graphs, captured once.

A small model's decode step is hundreds of kernels of a few microseconds each: launched one by one, the device would wait for
Python. So for each number of rows, rounded up to one of a few, the decoder is run once while CUDA records what is launched,
and replayed from then on with other numbers in the same memory. Rows that fill up read and write the null page, and nobody
looks at what they compute. A graph holds the addresses of the weights it was recorded with: the two decoders that take turns
in serving have graphs of their own, and an update writes into the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from tidemill.engine.attention import ChunkBlock, PagedCache
from tidemill.engine.blocks import NULL_PAGE
from tidemill.engine.scheduler import Plan
from tidemill.engine.weights import Weights
from tidemill.kernels.gpu import Gpu, gpu
from tidemill.models.architecture import Architecture
from tidemill.models.decoder import Attend, Decoder


@dataclass(slots=True)
class Inputs:
    """What a step of N tokens, D of which decode, needs to know on the device. All int32, views of one row of numbers."""

    width: Tensor  # [1] pages of a row of the table
    tokens: Tensor  # [N]
    positions: Tensor  # [N]
    writes: Tensor  # [N] where the KV goes: page * page_size + offset
    lengths: Tensor  # [D] tokens that a decoding row attends to
    table: Tensor  # [D * width] the pages of each decoding row

    @classmethod
    def of(cls, numbers: Tensor, tokens: int, rows: int) -> Inputs:
        return cls(
            *numbers[: 1 + 3 * tokens + rows].split([1, tokens, tokens, tokens, rows]), numbers[1 + 3 * tokens + rows :]
        )


def numbers_of(plan: Plan, table: np.ndarray, page_size: int, rows: int | None = None) -> np.ndarray:
    """The numbers behind the `Inputs` of a plan; `rows`: of a plan that only decodes, filled up to so many."""
    decoding = len(plan.singles)
    fill = 0 if rows is None else rows - decoding
    width = -(-int(plan.lengths.max(initial=1)) // page_size)
    parts = [
        [width],
        _filled(plan.tokens, fill, 0),
        _filled(plan.positions, fill, 0),
        _filled(plan.writes, fill, NULL_PAGE * page_size),
        _filled(plan.lengths, fill, 1),
        _filled(table[plan.singles, :width].reshape(-1), fill * width, NULL_PAGE),
    ]
    return np.concatenate(parts).astype(np.int32)


def _filled(values: np.ndarray, count: int, value: int) -> np.ndarray:
    return np.concatenate((values, np.full(count, value, values.dtype))) if count else values


class GpuCache(PagedCache):
    """The paged cache on a device that has the kernels for it."""

    def __init__(
        self, arch: Architecture, pages: int, page_size: int, dtype: torch.dtype, device: torch.device, kernels: Gpu
    ) -> None:
        super().__init__(arch, pages, page_size, dtype, device)
        self._kernels = kernels
        self._counts: list[int] = []  # of rows, for which steps are recorded
        self._numbers = torch.empty(0, dtype=torch.int32, device=device)  # of steps that are recorded
        self._staged = torch.empty(0, dtype=torch.int32)
        self._recorded: WeakKeyDictionary[Decoder, dict[int, tuple[Callable[[], None], Tensor]]] = WeakKeyDictionary()
        self._pool: tuple[int, int] | None = None  # of the graphs' memory: they run one after another and share it

    def hidden(self, weights: Weights, plan: Plan, table: np.ndarray) -> Tensor:
        """The next call may overwrite it. The caller waits for the device before that."""
        decoder = weights.decoder
        if not plan.chunks:
            return self._replay(decoder, plan, table)
        numbers = torch.from_numpy(numbers_of(plan, table, self.page_size)).to(self.device)
        inputs = Inputs.of(numbers, len(plan.tokens), len(plan.singles))
        return decoder(inputs.tokens, inputs.positions, self._attend_to(inputs, self.chunk_blocks(plan, table)))

    def _attend_to(self, inputs: Inputs, chunks: dict[int | None, list[ChunkBlock]]) -> Attend:
        decoding = len(inputs.lengths)
        kernels, where = self._kernels, (inputs.table, inputs.width, inputs.lengths)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            window, pages = self.windows[layer], self.kv[layer]
            kernels.write(pages, k, v, inputs.writes)
            if decoding == len(q):
                return kernels.attend(pages, q, *where, window)
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            if decoding:
                out[:decoding] = kernels.attend(pages, q[:decoding], *where, window)
            for block in chunks[window]:
                self.attend_chunks(layer, q, block, out)
            return out

        return attend

    def _replay(self, decoder: Decoder, plan: Plan, table: np.ndarray) -> Tensor:
        slots, pages = table.shape
        rows = len(plan.singles)
        if not self._counts:
            self._counts = row_counts(slots)
            size = 1 + self._counts[-1] * (4 + pages)
            self._numbers = torch.zeros(size, dtype=torch.int32, device=self.device)
            self._staged = torch.zeros(size, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        count = next(c for c in self._counts if c >= rows)
        numbers = numbers_of(plan, table, self.page_size, count)
        staged = self._staged[: len(numbers)]
        staged.numpy()[:] = numbers
        self._numbers[: len(numbers)].copy_(staged, non_blocking=True)
        recorded = self._recorded.setdefault(decoder, {})
        if count not in recorded:
            inputs = Inputs.of(self._numbers, count, count)
            attend = self._attend_to(inputs, {})
            recorded[count] = self._record(lambda: decoder(inputs.tokens, inputs.positions, attend))
        replay, hidden = recorded[count]
        replay()
        return hidden[:rows]

    def _record(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """(what computes it again, where its result lies)"""
        compute()  # whatever is made at a first call is made outside of the record
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls are held to what may be recorded: another one may be staging weights.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden = compute()
        return graph.replay, hidden


def paged_cache(arch: Architecture, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> PagedCache:
    """For a device: with its kernels where there are some that fit."""
    fits = device.type == "cuda" and Gpu.attends(dtype, arch.heads, arch.kv_heads, arch.head_dim, page_size)
    if fits and (kernels := gpu()) is not None:
        return GpuCache(arch, pages, page_size, dtype, device, kernels)
    return PagedCache(arch, pages, page_size, dtype, device)


def row_counts(most: int) -> list[int]:
    """Numbers of rows that are recorded: at most a fifth of them fills up, from 64 on."""
    counts, step = [1, 2, 4, 8], 8
    while counts[-1] < most:
        if counts[-1] >= 8 * step:
            step *= 2
        counts.append(counts[-1] + step)
    return counts
