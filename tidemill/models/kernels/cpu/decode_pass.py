"""Arguments of `decoding.c`: a decoder's weights, and rows of one token each."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MATRICES = ("qkv", "o", "gate_up", "down")
NORMS = ("input_norm", "q_norm", "k_norm", "post_norm")
_ORDER = ("input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias")
_ORDER += ("post_norm", "gate_up", "gate_up_bias", "down", "down_bias")


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in _ORDER]


class _Decoder(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        *((name, ctypes.c_void_p) for name in ("embedding", "norm")),
        *((name, ctypes.c_int32) for name in ("count", "hidden", "q_heads", "kv_heads", "size", "intermediate")),
        *((name, ctypes.c_int32) for name in ("narrow", "products")),
        ("eps", ctypes.c_float),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "to", "out", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("pages", "room", "table", "slots")),
        ("lows", ctypes.POINTER(ctypes.c_void_p)),
        *((name, ctypes.c_void_p) for name in ("ends", "writes", "order", "parts")),
        *((name, ctypes.c_int64) for name in ("layer_bytes", "table_stride")),
        *((name, ctypes.c_int32) for name in ("page_size",)),
    ]


class DecodingWeights:
    """A decoder's weights, of one dtype on the CPU, valid while they stay in place."""

    def __init__(
        self,
        layers: Sequence[Mapping[str, Tensor | None]],
        embedding: Tensor,
        norm: Tensor,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        intermediate: int,
        products: int,
        eps: float,
    ) -> None:
        """layers: matrices (packed) and norms by the names in MATRICES and NORMS.

        Biases have names such as "qkv_bias". products: a value of `Native.products`.
        """
        self._kept = [embedding, norm, *(tensor for layer in layers for tensor in layer.values() if tensor is not None)]
        assert all(tensor.dtype == norm.dtype and tensor.is_contiguous() for tensor in self._kept)
        self.kv_heads, self.head_dim, self.layers = kv_heads, head_dim, len(layers)
        self.hidden, self.dtype = norm.numel(), norm.dtype
        self.largest = max(sum(t.nbytes for t in layer.values() if t is not None) for layer in layers)  # bytes of a layer
        self.places = [tensor.data_ptr() for tensor in self._kept]  # addresses of all weights
        pointers = (_Layer * len(layers))(
            *(_Layer(**{name: t.data_ptr() for name, t in layer.items() if t is not None}) for layer in layers)
        )
        sizes = (len(layers), self.hidden, heads, kv_heads, head_dim, intermediate)
        self.structure = _Decoder(
            pointers, embedding.data_ptr(), norm.data_ptr(), *sizes, norm.dtype == torch.bfloat16, products, eps
        )


class DecodingRows(NamedTuple):
    """Rows of one token each. Those that begin with the same pages stand side by side."""

    tokens: np.ndarray  # [n] int64, as all arrays but `table`
    positions: np.ndarray
    to: np.ndarray  # the row of the result for each
    angles: tuple[Tensor, Tensor]  # cos and sin [.., 1, E / 2] of all positions
    kv: Tensor  # [layers, P, K, page_size, 2E], to which keys and values are written
    table: np.ndarray  # as `slots` and `ends`, see `Native.attend`
    slots: np.ndarray
    lows: Sequence[np.ndarray]  # of each layer
    ends: np.ndarray
    writes: np.ndarray  # page * page_size + offset
    room: Tensor  # work memory of at least `Native.decoding_room` bytes

    def structure(self, out: Tensor, order: np.ndarray, parts: np.ndarray) -> ctypes.Structure:
        """The C structure; its operands must outlive it."""
        arrays = (self.tokens, self.positions, self.to, self.slots, *self.lows, self.ends, self.writes, order, parts)
        assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in arrays)
        dense = (out, *self.angles, self.kv)
        assert all(t.is_contiguous() and t.dtype == out.dtype for t in dense) and self.table.strides[1] == 4
        given = (array.ctypes.data for array in (self.tokens, self.positions, self.to))
        pointers = (*given, *(t.data_ptr() for t in (*dense, self.room)), self.table.ctypes.data, self.slots.ctypes.data)
        of_layers = (ctypes.c_void_p * len(self.lows))(*(array.ctypes.data for array in self.lows))
        others = (array.ctypes.data for array in (self.ends, self.writes, order, parts))
        sizes = (self.kv[0].nbytes, self.table.strides[0] // 4, self.kv.shape[3])
        return _Rows(*pointers, of_layers, *others, *sizes)


def parts_of(slots: np.ndarray, threads: int) -> np.ndarray:
    """The first row of each thread, and n: about equal parts of the rows of `slots` [n], which stand together.

    A slot's rows read what the others write, so one thread takes all of them.
    """
    begins = np.append(np.flatnonzero(np.diff(slots, prepend=-1)), len(slots))
    return begins[np.searchsorted(begins, len(slots) * np.arange(threads + 1) // threads)]
