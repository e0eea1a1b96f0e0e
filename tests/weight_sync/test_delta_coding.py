"""The coding of changes: exact for every bit pattern, and safe with bytes from anywhere."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tidemill.weight_sync import delta_coding
from tidemill.weight_sync.delta_coding import NotPacked, pack, row_chunks, unpack
from tidemill.weight_sync.manifest import DTYPES

SHAPES = [(), (0,), (1,), (7,), (3, 0), (0, 4), (90, 7), (2, 300), (5, 4, 3), (1, 900)]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, rng: np.random.Generator) -> Tensor:
    """Any bits: NaN with payloads, -0.0 and denormals among them."""
    count = int(np.prod(shape, dtype=np.int64))
    raw = (
        rng.integers(0, 256, count * dtype.itemsize, np.uint8)
        if dtype != torch.bool
        else rng.integers(0, 2, count, np.uint8)
    )
    return torch.from_numpy(raw).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def bytes_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def unpacked(old: Tensor, packed: bytes) -> Tensor:
    new = old.clone()
    for rows, change in unpack(bytes_of(packed), tuple(old.shape), old.dtype):
        change.apply(new[rows] if new.ndim else new)
    return new


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_coding, "CHUNK", 200)


@settings(max_examples=300)
@given(st.sampled_from(list(DTYPES.values())), st.sampled_from(SHAPES), st.floats(0, 1), st.integers(0, 2**32))
def test_every_change_is_exact(dtype: torch.dtype, shape: tuple[int, ...], share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old, other = (random_bits(shape, dtype, rng) for _ in range(2))
    touched = torch.from_numpy(rng.random(shape) < share) if shape else torch.tensor(share > 0.5)
    new = torch.where(touched, other, old)
    packed = pack(old, new)
    if packed is None:
        assert int(touched.sum()) * (1 + dtype.itemsize) + 13 * len(list(row_chunks(shape))) + 20 >= new.nbytes // 2
        return
    assert same(unpacked(old, packed), new) and (packed == b"") == same(old, new)
    assert len(packed) < max(1, new.nbytes)


@pytest.mark.parametrize("share", [0.0002, 0.005, 0.1, 0.4])
def test_small_steps_take_little_more_than_their_places(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One unit in the last place, as an optimizer's steps are: by the entropy of the places and one bit for the sign."""
    monkeypatch.undo()
    rng, count = np.random.default_rng(0), 1 << 20
    old = (torch.from_numpy(rng.normal(size=(1 << 10, 1 << 10))) * 0.02).bfloat16()
    touched = torch.from_numpy(rng.random((1 << 10, 1 << 10)) < share)
    signs = torch.from_numpy(rng.integers(0, 2, (1 << 10, 1 << 10)) * 2 - 1)
    new = torch.where(touched, old.view(torch.int16) + signs, old.view(torch.int16)).to(torch.int16).view(torch.bfloat16)
    packed = pack(old, new)
    assert packed is not None and same(unpacked(old, packed), new)
    entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) * count / 8 + share * count / 8
    assert len(packed) < 1.7 * entropy + 200


def frame(body: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(body)


def record(coding: int, changed: int, gaps: int, data: bytes) -> bytes:
    return struct.pack("<BIII", coding, changed, gaps, len(data)) + data


BOMB = frame(bytes(1 << 24))
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(bytes([0, 2, 0]))
HOSTILE: dict[str, bytes] = {  # for 100 elements of two bytes
    "nothing after the header": record(1, 1, 1, frame(bytes(3)))[:13],
    "a header cut short": b"\x01\x01",
    "a longer frame than there is": struct.pack("<BIII", 1, 1, 1, 1 << 31) + frame(bytes(3)),
    "an unknown coding": record(9, 1, 1, frame(bytes(3))),
    "no changed element": record(1, 0, 0, frame(b"")),
    "more elements than there are": record(1, 101, 101, frame(bytes(101 * 3))),
    "as many as four bytes count": record(2, 2**32 - 1, 0, frame(bytes(3))),
    "more gaps than fit": record(1, 1, 2**32 - 1, frame(bytes(3))),
    "a place behind the end": record(1, 1, 1, frame(bytes([100, 2, 0]))),
    "a place far behind the end": record(1, 2, 2, frame(bytes([99, 0, 2, 2, 0, 0]))),
    "gaps that do not end": record(1, 1, 1, frame(bytes([255, 2, 0]))),
    "fewer places than elements": record(2, 2, 0, frame(bytes([128, *[0] * 12, 2, 2, 0, 0]))),
    "more places than elements": record(2, 1, 0, frame(bytes([192, *[0] * 12, 2, 0]))),
    "a bit behind the end": record(2, 1, 0, frame(bytes([*[0] * 12, 1, 2, 0]))),
    "a bomb": record(1, 1, 1, BOMB),
    "a frame that hides its size": record(1, 1, 1, UNSIZED),
    "a frame of another size": record(1, 1, 1, frame(bytes(4))),
    "no frame": record(1, 1, 1, b"no frame at all"),
    "two frames": record(1, 1, 1, frame(bytes([5, 2, 0])) + frame(bytes([5, 2, 0]))),
    "whole rows of another size": record(3, 0, 0, bytes(198)),
    "a change that is none, with bytes": record(0, 0, 0, b"x"),
    "bytes after the last row": record(1, 1, 1, frame(bytes([5, 2, 0]))) + b"x",
    "a second record": 2 * record(1, 1, 1, frame(bytes([5, 2, 0]))),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_bytes_that_are_no_change_are_refused(name: str) -> None:
    assert_nothing_else_is_written(HOSTILE[name], refused=True)


def test_the_sound_record_beside_them_is_taken() -> None:
    assert_nothing_else_is_written(record(1, 1, 1, frame(bytes([5, 2, 0]))), refused=False)


def assert_nothing_else_is_written(packed: bytes, refused: bool | None) -> None:
    """The 100 elements lie in the middle of others, which stay as they are."""
    memory = torch.arange(300).to(torch.int16)
    found: list[Any] = []
    try:
        for rows, change in unpack(bytes_of(packed), (100,), torch.int16):
            change.apply(memory[100:200][rows])
    except NotPacked as error:
        found.append(error)
    assert torch.equal(memory[:100], torch.arange(100).to(torch.int16))
    assert torch.equal(memory[200:], torch.arange(200, 300).to(torch.int16))
    assert refused is None or bool(found) == refused


@settings(max_examples=300)
@given(st.binary(max_size=80), st.integers(0, 2**32))
def test_damaged_changes_never_write_elsewhere(noise: bytes, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = torch.arange(100).to(torch.int16)
    new = torch.where(torch.from_numpy(rng.random(100) < 0.1), old + 1, old)
    packed = bytearray(pack(old, new) or b"")
    for at in rng.integers(0, len(packed), 3) if packed else ():
        packed[at] ^= int(rng.integers(1, 256))
    cut = bytes(packed[: rng.integers(0, len(packed) + 1)])
    for data in (bytes(packed), cut, noise, cut + noise):
        assert_nothing_else_is_written(data, refused=None)
