"""Fingerprints: the same for every cut, different for every change."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.models import fingerprint as module
from tidemill.models.fingerprint import Fingerprint, fingerprint, word_sum
from tidemill.models.kernels.cpu import thread_thresholds
from tidemill.models.kernels.library import native
from tidemill.models.weight_slices import Slice

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_key(number: int) -> int:
    """SplitMix64's output number `number` + 1 from a state of 0, made odd."""
    x = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return (x ^ (x >> 31)) | 1


def tensor_sums(slices: Iterable[Slice]) -> dict[str, int]:
    total = Fingerprint()
    for piece in slices:
        total.add(piece)
    return total.sums()


def python_sum(tensor: torch.Tensor) -> int:
    """The formula in Python integers."""
    size = min(tensor.element_size(), 4)
    integers = tensor.contiguous().reshape(-1).view({2: torch.int16, 4: torch.int32}[size]).tolist()
    keys = (random_key(i % module._RUN) * random_key(2**32 + i // module._RUN) for i in range(len(integers)))
    return sum(bits % 2 ** (8 * size) * key for bits, key in zip(integers, keys, strict=True)) % 2**64


def blocks(whole: Slice, draw: st.DataObject) -> list[Slice]:
    """A random guillotine cut."""
    sizes = whole.tensor.shape
    dims = [d for d, n in enumerate(sizes) if n > 1]
    if not dims or draw.draw(st.integers(0, 3)) == 0:
        return [whole]
    dim = draw.draw(st.sampled_from(dims))
    at = draw.draw(st.integers(1, sizes[dim] - 1))
    right = tuple(o + (at if d == dim else 0) for d, o in enumerate(whole.offset))
    left = Slice(whole.name, whole.shape, whole.offset, whole.tensor.narrow(dim, 0, at))
    rest = Slice(whole.name, whole.shape, right, whole.tensor.narrow(dim, at, sizes[dim] - at))
    return blocks(left, draw) + blocks(rest, draw)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 7), min_size=0, max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 9),
    st.integers(1, 64),
    st.data(),
)
def test_any_cut_in_any_order_gives_the_formula(
    shape: list[int], dtype: torch.dtype, seed: int, chunk: int, data: st.DataObject
) -> None:
    tensor = tensor_of(tuple(shape), dtype, seed)
    whole = Slice.whole("w", tensor)
    assert tensor_sums([whole]) == {"w": python_sum(tensor)}
    pieces = data.draw(st.permutations(blocks(whole, data)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", chunk)
        assert tensor_sums(pieces) == {"w": python_sum(tensor)}
        assert fingerprint(pieces) == fingerprint([whole])


def test_runs_of_keys_join() -> None:
    """Elements beyond the keys that lie ready, whether they are added as a run or as a block."""
    tensor = tensor_of((3, module._RUN // 2 + 5), torch.bfloat16, 0)
    expected = {"w": python_sum(tensor)}
    assert tensor_sums([Slice.whole("w", tensor)]) == expected
    columns = [Slice("w", tuple(tensor.shape), (0, at), tensor[:, at : at + 9000]) for at in range(0, tensor.shape[1], 9000)]
    assert tensor_sums(columns) == expected


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("first", [0, 1, 5, 32])
def test_many_runs_of_keys_are_added_up(first: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a kernel looks at together, and some that are not whole."""
    monkeypatch.setattr(module, "_RUN", 32)
    monkeypatch.setattr(module, "_KEYS", module._KEYS[:32])
    monkeypatch.setattr(module, "_KEY_BITS", module._KEY_BITS[:32])
    monkeypatch.setattr(module, "_factors", module._factors.__wrapped__)
    if not compiled:
        monkeypatch.setattr(module, "native", lambda: None)
    for dtype in DTYPES:
        tensor = tensor_of((32 * 19 + 7,), dtype, 1)
        pieces = [Slice("w", tuple(tensor.shape), (at,), tensor[at:end]) for at, end in ((0, first), (first, len(tensor)))]
        assert tensor_sums(pieces) == {"w": python_sum(tensor)}


def test_non_contiguous_slices_are_read_as_they_look() -> None:
    tensor = tensor_of((9, 5), torch.bfloat16, 0)
    assert fingerprint([Slice.whole("w", tensor.T)]) == fingerprint([Slice.whole("w", tensor.T.contiguous())])


@settings(max_examples=60)
@given(st.sampled_from(DTYPES), st.integers(0, 99), st.data())
def test_every_change_shows(dtype: torch.dtype, seed: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 8))
    tensor = tensor_of((n, n), dtype, seed)
    original = fingerprint([Slice.whole("w", tensor)])
    flat = tensor.flatten()
    i, j = data.draw(st.permutations(range(n * n)))[:2]
    swapped = flat.clone()
    swapped[[i, j]] = flat[[j, i]]
    bit = flat.clone().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    width = bit.element_size() * 8
    at = data.draw(st.integers(0, width - 1))
    bit[i] ^= -(2 ** (width - 1)) if at == width - 1 else 2**at
    changes = {
        "swap": swapped.view(n, n),
        "transpose": tensor.T,
        "shift": flat.roll(1).view(n, n),
        "rows": tensor.flip(0),
        "bit": bit.view(dtype).view(n, n),
    }
    for name, changed in changes.items():
        same = torch.equal(changed.contiguous().view(torch.uint8), tensor.view(torch.uint8))
        assert (fingerprint([Slice.whole("w", changed)]) == original) == same, name


def test_structured_swaps_do_not_cancel() -> None:
    """Values of opposite sign, powers of two apart: what keys that grow with the index would let through."""
    seen = set()
    for i in range(64):
        row = torch.zeros(4096)
        row[[i * 64, (i * 64 + 32) % 4096]] = torch.tensor([1.0, -1.0])
        seen |= {python_total(row), python_total(-row)}
    assert len(seen) == 128


def python_total(row: torch.Tensor) -> int:
    return tensor_sums([Slice.whole("w", row)])["w"]


def test_name_dtype_and_shape_count() -> None:
    zero = torch.zeros(4, 2)
    variants = [
        Slice.whole("a", zero),
        Slice.whole("b", zero),
        Slice.whole("a", zero.half()),
        Slice.whole("a", zero.bfloat16()),
        Slice.whole("a", zero.view(2, 4)),
        Slice.whole("a", -zero),
    ]
    digests = [fingerprint([v]) for v in variants]
    assert len(set(digests)) == len(variants)
    assert all(len(d) == 32 and int(d, 16) >= 0 for d in digests)
    a, b = Slice.whole("a", zero), Slice.whole("b", zero + 1)
    assert fingerprint([a, b]) == fingerprint([b, a]) != fingerprint([Slice.whole("b", zero), Slice.whole("a", zero + 1)])


def test_tensor_sums_tell_which_tensor_differs() -> None:
    good = [Slice.whole(name, tensor_of((5, 3), torch.bfloat16, i)) for i, name in enumerate("abc")]
    bad = [*good[:1], Slice.whole("b", good[1].tensor + 1), good[2]]
    one, two = tensor_sums(good), tensor_sums(bad)
    assert [name for name in one if one[name] != two[name]] == ["b"]


def test_incomplete_and_repeated_coverage_is_refused() -> None:
    tensor = torch.randn(4, 2)
    total = Fingerprint()
    total.add(Slice("a", (4, 2), (0, 0), tensor[:3]))
    with pytest.raises(ValueError, match="a: 6 of its 8 elements"):
        total.hexdigest()
    with pytest.raises(ValueError, match="twice"):
        total.add(Slice("a", (4, 2), (2, 0), tensor[2:]))
    with pytest.raises(ValueError, match="earlier one"):
        total.add(Slice("a", (4, 2), (3, 0), tensor[3:].half()))
    total.add(Slice("a", (4, 2), (3, 0), tensor[3:]))
    assert total.hexdigest() == fingerprint([Slice.whole("a", tensor)])


def test_it_is_pinned() -> None:
    """Manifests on disk carry it: a change of the formula must be noticed."""
    tensor = torch.arange(12, dtype=torch.float32).view(3, 4)
    assert fingerprint([Slice.whole("w", tensor)]) == "bbd5f2fb112859fe2efb180eb34bcb5d"


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_words_come_with_the_sum(dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks that begin and end anywhere, in runs of keys and in words."""
    if not compiled:
        monkeypatch.setattr(module, "native", lambda: None)
    whole = tensor_of((2, module._RUN + 4099), dtype, 3).view(-1)
    for begin, end in ((0, len(whole)), (1, 2), (module._RUN - 3, 2 * module._RUN + 5), (7, 7 + 2 * 2048 + 1), (5, 5)):
        piece = Slice("w", tuple(whole.shape), (begin,), whole[begin:end])
        total = Fingerprint()
        assert total.add(piece, words=True) == word_sum(piece.tensor)
        again = Fingerprint()
        assert again.add(piece) == 0 and again._sums == total._sums


@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_threads_that_share_a_sum(dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one run and of several, that begin and end anywhere; the formula in NumPy says what they sum up to."""
    if native() is None:
        pytest.skip("no C compiler")
    monkeypatch.setattr(thread_thresholds, "BYTES", 0)
    run = module._RUN
    whole = (tensor_of((5 * run + 99,), torch.float32, 3) * 99).to(dtype)
    for begin, end in ((0, len(whole)), (5, 6), (9, run + 9), (2 * run - 1, 4 * run + 1), (run, 4 * run), (3, 3)):
        piece = Slice("w", tuple(whole.shape), (begin,), whole[begin:end])
        with monkeypatch.context() as without:
            without.setattr(module, "native", lambda: None)
            expected = module._block_sum(piece, words=True)
        torch.set_num_threads(threads)
        try:
            assert module._block_sum(piece, words=True) == expected
            assert word_sum(piece.tensor) == expected[1]
        finally:
            torch.set_num_threads(1)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_integers() -> None:
    for dtype in DTYPES:
        whole = Slice.whole("w", tensor_of((300, 1000), dtype, 0))
        assert tensor_sums([whole]) == tensor_sums([Slice.whole("w", whole.tensor.cuda())])
        rows = 3 * module._RUN // 1000  # some runs of keys in, and not at the beginning of one
        long = tensor_of((rows + 40, 1000), dtype, 1)
        parts = [Slice("w", tuple(long.shape), (at, 0), long[at:end]) for at, end in ((0, 1), (1, rows), (rows, rows + 40))]
        cut = [Slice(p.name, p.shape, p.offset, p.tensor.cuda()) for p in parts]
        assert tensor_sums(parts) == tensor_sums(cut) == tensor_sums([Slice.whole("w", long)])
        for part in (whole.tensor, whole.tensor[:7, :3], whole.tensor[1:, 1:], whole.tensor[0, :1]):
            assert word_sum(part) == word_sum(part.cuda())
