"""Launchers of the Triton kernels for CUDA devices, on tensors.

`library` finds them. They have the same methods as the CPU's (`cpu.bindings.Native`). Triton, which comes with PyTorch's
CUDA builds, compiles each kernel at its first call and keeps it in a cache of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tidemill.models.kernels.cpu.packed_sequences import Families
from tidemill.models.kernels.cuda.tiles import Tiles
from tidemill.models.kernels.cuda.vocabulary_launchers import VocabularyLaunchers, power
from tidemill.models.kernels.rotation import Rotation

DTYPES = (torch.float32, torch.bfloat16)
TILE = 16  # keys that a decoding row reads at a time
TOGETHER = 8  # heads that a program rotates
PROGRAMS = 528  # enough to keep a large device busy: with fewer rows, each is split
MOST_SPLITS = 16
ROWS_TOGETHER = 64  # queries of a tile inside packed sequences, by token and head
KEYS_TOGETHER = 64  # keys of a tile
KEYS_AT_ONCE = 32  # keys that a tile of queries reads at a time in the forward pass


class Gpu(VocabularyLaunchers):
    """The kernels, on tensors of one device and on its current stream; a graph can capture them."""

    def __init__(self) -> None:
        from tidemill.models.kernels.cuda import triton_backward, triton_kernels

        super().__init__(triton_kernels)
        self._trained: Any = triton_backward
        self._tiles: Tiles | None = None  # tiles of the latest packed sequences

    @staticmethod
    def attends(dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> bool:
        """True if `attend` and `attend_tiles` support this shape."""
        return size in (16, 32, 64, 128, 256) and heads // kv_heads <= 64 and dtype in DTYPES

    def attend(
        self, pages: Tensor, q: Tensor, table: Tensor, width: Tensor, lengths: Tensor, window: int | None, out: Tensor
    ) -> None:
        """Softmax attention of one query a row, scaled by 1/sqrt(E), to out [n, H, E], dense.

        pages [P, K, page_size, 2E]: a layer's, a token's key and value side by side. q [n, H, E], its last two dimensions
        dense. table [>= n * width] int32: each row's pages, `width` [1] int32 of them. lengths [n] int32: what a row sees,
        of these only the last `window`; 0 of nothing, which is 0.
        """
        n, heads, size = q.shape
        kv_heads, page = pages.shape[1], pages.shape[2]
        assert q.stride()[1:] == (size, 1) and pages.is_contiguous() and out.is_contiguous() and out.shape == q.shape
        splits = max(1, min(MOST_SPLITS, PROGRAMS // (n * kv_heads)))
        shape = (n * heads, splits)
        parts = out if splits == 1 else torch.empty((*shape, size), dtype=torch.float32, device=q.device)
        sums = out if splits == 1 else torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
        group = heads // kv_heads
        self._source.attend[(kv_heads, n, splits)](
            *(pages, q, q.stride(0), parts, sums, lengths, table, width, size**-0.5),
            HEADS=kv_heads,
            GROUP=group,
            GROUP_WIDTH=max(16, power(group)),
            SIZE=size,
            PAGE=page,
            TILE=TILE,
            WINDOW=window or 0,
            SPLITS=splits,
            num_warps=2,
            num_stages=3,
        )
        if splits > 1:
            self._source.merge[(n * heads,)](parts, sums, out, SPLITS=splits, WIDTH=power(splits), SIZE=size, num_warps=1)

    @staticmethod
    def tile(heads: int, kv_heads: int) -> int:
        """The most queries that `attend_tiles` takes as one tile."""
        return ROWS_TOGETHER // power(heads // kv_heads)

    def attend_tiles(
        self, pages: Tensor, q: Tensor, tiles: Tensor, table: Tensor, width: Tensor, window: int | None, out: Tensor
    ) -> None:
        """As `attend`, for several queries of a sequence: each sees the tokens before it, and itself.

        tiles [T, 4] int32: a tile's row of the table, the first of its queries among q [N, H, E], that one's position,
        and how many they are, at most `tile`; 0 for none. Of out [N, H, E] only theirs are written."""
        (_, heads, size), (kv_heads, page) = q.shape, pages.shape[1:3]
        assert q.stride()[1:] == (size, 1) and pages.is_contiguous() and out.is_contiguous() and out.shape == q.shape
        self._source.attend_tile[(len(tiles), kv_heads)](
            *(pages, q, q.stride(0), out, tiles, table, width, size**-0.5),
            HEADS=kv_heads,
            GROUP=heads // kv_heads,
            TOGETHER=power(heads // kv_heads),
            SIZE=size,
            PAGE=page,
            ROWS=ROWS_TOGETHER,
            KEYS=KEYS_AT_ONCE,
            WINDOW=window or 0,
            num_warps=4,
            num_stages=2,
        )

    def norm(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
        """As `Native.norm`."""
        size = x.shape[-1]
        rows = x.reshape(-1, size)
        out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
        if len(rows):
            warps = 4 if size <= 4096 else 8
            self._source.norm[(len(rows),)](
                *(rows, rows.stride(0), weight, out, eps), SIZE=size, WIDTH=power(size), num_warps=warps
            )
        return out

    def norm_back(self, x: Tensor, weight: Tensor, eps: float, d: Tensor, again: bool = False) -> tuple[Tensor, Tensor]:
        """As `Native.norm_back`."""
        size = x.shape[-1]
        rows, d_x = x.reshape(-1, size), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        programs = min(len(rows), PROGRAMS)
        sums = torch.empty((programs, size), dtype=torch.float32, device=x.device)
        assert d.is_contiguous() and d.shape == x.shape
        if programs:
            warps = 4 if size <= 4096 else 8
            self._trained.norm_back[(programs,)](
                *(rows, rows.stride(0), weight, eps, d, d_x, sums, len(rows)),
                SIZE=size,
                WIDTH=power(size),
                AGAIN=again,
                num_warps=warps,
            )
        return d_x, sums.sum(0)

    def rotate(self, heads: Tensor, how: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """As `Native.rotate`."""
        turned = how.queries + how.keys
        q, k = self._rotate(heads, how, turned).split([how.queries, how.keys], dim=1)
        return q, k, heads[:, turned:]

    def rotate_into(self, heads: Tensor, how: Rotation, pages: Tensor, writes: Tensor) -> Tensor:
        """The queries [n, queries, E] of `rotate`; keys and values go into the pages.

        pages [P, keys, page_size, 2E]; writes [n] int32: page * page_size + offset. Rows with the same place: any of
        them wins."""
        assert pages.is_contiguous() and pages.shape[1] == how.keys and heads.shape[1] == how.queries + 2 * how.keys
        return self._rotate(heads, how, heads.shape[1], pages, writes)

    def _rotate(
        self, heads: Tensor, how: Rotation, of: int, pages: Tensor | None = None, writes: Tensor | None = None
    ) -> Tensor:
        n, _, size = heads.shape
        shape = (n, of if pages is None else how.queries, size)
        out = torch.empty(shape, dtype=torch.promote_types(heads.dtype, how.cos.dtype), device=heads.device)
        assert heads.stride()[1:] == (size, 1) and how.cos.is_contiguous() and how.sin.is_contiguous()
        if n:
            norms = (heads, heads) if how.norms is None else how.norms
            self._source.rotate[(n, -(-of // TOGETHER))](
                *(heads, heads.stride(0), *norms, how.eps, how.cos, how.sin, out),
                *(out if pages is None else pages, out if writes is None else writes),
                QUERIES=how.queries,
                TURNED=how.queries + how.keys,
                HEADS=of,
                HALF=size // 2,
                WIDTH=power(size // 2),
                TOGETHER=TOGETHER,
                NORMED=how.norms is not None,
                PAGE=0 if pages is None else pages.shape[2],
                num_warps=4,
            )
        return out

    def rotate_back(self, heads: Tensor, how: Rotation, d: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """As `Native.rotate_back`."""
        n, every, size = heads.shape
        turned, parts = how.queries + how.keys, -(-every // TOGETHER)
        programs = max(1, min(n, 4 * PROGRAMS // parts))
        out = torch.empty((n, every, size), dtype=heads.dtype, device=heads.device)
        normed = how.norms is not None
        sums = torch.empty((programs * parts if normed else 0, 2, size), dtype=torch.float32, device=heads.device)
        assert all(part.stride()[1:] == (size, 1) for part in (heads, *d)) and turned + d[2].shape[1] == every
        assert d[0].shape[1] == how.queries and d[1].shape[1] == how.keys and how.cos.is_contiguous()
        if n:
            self._trained.rotate_back[(programs, parts)](
                *(heads, heads.stride(0), *(how.norms or (heads, heads)), how.eps, how.cos, how.sin),
                *(number for part in d for number in (part, part.stride(0))),
                *(out, sums, n),
                QUERIES=how.queries,
                TURNED=turned,
                HEADS=every,
                HALF=size // 2,
                WIDTH=power(size // 2),
                TOGETHER=TOGETHER,
                NORMED=normed,
                num_warps=4,
            )
        return out, sums.sum(0)

    def gate(self, gate_up: Tensor) -> Tensor:
        """As `Native.gate`."""
        n, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((n, size), dtype=gate_up.dtype, device=gate_up.device)
        assert gate_up.is_contiguous()
        block = min(1024, power(size))
        if n:
            self._source.gate[(n, -(-size // block))](gate_up, out, size, BLOCK=block, num_warps=4)
        return out

    def gate_back(self, gate_up: Tensor, d: Tensor, again: bool = False) -> Tensor:
        """As `Native.gate_back`."""
        n, size = d.shape
        out = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=d.device)
        assert gate_up.is_contiguous() and d.is_contiguous() and gate_up.shape == (n, 2 * size)
        block = min(1024, power(size))
        if n:
            self._trained.gate_back[(n, -(-size // block))](gate_up, d, out, size, BLOCK=block, AGAIN=again, num_warps=4)
        return out

    @staticmethod
    def trains(dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> bool:
        """True if `see` is fast for this shape. It is not for float32, which matrix units do not multiply."""
        return size in (16, 32, 64, 128) and heads // kv_heads <= 16 and dtype == torch.bfloat16

    def see(self, q: Tensor, k: Tensor, v: Tensor, families: Families, window: int | None) -> tuple[Tensor, Tensor]:
        """As `Native.see`, for q, k, v of one dtype, their last two dimensions dense."""
        (n, heads, size), kv_heads = q.shape, k.shape[1]
        out = torch.empty((n, heads, size), dtype=q.dtype, device=q.device)
        totals = torch.empty((n, heads), dtype=torch.float32, device=q.device)
        tiles, how = self._laid_out(families, q, k), self._shape(q, k, v, window)
        self._trained.see[(len(tiles.queries), kv_heads)](
            *(q, q.stride(0), k, k.stride(0), v, v.stride(0), out, totals, tiles.queries, tiles.places, size**-0.5),
            **how | {"KEYS": KEYS_AT_ONCE},
            num_stages=2,
        )
        return out, totals

    def see_back(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        totals: Tensor,
        d_out: Tensor,
        families: Families,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `Native.see_back`."""
        kv_heads, size = k.shape[1:]
        d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        d_out, means = d_out.to(out.dtype).contiguous(), torch.empty_like(totals)
        tiles, how = self._laid_out(families, q, k), self._shape(q, k, v, window)
        scale, given = size**-0.5, (q, q.stride(0), k, k.stride(0), v, v.stride(0))
        self._trained.see_back_queries[(len(tiles.queries), kv_heads)](
            *(*given, out, totals, d_out, d_q, means, tiles.queries, tiles.places, scale), **how, num_stages=2
        )
        self._trained.see_back_keys[(len(tiles.keys), kv_heads)](
            *(*given, totals, d_out, means, d_k, d_v),
            *(tiles.keys, tiles.shared, tiles.lengths, tiles.begins, scale),
            **how,
            num_stages=1,
        )
        return d_q, d_k, d_v

    def _laid_out(self, families: Families, q: Tensor, k: Tensor) -> Tiles:
        """Tiles of the families, made once for all layers and both passes, and kept for the latest ones."""
        rows, keys = ROWS_TOGETHER // (q.shape[1] // k.shape[1]), KEYS_TOGETHER
        tiles = self._tiles
        if tiles is None or tiles.families is not families or tiles.sizes != (rows, keys) or tiles.device != q.device:
            assert len(q) == len(k) == families.tokens
            self._tiles = tiles = Tiles.of(families, rows, keys, q.device)
        return tiles

    @staticmethod
    def _shape(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> dict[str, int]:
        size = q.shape[2]
        assert all(x.stride()[1:] == (size, 1) and x.dtype == q.dtype for x in (q, k, v))
        return {
            "HEADS": k.shape[1],
            "GROUP": q.shape[1] // k.shape[1],
            "SIZE": size,
            "ROWS": ROWS_TOGETHER,
            "KEYS": KEYS_TOGETHER,
            "WINDOW": window or 0,
            "num_warps": 4,
        }

    def keyed_sum(self, elements: Tensor, first: int, keys: Tensor, factors: Tensor) -> Tensor:
        """As `Native.keyed_sum`, with words: [2] int64 on the device, where `keys` and `factors` lie too."""
        count, width, run = elements.numel(), elements.element_size(), keys.numel()
        assert width <= 4 and elements.is_contiguous() and factors.numel() > (first % run + count - 1) // run
        block, steps = 1024, 16
        programs = -(-count // (block * steps))
        out = torch.empty((programs, 2), dtype=torch.int64, device=elements.device)
        integers = elements.view(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[width])
        self._source.keyed_sums[(programs,)](
            *(integers, keys, factors, out, count, first, first // run),
            WIDTH=width,
            WORD=4,
            RUN=run,
            BLOCK=block,
            STEPS=steps,
            num_warps=4,
        )
        return out.sum(0)
