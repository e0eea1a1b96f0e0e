"""Bindings of the compiled C functions to tensors and arrays."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from tidemill.models.kernels.cpu import thread_thresholds
from tidemill.models.kernels.cpu.decode_pass import DecodingRows, DecodingWeights, parts_of
from tidemill.models.kernels.cpu.packed_sequences import MOST_NUMBERS, Families, layout, tensors
from tidemill.models.kernels.cpu.thread_thresholds import threads_for
from tidemill.models.kernels.cuda.launchers import DTYPES
from tidemill.models.kernels.cuda.vocabulary_launchers import SampledRows
from tidemill.models.kernels.rotation import Rotation

SHARES = 64  # parts of the rows whose sums are added in order; the most threads
NONE, FLOATS, WIDENED, PAIRED, TILED = range(-1, 4)  # ways to multiply, see linear.c
BLOCK, STEP = 32, 32  # outputs that rows are filled up to; inputs that must divide, of bfloat16: see linear.c

_Pointer, _Int, _Long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_NORM = (_Pointer, _Long, _Int, _Pointer, _Int, ctypes.c_float)
_ROTATE = (_Pointer, _Long, _Int, _Pointer, _Pointer, _Int, ctypes.c_float, _Pointer, _Pointer, _Int)
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "tidemill_attend": (_Int, [_Pointer, _Int]),
    "tidemill_decoding_room": (_Long, [_Pointer, _Int]),
    "tidemill_decode": (_Int, [_Pointer, _Pointer, _Int]),
    "tidemill_write": (None, [_Pointer, _Int, _Pointer, _Long, _Pointer, _Long, _Pointer] + [_Int] * 4),
    "tidemill_norm": (None, [*_NORM, _Pointer] + [_Int] * 4),
    "tidemill_norm_back": (None, [*_NORM, _Pointer, _Int, _Pointer, _Pointer] + [_Int] * 5),
    "tidemill_rotate": (None, [*_ROTATE, _Pointer] + [_Int] * 5),
    "tidemill_rotate_back": (None, [*_ROTATE, *(_Pointer, _Long) * 3, _Pointer, _Pointer] + [_Int] * 7),
    "tidemill_gate": (None, [_Pointer, _Int, _Pointer, _Int, _Int, _Int]),
    "tidemill_gate_back": (None, [_Pointer, _Int, _Pointer, _Pointer] + [_Int] * 4),
    "tidemill_sample": (None, [_Pointer, _Int, _Int, _Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Int]),
    "tidemill_sequences": (_Int, [_Pointer, _Pointer, _Int]),
    "tidemill_keyed_sum": (ctypes.c_uint64, [_Pointer, _Int, _Long, _Long, _Pointer, _Long, _Pointer, _Pointer, _Int]),
    "tidemill_word_sum": (ctypes.c_uint64, [_Pointer, _Long, _Int]),
    "tidemill_multiplies": (_Int, [_Int]),
    "tidemill_pairs_are_quick": (_Int, []),
    "tidemill_pack": (None, [_Pointer, _Pointer, _Long] + [_Int] * 4),
    "tidemill_outer": (_Int, [_Pointer, _Long, _Pointer, _Long, _Pointer] + [_Int] * 4),
    "tidemill_linear": (_Int, [_Pointer, _Long, _Pointer, _Pointer, _Pointer] + [_Int] * 6),
}


class _Queries(ctypes.Structure):
    _fields_ = [
        *((name, _Pointer) for name in ("kv", "q", "out", "table", "slots", "lows", "ends", "order")),
        *((name, _Long) for name in ("q_stride", "table_stride")),
        *((name, _Int) for name in ("n", "q_heads", "kv_heads", "size", "page_size", "narrow")),
        ("scale", ctypes.c_float),
    ]


class Native:
    """The library's functions on tensors and arrays; pointers are taken only in this package."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        narrow = (TILED, PAIRED, WIDENED) if library.tidemill_pairs_are_quick() else (TILED, WIDENED)
        self.products = {  # the quickest way to multiply with weights of a dtype, NONE where others' code is as quick
            dtype: next(filter(self.multiplies, narrow if dtype == torch.bfloat16 else (FLOATS,)), NONE) for dtype in DTYPES
        }

    def multiplies(self, way: int) -> bool:
        """True if this processor can multiply this way."""
        return bool(self._library.tidemill_multiplies(way))

    @staticmethod
    def attends(dtype: torch.dtype, heads: int, kv_heads: int, size: int, page_size: int) -> bool:
        """True if `attend` and `write` support this shape."""
        return size in (16, 32, 64, 128) and page_size % 16 == 0 and heads // kv_heads <= 16 and dtype in DTYPES

    def attend(
        self,
        pages: Tensor,
        q: Tensor,
        table: np.ndarray,
        slots: np.ndarray,
        lows: np.ndarray,
        ends: np.ndarray,
        order: np.ndarray,
        threads: int,
    ) -> Tensor:
        """Softmax attention of one query a row, scaled by 1/sqrt(E) -> [n, H, E] as q.

        pages [P, K, page_size, 2E]: a layer's, a token's key and value side by side. q [n, H, E], its last two dimensions
        dense. table [S, C] int32: the pages of each slot. slots [n] int64: each row's. It sees its tokens [lows, ends)
        (int64), at least one. order [n] int64: all rows, those that begin with the same pages side by side, so that these
        pages are read once; any order gives the same result but for rounding.
        """
        n, heads, size = q.shape
        out = torch.empty((n, heads, size), dtype=q.dtype)
        assert q.stride()[1:] == (size, 1) and pages.is_contiguous() and table.strides[1] == 4
        queries = _Queries(
            *(pages.data_ptr(), q.data_ptr(), out.data_ptr(), table.ctypes.data, slots.ctypes.data),
            *(lows.ctypes.data, ends.ctypes.data, order.ctypes.data, q.stride(0), table.strides[0] // 4),
            *(n, heads, pages.shape[1], size, pages.shape[2], pages.dtype == torch.bfloat16, size**-0.5),
        )
        failed = self._library.tidemill_attend(ctypes.byref(queries), threads)
        assert not failed, "see `attends`"
        return out

    def decode(self, weights: DecodingWeights, at: DecodingRows, threads: int) -> Tensor:
        """Hidden states [n, D] after the last norm; each thread takes a run of rows through all layers."""
        n, kv, parts = len(at.tokens), at.kv, parts_of(at.slots, threads)
        out = torch.empty((n, weights.hidden), dtype=weights.dtype)
        assert kv.shape[0] == weights.layers == len(at.lows) and kv.dtype == weights.dtype
        assert kv.shape[2] == weights.kv_heads and kv.shape[4] == 2 * weights.head_dim
        assert at.room.nbytes >= self.decoding_room(weights, parts)
        given = at.structure(out, order := np.arange(n), parts)
        if self._library.tidemill_decode(ctypes.byref(weights.structure), ctypes.byref(given), threads):
            raise MemoryError(f"there is no memory for {len(order)} rows of a step")
        return out

    def decoding_room(self, weights: DecodingWeights, parts: np.ndarray) -> int:
        """The bytes of work memory that `decode` needs for such parts of its rows, see `parts_of`."""
        most, threads = int(np.diff(parts).max()), len(parts) - 1
        return self._library.tidemill_decoding_room(ctypes.byref(weights.structure), most) * threads

    def write(self, pages: Tensor, k: Tensor, v: Tensor, writes: np.ndarray) -> None:
        """Write k, v [n, K, E] into the pages at `writes` [n] int64: page * page_size + offset."""
        n, heads, size = k.shape
        assert k.stride()[1:] == v.stride()[1:] == (size, 1) and pages.is_contiguous()
        self._library.tidemill_write(
            *(pages.data_ptr(), pages.element_size(), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)),
            *(writes.ctypes.data, n, heads, size, pages.shape[2]),
        )

    def norm(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
        """Root-mean-square norm of each row of x [..., D], in float32, as x or in `dtype`.

        A bfloat16 row is rounded before the weight [D] is applied, too."""
        out = torch.empty(x.shape, dtype=dtype or x.dtype)
        rows, arguments = _norm(x, weight, eps)
        self._library.tidemill_norm(
            *(*arguments, out.data_ptr(), out.dtype == torch.bfloat16),
            *(*rows.shape, threads_for(len(rows), thread_thresholds.ROWS)),
        )
        return out

    def norm_back(self, x: Tensor, weight: Tensor, eps: float, d: Tensor, again: bool = False) -> tuple[Tensor, Tensor]:
        """(d x, d weight in float32) from the gradient d of `norm`; `again` writes the norm over d."""
        dx = torch.empty(x.shape, dtype=x.dtype)
        rows, arguments = _norm(x, weight, eps)
        sums = torch.empty((_shares(len(rows)), rows.shape[1]))
        assert d.is_contiguous()
        self._library.tidemill_norm_back(
            *(*arguments, d.data_ptr(), d.dtype == torch.bfloat16, dx.data_ptr()),
            *(sums.data_ptr(), again, len(sums), *rows.shape, threads_for(len(rows), thread_thresholds.ROWS)),
        )
        return dx, sums[0].clone()

    def rotate(self, heads: Tensor, how: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """(q, k, others) of `heads` [n, queries + keys + others, E], with q and k normed and rotated.

        q and k are float32 if the heads or the angles are."""
        n, _, size = heads.shape
        turned = how.queries + how.keys
        out = torch.empty((n, turned, size), dtype=torch.promote_types(heads.dtype, how.cos.dtype))
        self._library.tidemill_rotate(
            *(*_rotate(heads, how), out.data_ptr()),
            *(n, turned, how.queries, size, threads_for(n, thread_thresholds.ROWS)),
        )
        q, k = out.split([how.queries, how.keys], dim=1)
        return q, k, heads[:, turned:]

    def rotate_back(self, heads: Tensor, how: Rotation, d: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(d heads, d norm weights [2, E] in float32) from the gradients d of `rotate`'s three outputs."""
        n, every, size = heads.shape
        turned, others = how.queries + how.keys, d[2].shape[1]
        d_heads, sums = torch.empty((n, every, size), dtype=heads.dtype), torch.empty((_shares(n), 2, size))
        assert all(part.stride()[1:] == (size, 1) for part in d) and turned + others == every
        assert d[0].shape[1:] == (how.queries, size) and d[1].shape[1:] == (how.keys, size)
        assert d[0].dtype == d[1].dtype == torch.promote_types(heads.dtype, how.cos.dtype) and d[2].dtype == heads.dtype
        self._library.tidemill_rotate_back(
            *_rotate(heads, how),
            *(number for part in d for number in (part.data_ptr(), part.stride(0))),
            *(d_heads.data_ptr(), sums.data_ptr(), len(sums)),
            *(n, turned, how.queries, others, size, threads_for(n, thread_thresholds.ROWS)),
        )
        return d_heads, sums[0].clone()

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up [n, I] of both side by side [n, 2 I]."""
        n, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((n, size), dtype=gate_up.dtype)
        assert gate_up.is_contiguous()
        threads = threads_for(n, thread_thresholds.ROWS)
        self._library.tidemill_gate(gate_up.data_ptr(), gate_up.dtype == torch.bfloat16, out.data_ptr(), n, size, threads)
        return out

    def gate_back(self, gate_up: Tensor, d: Tensor, again: bool = False) -> Tensor:
        """d gate_up from the gradient d of `gate`'s output; `again` writes that output over d."""
        n, size = d.shape
        out = torch.empty(gate_up.shape, dtype=gate_up.dtype)
        assert gate_up.is_contiguous() and d.is_contiguous() and d.dtype == gate_up.dtype and gate_up.shape == (n, 2 * size)
        self._library.tidemill_gate_back(
            *(gate_up.data_ptr(), gate_up.dtype == torch.bfloat16, d.data_ptr(), out.data_ptr()),
            *(again, n, size, threads_for(n, thread_thresholds.ROWS)),
        )
        return out

    def sample(self, logits: Tensor, temperature: np.ndarray, uniform: np.ndarray) -> SampledRows:
        """Sample from logits [n, V] float32; if not finite, so are the logprobs.

        temperature [n], 0 for the likeliest token; uniform [n] float64 in [0, 1): the token is the first whose cumulative
        probability exceeds it."""
        n, vocab = logits.shape
        tokens, logprobs, model = np.empty(n, np.int64), np.empty(n, np.float32), np.empty(n, np.float32)
        greedy = temperature == 0
        sharpness = np.where(greedy, 0, 1 / np.where(greedy, 1, temperature)).astype(np.float32)
        uniform = np.ascontiguousarray(uniform, np.float64)
        assert logits.is_contiguous() and logits.dtype == torch.float32
        self._library.tidemill_sample(
            *(logits.data_ptr(), n, vocab, sharpness.ctypes.data, uniform.ctypes.data),
            *(tokens.ctypes.data, logprobs.ctypes.data, model.ctypes.data, threads_for(n, thread_thresholds.ROWS)),
        )
        return tokens, logprobs, model

    def packs(self, weight: Tensor) -> bool:
        """True if `linear` supports weights [N, K] like this one on this processor."""
        fits = weight.device.type == "cpu" and not (weight.dtype == torch.bfloat16 and weight.shape[1] % STEP)
        return fits and self.products.get(weight.dtype, NONE) != NONE

    def pack(self, weight: Tensor, into: Tensor | None = None) -> Tensor:
        """A weight [N, K] in the order that `linear` reads, flat; `into`: an earlier one of its shape."""
        n, k = weight.shape
        packed = torch.empty(-(-n // BLOCK) * BLOCK * k, dtype=weight.dtype) if into is None else into
        assert self.packs(weight) and weight.stride(1) == 1 and packed.is_contiguous() and packed.dtype == weight.dtype
        assert packed.numel() == -(-n // BLOCK) * BLOCK * k
        self._library.tidemill_pack(
            *(packed.data_ptr(), weight.data_ptr(), weight.stride(0), n, k, weight.dtype == torch.bfloat16),
            threads_for(weight.nbytes, thread_thresholds.BYTES),
        )
        return packed

    def linear(self, x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None = None, wide: bool = False) -> Tensor:
        """x [n, K] times a packed weight's transpose, plus a bias [N]: [n, N] as x, or float32 if `wide`.

        Each row is summed by itself, in float32."""
        n, k = x.shape
        out = torch.empty((n, outputs), dtype=torch.float32 if wide else x.dtype)
        assert x.stride(1) == 1 and x.dtype == packed.dtype and packed.numel() == -(-outputs // BLOCK) * BLOCK * k
        assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous() and bias.numel() == outputs)
        threads = threads_for(n * outputs * k, thread_thresholds.MULTIPLICATIONS)
        if self._library.tidemill_linear(
            *(x.data_ptr(), x.stride(0), packed.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr()),
            *(self.products[x.dtype], out.dtype == torch.bfloat16, n, outputs, k, threads),
        ):
            raise MemoryError(f"there is no memory for a copy of {n} rows of {k} numbers")
        return out

    def adds_outer(self, d: Tensor, x: Tensor) -> bool:
        """True if `add_outer` supports these on this processor."""
        narrow = d.dtype == x.dtype == torch.bfloat16 and d.device.type == x.device.type == "cpu"
        return narrow and self.products[torch.bfloat16] == PAIRED and x.shape[1] % STEP == 0

    def add_outer(self, d: Tensor, x: Tensor, sums: Tensor) -> None:
        """sums [N, K] float32 += d^T x, of bfloat16 d [n, N] and x [n, K]; independent of thread count."""
        (n, outputs), inputs = d.shape, x.shape[1]
        assert self.adds_outer(d, x) and len(x) == n and d.stride(1) == x.stride(1) == 1
        assert sums.shape == (outputs, inputs) and sums.dtype == torch.float32 and sums.is_contiguous()
        threads = threads_for(n * outputs * inputs, thread_thresholds.MULTIPLICATIONS)
        given = d.data_ptr(), d.stride(0), x.data_ptr(), x.stride(0), sums.data_ptr(), n, outputs, inputs, threads
        if self._library.tidemill_outer(*given):
            raise MemoryError(f"there is no memory for pairs of {n} rows of {outputs} and {inputs} numbers")

    @staticmethod
    def trains(dtype: torch.dtype, size: int) -> bool:
        """True if `see` and `see_back` support heads of this size."""
        return dtype in DTYPES and size % 16 == 0 and size <= MOST_NUMBERS

    def see(self, q: Tensor, k: Tensor, v: Tensor, families: Families, window: int | None) -> tuple[Tensor, Tensor]:
        """Causal attention within every sequence and the window, scaled by 1/sqrt(E), in float32.

        q [N, H, E], k and v [N, K, E] -> ([N, H, E] in the dtype of v, [N, H] float32: the logarithm of each total
        weight)."""
        out, totals = torch.empty(q.shape, dtype=v.dtype), torch.empty(q.shape[:2])
        self._sequences(families, window, totals, {"q": q, "k": k, "v": v, "out": out})
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
        """(d q, d k, d v) from the gradient d_out of `see`'s output; independent of the thread count."""
        d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
        given = {"q": q, "k": k, "v": v, "out": out, "d_out": d_out.to(out.dtype)}
        self._sequences(families, window, totals, given | {"d_q": d_q, "d_k": d_k, "d_v": d_v})
        return d_q, d_k, d_v

    def _sequences(self, families: Families, window: int | None, totals: Tensor, operands: dict[str, Tensor]) -> None:
        q, k = operands["q"], operands["k"]
        operands = {name: x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for name, x in operands.items()}
        threads = threads_for(len(families.places) * q[0].numel(), thread_thresholds.QUERY_NUMBERS)
        given = tensors(totals, q.shape[2], operands)
        if self._library.tidemill_sequences(ctypes.byref(layout(families, q, k, window)), ctypes.byref(given), threads):
            raise MemoryError("there is no memory for the keys and values of the longest sequence")

    def keyed_sum(self, elements: Tensor, first: int, keys: Tensor, factors: Tensor, words: bool = False) -> tuple[int, int]:
        """(sum of elements [n] times their keys modulo 2^64, `word_sum` of them if `words`, else 0).

        Elements are unsigned integers of 1, 2 or 4 bytes. Element i, counted from `first`, has the key
        keys[i % len(keys)] * factors[i // len(keys) - first // len(keys)]; both int64."""
        width, n, run = elements.element_size(), elements.numel(), keys.numel()
        assert width <= 4 and run % 4 == 0 and elements.is_contiguous() and factors.numel() > (first % run + n - 1) // run
        found = ctypes.c_uint64()
        total = self._library.tidemill_keyed_sum(
            *(elements.data_ptr(), width, n, first, keys.data_ptr(), run, factors.data_ptr()),
            ctypes.addressof(found) if words else None,
            threads_for(elements.nbytes, thread_thresholds.BYTES),
        )
        return total, found.value

    def word_sum(self, tensor: Tensor) -> int:
        """Sum of a dense tensor's little-endian words of four bytes, modulo 2^64; the last may be short."""
        assert tensor.is_contiguous()
        threads = threads_for(tensor.nbytes, thread_thresholds.BYTES)
        return self._library.tidemill_word_sum(tensor.data_ptr(), tensor.nbytes, threads)


def _shares(rows: int) -> int:
    return max(1, min(rows, SHARES))


def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, tuple[int | float, ...]]:
    """(x as rows, the C arguments for x, weight and eps)."""
    rows = x.reshape(-1, x.shape[-1])
    assert rows.stride(1) == 1 and weight.is_contiguous() and weight.numel() == rows.shape[1]
    narrow, narrow_weight = x.dtype == torch.bfloat16, weight.dtype == torch.bfloat16
    return rows, (rows.data_ptr(), rows.stride(0), narrow, weight.data_ptr(), narrow_weight, eps)


def _rotate(heads: Tensor, how: Rotation) -> tuple[int | float | None, ...]:
    """The C arguments for heads, norms and angles."""
    cos, sin = how.cos, how.sin
    weights, narrow_weights = (None, None), False
    if how.norms is not None:
        of_queries, of_keys = how.norms
        weights, narrow_weights = (of_queries.data_ptr(), of_keys.data_ptr()), of_queries.dtype == torch.bfloat16
        assert of_queries.dtype == of_keys.dtype and of_queries.is_contiguous() and of_keys.is_contiguous()
    assert heads.stride()[1:] == (heads.shape[2], 1) and cos.is_contiguous() and sin.is_contiguous()
    assert cos.dtype == sin.dtype and cos.numel() == sin.numel() == len(heads) * (heads.shape[2] // 2)
    narrow, narrow_angles = heads.dtype == torch.bfloat16, cos.dtype == torch.bfloat16
    given = heads.data_ptr(), heads.stride(0), narrow, *weights, narrow_weights, how.eps
    return *given, cos.data_ptr(), sin.data_ptr(), narrow_angles
