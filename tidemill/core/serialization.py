"""Serialization: msgpack by declared type, arrays as (dtype, shape, raw bytes).

The wire between processes and the trajectory segments on disk use it; pickle is never used. Bytes are decoded into the
type that the receiver expects, so bytes from elsewhere can at worst be refused (`CodecError`); they can never run code.
"""

from __future__ import annotations

import json
from functools import lru_cache
from math import prod
from typing import Any

import msgspec
import numpy as np

from tidemill.core.errors import CodecError

DTYPES = ("int8", "uint8", "bool", "int32", "int64", "float16", "float32", "float64")  # of arrays that travel
_DTYPES = {np.dtype(name).str: np.dtype(name) for name in DTYPES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_SMALL = 1 << 14  # bytes that are copied sooner than shown in place


def _pack(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        name = _NAMES.get(value.dtype)
        if name is None:
            raise TypeError(f"arrays of dtype {value.dtype} do not travel; known: {sorted(_DTYPES)}")
        small = value.nbytes < _SMALL
        return (name, value.shape, value.tobytes() if small else np.ascontiguousarray(value).data.cast("B"))
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} does not travel")


def _unpack(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise TypeError(f"cannot decode {kind.__name__}")
    try:
        dtype, shape, raw = value
        dtype = _DTYPES[dtype]
        if any(n < 0 for n in shape) or prod(shape) * dtype.itemsize != len(raw):
            raise ValueError("array size does not match its bytes")
        return np.frombuffer(bytearray(raw), dtype).reshape(shape)  # a copy: writable, and independent of the frame
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"malformed array: {error}") from None


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)


@lru_cache(maxsize=256)
def _decoder(kind: Any) -> msgspec.msgpack.Decoder:
    return msgspec.msgpack.Decoder(kind, dec_hook=_unpack)


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text from outside. Raises CodecError for anything else, or too deep a nesting."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # bytes that are no UTF-8 and numbers of 5000 digits are ValueErrors
        raise CodecError(f"not JSON: {error}") from None


def encode(value: Any) -> bytes:
    return _encoder.encode(value)


def decode(raw: bytes | memoryview, kind: Any) -> Any:
    """The value of type `kind` that `raw` holds. Raises CodecError when it holds anything else."""
    try:
        return _decoder(kind).decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CodecError(f"expected {getattr(kind, '__name__', kind)}: {error}") from None
