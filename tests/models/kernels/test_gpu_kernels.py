"""The kernels for CUDA devices against PyTorch in float64.

`pytest -m gpu` where there is a device. TRITON_INTERPRET=1 runs them without one, where Triton is installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tidemill.models.attention import packed_attention
from tidemill.models.decoder import rotate
from tidemill.models.kernels.cpu.packed_sequences import Families
from tidemill.models.kernels.cuda import launchers as module
from tidemill.models.kernels.cuda.cuda_check import right
from tidemill.models.kernels.cuda.launchers import Gpu
from tidemill.models.kernels.cuda.tiles import cut
from tidemill.models.kernels.rotation import Rotation

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16]
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# bfloat16: roundings on the way may fall to the other side, and the interpreter cuts off where a device rounds.
ERROR = {torch.float32: 3e-6, torch.bfloat16: 2**-7 if DEVICE == "cuda" else 2**-5}


@pytest.fixture(scope="module")
def kernels() -> Gpu:
    return Gpu()


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def of_int(*numbers: int) -> torch.Tensor:
    return torch.tensor(np.array(numbers, np.int32), device=DEVICE)


def close(found: torch.Tensor, expected: torch.Tensor, error: float) -> None:
    torch.testing.assert_close(found.double().cpu(), expected.double().cpu(), atol=error, rtol=error)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.double(), weight.shape, None, eps).to(x.dtype).double() * weight.double()


def off(right: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    return right * 1.01 if isinstance(right, torch.Tensor) else tuple(off(each) for each in right)  # type: ignore


def test_the_trial_passes_and_notices(kernels: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    assert right(kernels, torch.device(DEVICE))
    for name in ("norm", "rotate", "gate"):
        with monkeypatch.context() as patch:
            patch.setattr(Gpu, name, lambda *args, own=getattr(Gpu, name): off(own(*args)))
            assert not right(kernels, torch.device(DEVICE)), name


@pytest.mark.parametrize("name", ["attend", "attend_tiles"])
def test_the_trial_notices_attention_that_is_off(kernels: Gpu, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*args, own=getattr(Gpu, name)) -> None:
        own(*args)
        args[-1].mul_(1.01)

    monkeypatch.setattr(Gpu, name, attend)
    assert not right(kernels, torch.device(DEVICE))


def test_a_trainer_that_computes_in_bfloat16_may_be_the_first_to_ask(kernels: Gpu) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert right(kernels, torch.device(DEVICE))
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size", [(1, 1), (3, 17), (40, 1000)])
def test_norm(kernels: Gpu, dtype: torch.dtype, rows: int, size: int) -> None:
    x, weight = (drawn(rows, size + 5) * 3).to(dtype)[:, :size], drawn(size, seed=1, dtype=dtype)
    found = kernels.norm(x, weight, 1e-6)
    assert found.dtype == dtype
    close(found, normed(x, weight, 1e-6), ERROR[dtype])


def kept(pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: np.ndarray) -> torch.Tensor:
    """The pages, with k and v [n, K, E] in these places [n]."""
    page, offset = (torch.from_numpy(part).to(DEVICE) for part in np.divmod(places.astype(np.int64), pages.shape[2]))
    pages[page, :, offset] = torch.cat((k, v), dim=-1)
    return pages


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norms", [True, False])
@pytest.mark.parametrize("n, queries, keys, size", [(1, 1, 1, 2), (5, 4, 2, 16), (9, 3, 1, 24), (7, 8, 8, 128)])
def test_rotate(kernels: Gpu, dtype: torch.dtype, with_norms: bool, n: int, queries: int, keys: int, size: int) -> None:
    heads = (drawn(n, queries + 2 * keys, size) * 2).to(dtype)
    angles = drawn(n, 1, size // 2, seed=3) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = (drawn(size, seed=1, dtype=dtype), drawn(size, seed=2, dtype=dtype)) if with_norms else None
    found = torch.cat(kernels.rotate(heads, Rotation(cos, sin, queries, keys, norms, 1e-5))[:2], dim=1)
    q, k = heads[:, :queries], heads[:, queries : queries + keys]
    if norms is not None:
        q, k = normed(q, norms[0], 1e-5).to(dtype), normed(k, norms[1], 1e-5).to(dtype)
    close(found, rotate(torch.cat((q, k), dim=1).double(), cos.double(), sin.double()), 4 * ERROR[dtype])
    page, places = 3, np.random.default_rng(n).permutation(12)[:n]
    pages = torch.full((4, keys, page, 2 * size), torch.nan, dtype=dtype, device=DEVICE)
    q = kernels.rotate_into(heads, Rotation(cos, sin, queries, keys, norms, 1e-5), pages, of_int(*places))
    expected = kept(torch.full_like(pages, torch.nan), found[:, queries:], heads[:, queries + keys :], places)
    assert torch.equal(q, found[:, :queries]) and torch.equal(pages.nan_to_num(-7), expected.nan_to_num(-7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, size", [(1, 1), (7, 13), (5, 3000)])
def test_gate(kernels: Gpu, dtype: torch.dtype, n: int, size: int) -> None:
    x = (drawn(n, 2 * size) * 20).to(dtype)
    x[0, 0] = -200.0
    gate, up = x[:, :size].double(), x[:, size:].double()
    close(kernels.gate(x), F.silu(gate) * up, 4 * ERROR[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("programs", [1, module.PROGRAMS])  # with one, each row goes through all its tiles in one
@pytest.mark.parametrize(
    "rows, heads, kv_heads, size, page",
    [(1, 4, 2, 32, 16), (5, 16, 8, 128, 16), (3, 6, 1, 64, 32), (70, 8, 8, 16, 5), (2, 1, 1, 256, 8)],
)
def test_attend(kernels: Gpu, dtype: torch.dtype, window: int | None, rows: int, heads: int, kv_heads: int,
                          size: int, page: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Rows of many lengths, in pages strewn over the cache; what no row owns is not a number and must not be seen."""
    monkeypatch.setattr(module, "PROGRAMS", programs)
    if DEVICE == "cpu" and (dtype == torch.bfloat16 or rows > 5):
        pytest.skip("interpreted: products of bfloat16 are wrong there, and many rows take minutes")
    rng = np.random.default_rng(rows)
    lengths = rng.integers(1, 200, rows)
    lengths[0] = 131
    lengths[3:4] = 0
    width = -(-int(lengths.max()) // page) + 1
    table = rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    pages = torch.full((rows * width, kv_heads, page, 2 * size), torch.nan, dtype=dtype, device=DEVICE)
    k, v = (drawn(int(lengths.sum()), kv_heads, size, seed=i, dtype=dtype) for i in (1, 2))
    slots = [table[r, at // page] * page + at % page for r in range(rows) for at in range(lengths[r])]
    kept(pages, k, v, np.array(slots))
    q = drawn(rows, heads + 3, size, seed=3, dtype=dtype)[:, :heads]
    there = torch.from_numpy(np.ascontiguousarray(table)).to(DEVICE).view(-1)
    found = torch.full((rows, heads, size), torch.nan, dtype=dtype, device=DEVICE)
    kernels.attend(pages, q, there, of_int(width), of_int(*lengths), window, found)
    ends = np.cumsum(lengths)
    for row, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        seen = slice(end - min(length, window or length), end)
        keys, values = (x[seen].double().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        weights = torch.softmax(torch.einsum("he,the->ht", q[row].double(), keys) * size**-0.5, -1)
        expected = torch.einsum("ht,the->he", weights, values)
        close(found[row], expected, ERROR[dtype] * 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize(
    "heads, kv_heads, size, page", [(4, 2, 32, 16), (16, 8, 128, 16), (7, 1, 64, 32), (8, 8, 16, 16), (2, 1, 256, 8)]
)
def test_chunks_see_what_is_before_them(
    kernels: Gpu, dtype: torch.dtype, window: int | None, heads: int, kv_heads: int, size: int, page: int
) -> None:
    """(length, of which the last ones are asked for); the others' places in the row are left alone."""
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("interpreted: products of bfloat16 are wrong there")
    chunks, others = [(1, 1), (150, 9), (67, 67), (130, 2)], 5
    width = 20 if page == 8 else 12
    rng = np.random.default_rng(size)
    table = rng.permutation(len(chunks) * width).reshape(-1, width).astype(np.int32)
    pages = torch.full((len(chunks) * width, kv_heads, page, 2 * size), torch.nan, dtype=dtype, device=DEVICE)
    total = sum(length for length, _ in chunks)
    k, v = (drawn(total, kv_heads, size, seed=i, dtype=dtype) for i in (1, 2))
    places = [table[r, at // page] * page + at % page for r, (length, _) in enumerate(chunks) for at in range(length)]
    kept(pages, k, v, np.array(places))
    asked = np.array([count for _, count in chunks])
    q = drawn(others + asked.sum(), heads + 3, size, seed=3, dtype=dtype)[:, :heads]
    of, begin = cut(asked, kernels.tile(heads, kv_heads))
    first = np.cumsum(asked) - asked
    tiles = [
        (r, others + first[r] + at, chunks[r][0] - asked[r] + at, min(kernels.tile(heads, kv_heads), asked[r] - at))
        for r, at in zip(of, begin, strict=True)
    ]
    found = torch.full((len(q), heads, size), 7.0, dtype=dtype, device=DEVICE)
    given = of_int(*(number for tile in [*tiles, (0, 0, 0, 0)] for number in tile)).view(-1, 4)
    kernels.attend_tiles(pages, q, given, of_int(*table.reshape(-1)), of_int(width), window, found)
    assert (found[:others] == 7).all()
    at, end = others, 0
    for length, count in chunks:
        end += length
        for i in range(count):
            until = end - count + i + 1
            seen = slice(max(end - length, until - (window or length)), until)
            keys, values = (x[seen].double().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
            weights = torch.softmax(torch.einsum("he,the->ht", q[at].double(), keys) * size**-0.5, -1)
            close(found[at], torch.einsum("ht,the->he", weights, values), ERROR[dtype] * 2)
            at += 1


@pytest.mark.parametrize("vocab", [2, 500, 2048, 5000, 40_001])
def test_sample(kernels: Gpu, vocab: int) -> None:
    """The first token whose cumulative probability exceeds the uniform number, and its exact logprobs."""
    rng = np.random.default_rng(vocab)
    n = 32
    logits = drawn(n, vocab, seed=vocab) * 3
    logits[:8, vocab // 2 + 1 :] = -torch.inf
    temperature = np.resize([1.0, 0.0, 0.7, 2.5], n)
    uniform = rng.random(n)
    uniform[:4], uniform[4:8] = 0.0, np.nextafter(1, 0)
    tokens, logprobs, model = kernels.sample(logits, temperature, uniform)
    exact = logits.double().cpu().log_softmax(-1).numpy()
    greedy, rows = temperature == 0, np.arange(n)
    assert (tokens[greedy] == exact[greedy].argmax(-1)).all() and (logprobs[greedy] == 0).all()
    heat = torch.from_numpy(np.where(greedy, 1, temperature))[:, None]
    tempered = (logits.double().cpu() / heat).log_softmax(-1).numpy()
    np.testing.assert_allclose(model, exact[rows, tokens], atol=1e-5)
    np.testing.assert_allclose(logprobs[~greedy], tempered[rows, tokens][~greedy], atol=1e-5)
    cumulative = np.exp(tempered).cumsum(-1)
    after, before = cumulative[rows, tokens], np.where(tokens > 0, cumulative[rows, tokens - 1], 0)
    assert ((before - 2e-6 <= uniform) & (uniform <= after + 2e-6))[~greedy].all()


def test_what_cannot_be_is_never_sampled_and_nonsense_is_seen(kernels: Gpu) -> None:
    logits = torch.full((3, 4100), -torch.inf, device=DEVICE)
    logits[:, 4097], logits[:, 11] = 0.0, -1.0
    tokens, _, _ = kernels.sample(logits, np.ones(3), np.array([0.0, 0.5, np.nextafter(1, 0)]))
    assert tokens.tolist() == [11, 4097, 4097]
    logits[1, 5] = torch.nan
    logits[2, 5] = torch.inf
    _, logprobs, model = kernels.sample(logits, np.ones(3), np.full(3, 0.5))
    assert np.isfinite(logprobs).tolist() == [True, False, False] == np.isfinite(model).tolist()
    _, logprobs, model = kernels.sample(logits, np.zeros(3), np.full(3, 0.5))
    assert np.isfinite(logprobs[0]) and np.isfinite(model).tolist() == [True, False, False]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_sampled_is_fed_to_what_is_launched_next(kernels: Gpu, temperature: float) -> None:
    """Of the vocabulary even where the logits are none."""
    n, vocab = 300, 2500
    logits = drawn(n, vocab, seed=1)
    logits[7], logits[8, 3], logits[9, 2400] = torch.nan, torch.nan, torch.inf
    into = torch.full((n + 5,), -7, dtype=torch.int32, device=DEVICE)
    read = kernels.sampling(logits, np.full(n, temperature), np.linspace(0, 1, n, endpoint=False), into)
    given = torch.tensor([-1 - at if at % 3 else at for at in range(n)], dtype=torch.int32, device=DEVICE)
    fed = kernels.feed(given, into).tolist()
    tokens, _, model = read()
    numbers = np.isfinite(model)
    assert (np.array(into[:n].tolist())[numbers] == tokens[numbers]).all() and into[n:].tolist() == [-7] * 5
    assert (~numbers).nonzero()[0].tolist() == [7, 8, 9] and int(into[:n].min()) >= 0 and int(into[:n].max()) < vocab
    assert fed == [int(into[at]) if at % 3 else at for at in range(n)]
    assert [len(part) for part in kernels.sampling(logits[:0], np.ones(0), np.ones(0), into)()] == [0] * 3


@pytest.mark.parametrize("wanted", ["logprobs", "entropies", "both"])
@pytest.mark.parametrize("vocab", [3, 2048, 4099])
def test_logprobs_and_their_gradient(kernels: Gpu, vocab: int, wanted: str) -> None:
    """Against autograd in float64; a third of the rows is of a distribution over some tokens only."""
    n = 6
    logits = drawn(n, vocab, seed=vocab) * 4
    targets = torch.arange(n, device=DEVICE) * 7 % vocab
    logits[::3, 1:] = -torch.inf
    targets[::3] = 0
    heat = torch.linspace(0.5, 2, n, device=DEVICE)
    exact = logits.double().cpu().requires_grad_()
    every = torch.log_softmax(exact / heat.double().cpu()[:, None], -1)
    chosen = every.gather(1, targets.cpu()[:, None]).squeeze(1)
    entropy = -(every.exp() * every.clamp_min(-1e9)).sum(-1)
    totals, logprobs, entropies = kernels.summarise(logits, heat, targets, wanted != "logprobs")
    close(logprobs, chosen, 1e-5)
    close(totals, torch.logsumexp(logits.double() / heat.double()[:, None], -1), 1e-5)
    with_logprobs, with_entropies = wanted != "entropies", wanted != "logprobs"
    weights = drawn(2, n, seed=1)
    loss = (chosen * weights[0].double().cpu()).sum() * with_logprobs
    loss = loss + (entropy * weights[1].double().cpu()).sum() * with_entropies
    loss.backward()
    if entropies is None:
        entropies = torch.empty(0, device=DEVICE)
    else:
        close(entropies, entropy, 1e-5)
    found = kernels.differentiate(
        logits.clone(), heat, targets, totals, entropies,
        weights[0] if with_logprobs else None, weights[1] if with_entropies else None,
    )  # fmt: skip
    close(found, torch.nan_to_num(exact.grad), 1e-5)


def backwards(compute: Callable[..., torch.Tensor], d: torch.Tensor, *given: torch.Tensor) -> list[torch.Tensor]:
    """What comes out, and what a loss changes by with each of those given, by autograd in float64."""
    leaves = [x.double().cpu().requires_grad_() for x in given]
    out = compute(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, d.double().cpu())]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("rows, size", [(1, 1), (3, 17), (700, 100)])
def test_norm_back(kernels: Gpu, dtype: torch.dtype, again: bool, rows: int, size: int) -> None:
    """Of float32 rows too, whose norm is read in bfloat16."""
    x, weight = (drawn(rows, size + 5) * 3)[:, :size], drawn(size, seed=1)
    d = drawn(rows, size, seed=2, dtype=dtype)
    made, d_x, d_weight = backwards(lambda x, w: F.rms_norm(x, (size,), w, 1e-6), d, x, weight)
    given = d.clone()
    found = kernels.norm_back(x, weight, 1e-6, given, again)
    close(found[0], d_x, 1e-5)
    close(found[1], d_weight, 1e-4)
    close(given, made if again else d, ERROR[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("n, size", [(1, 1), (7, 13), (5, 3000)])
def test_gate_back(kernels: Gpu, dtype: torch.dtype, again: bool, n: int, size: int) -> None:
    x, d = (drawn(n, 2 * size) * 5).to(dtype), drawn(n, size, seed=1, dtype=dtype)
    x[0, 0] = -60.0
    made, d_x = backwards(lambda x: F.silu(x[:, :size]) * x[:, size:], d, x)
    given = d.clone()
    close(kernels.gate_back(x, given, again), d_x, 4 * ERROR[dtype])
    close(given, made if again else d, 4 * ERROR[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norms", [True, False])
@pytest.mark.parametrize("n, queries, keys, size", [(1, 1, 1, 2), (5, 4, 2, 16), (9, 3, 1, 24), (600, 8, 8, 32)])
def test_rotate_back(kernels: Gpu, dtype: torch.dtype, with_norms: bool, n: int, queries: int, keys: int, size: int) -> None:
    """The norms' weights are float32, whatever the heads are, as a trainer's are."""
    heads = (drawn(n, queries + 2 * keys, size) * 2).to(dtype)
    angles = drawn(n, 1, size // 2, seed=3) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = (drawn(size, seed=1), drawn(size, seed=2)) if with_norms else None
    d = [
        drawn(n, heads_of + 1, size, seed=4 + i, dtype=dtype)[:, :heads_of]
        for i, heads_of in enumerate((queries, keys, keys))
    ]

    def compute(heads: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        q, k, v = heads.split([queries, keys, keys], 1)
        if weights:
            q, k = (F.rms_norm(x, (size,), weight, 1e-5) for x, weight in zip((q, k), weights, strict=True))
        return torch.cat((rotate(torch.cat((q, k), 1), cos.double().cpu(), sin.double().cpu()), v), 1)

    _, d_heads, *d_weights = backwards(compute, torch.cat(d, 1), heads, *(norms or ()))
    how = Rotation(cos, sin, queries, keys, norms, 1e-5)
    found, sums = kernels.rotate_back(heads, how, (d[0], d[1], d[2]))
    assert found.dtype == dtype
    close(found, d_heads, 8 * ERROR[dtype])
    if norms is not None:
        scale = float(torch.stack(d_weights).abs().max())
        close(sums / scale, torch.stack(d_weights) / scale, 4 * ERROR[dtype])


SEQUENCES = [
    ([1], [0]),
    ([5, 9, 3], [0, 0, 0]),
    ([200, 130, 131, 70, 70, 64, 300], [0, 65, 129, 3, 70, 0, 64]),
    ([90, 150, 150, 150], [0, 90, 64, 150]),
]


@pytest.mark.parametrize("window", [None, 9, 70])
@pytest.mark.parametrize("heads, kv_heads, size", [(2, 1, 16), (16, 8, 128), (7, 1, 64), (3, 3, 32)])
@pytest.mark.parametrize("lengths, shared", SEQUENCES)
def test_attention_inside_packed_sequences(
    kernels: Gpu, lengths: list[int], shared: list[int], heads: int, kv_heads: int, size: int, window: int | None
) -> None:
    """Forwards and back, of sequences that share what they begin with; operands are parts of larger ones."""
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    if DEVICE == "cpu" and size > 32:
        pytest.skip("interpreted: it takes minutes")
    families = Families.of(lengths, shared)
    everything = drawn(families.tokens, heads + 2 * kv_heads + 1, size).to(dtype)
    q, k, v, _ = everything.split([heads, kv_heads, kv_heads, 1], 1)
    d = drawn(families.tokens, heads, size, seed=1).to(dtype)
    exact = packed_attention(families, [window])
    expected = backwards(lambda *given: exact(0, *given), d, q, k, v)
    out, totals = kernels.see(q, k, v, families, window)
    found = [out, *kernels.see_back(q, k, v, out, totals, d, families, window)]
    for name, ours, theirs in zip(("out", "d q", "d k", "d v"), found, expected, strict=True):
        assert ours.dtype == dtype and ours.shape == theirs.shape
        wrong = float((ours.double().cpu() - theirs).norm() / (1 + theirs.norm()))  # of one token, d q is 0
        assert wrong < {torch.float32: 2e-6, torch.bfloat16: 8e-3}[dtype], f"{name}: {wrong}"


def test_logits_gradient_may_be_narrow(kernels: Gpu) -> None:
    logits, heat, targets = drawn(3, 5000), torch.ones(3, device=DEVICE), torch.tensor([1, 4999, 7], device=DEVICE)
    totals, _, entropies = kernels.summarise(logits, heat, targets, True)
    d = drawn(3, seed=1)
    assert entropies is not None
    narrow = kernels.differentiate(logits, heat, targets, totals, entropies, d, None, torch.bfloat16)
    assert narrow.dtype == torch.bfloat16
    exact = kernels.differentiate(logits, heat, targets, totals, entropies, d, None)
    assert exact is logits
    close(narrow, exact, 2**-8)
