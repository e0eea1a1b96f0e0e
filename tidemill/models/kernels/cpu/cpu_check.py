"""Check of the CPU kernels: a small problem for each, against PyTorch and NumPy."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import torch
from torch import Tensor

from tidemill.models.kernels.cpu.bindings import NONE, Native
from tidemill.models.kernels.cpu.compilation import Unavailable
from tidemill.models.kernels.cpu.decode_pass import NORMS, DecodingRows, DecodingWeights
from tidemill.models.kernels.cpu.packed_sequences import Families
from tidemill.models.kernels.cuda.launchers import DTYPES
from tidemill.models.kernels.rotation import Rotation

EPS = 1e-6


def expect_right(library: Native) -> None:
    """Raise Unavailable for wrong answers; start no thread, as this process may fork."""
    by_dtype = (right(library, dtype) for right in (_attends, _decodes) for dtype in DTYPES)
    if not all(right(library) for right in TRIALS) or not all(by_dtype):
        raise Unavailable("the compiled kernels compute something else than they should")


def _pages(library: Native) -> bool:
    pages = np.sin(np.linspace(-1, 1, 3 * 2 * 16 * 64, dtype=np.float32)).reshape(3, 2, 16, 64)
    paged, queries = torch.from_numpy(pages), _numbers(2, 4, 32)
    library.write(paged, queries[:1, :2], queries[:1, 2:], np.array([17]))
    right = torch.equal(paged[1, :, 1], torch.cat((queries[0, :2], queries[0, 2:]), dim=-1))
    table = np.array([[1, 2], [1, 0], [1, 1], [2, 0]], np.int32)
    slots, lows, ends, asked = np.arange(4), np.array([0, 0, 0, 3]), np.array([20, 31, 17, 9]), queries.repeat(2, 1, 1)
    for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        operands = paged.to(dtype), asked.to(dtype)
        seen = library.attend(*operands, table, slots, lows, ends, slots, threads=1).float().numpy()
        for row, order in enumerate(table):
            kv = np.concatenate([pages[page] for page in order], axis=1)[:, lows[row] : ends[row]].repeat(2, axis=0)
            weights = np.exp((asked[row].numpy()[:, None] * kv[..., :32]).sum(-1) * 32**-0.5)
            expected = (weights[..., None] * kv[..., 32:]).sum(1) / weights.sum(1, keepdims=True)
            right &= np.allclose(seen[row], expected, atol=error)
    return right


def _sums(library: Native) -> bool:
    elements, keys, factors = torch.arange(40, dtype=torch.int16), torch.arange(32), torch.tensor([3, 5])
    keyed = int((elements * (keys * factors[:, None]).view(-1)[20:60]).sum())
    words = int(elements.view(torch.int32).sum())
    found = library.keyed_sum(elements, 20, keys, factors, words=True)
    wide, runs = torch.arange(70, dtype=torch.int32), torch.tensor([3, 5, 7])
    several = int((wide * (keys * runs[:, None]).view(-1)[:70]).sum())
    right = library.keyed_sum(wide, 0, keys, runs, words=True) == (several, int(wide.sum()))
    return right and library.word_sum(elements) == words and found == (keyed, words)


def _products(library: Native) -> bool:
    right, bases = True, torch.arange(33)[:, None] * 0.5 + 1
    for dtype, rows in product(DTYPES, (3, 13)):  # few rows, and enough to be multiplied side by side
        weight, x = bases.to(dtype) + torch.arange(64).to(dtype) % 7, _numbers(rows, 64).to(dtype)
        if library.packs(weight):
            packed = library.pack(weight)
            products = x.float()[:, None] * weight.float()  # `@` may start threads, and autocast rounds what it gives
            expected = products.sum(-1) + x.float()[:1, :33]
            seen = library.linear(x, packed, 33, x[0, :33].contiguous(), wide=True)
            right &= torch.allclose(seen, expected, atol=1e-2)
    return right


def _outers(library: Native) -> bool:
    """Check `add_outer` for an odd number of rows, and more outputs than are held at a time."""
    d, x, sums = _numbers(5, 15).bfloat16(), _numbers(5, 32).flip(0).bfloat16(), _numbers(15, 32)
    if not library.adds_outer(d, x):
        return True
    expected = sums + (d.float()[:, :, None] * x.float()[:, None]).sum(0)
    library.add_outer(d, x, sums)
    return _near(sums, expected)


def _attends(library: Native, dtype: torch.dtype) -> bool:
    """Check `see` and `see_back` for sequences that share an odd number of tokens."""
    error = 1e-5 if dtype == torch.float32 else 0.02
    of, (q, k, v) = Families.of([4, 6], [0, 3]), _numbers(7, 4, 32).to(dtype).split([2, 1, 1], dim=1)
    out, totals = library.see(q, k, v, of, None)
    d_q, d_k, d_v = library.see_back(q, k, v, out, totals, out, of, None)
    q, k, v = q.float(), k.float(), v.float()
    blind = [[i > t or (t > 3 and i == 3) for i in range(7)] for t in range(7)]
    scores = (q[:, None] * k).sum(-1) * 32**-0.5  # [query, key, head]
    weights = scores.exp().masked_fill(torch.tensor(blind)[:, :, None], 0)  # a softmax of PyTorch's may start threads
    total = weights.sum(1)
    weights = weights / total[:, None]
    expected = (weights[..., None] * v).sum(1)
    d_weights = (out.float()[:, None] * v).sum(-1)
    d_scores = weights * (d_weights - (weights * d_weights).sum(1, keepdim=True)) * 32**-0.5
    pairs = (
        (out, expected),
        (totals, total.log()),
        (d_q, (d_scores[..., None] * k).sum(1)),
        (d_k, (d_scores[..., None] * q[:, None]).sum((0, 2))[:, None]),
        (d_v, (weights[..., None] * out.float()[:, None]).sum((0, 2))[:, None]),
    )
    return all(torch.allclose(found.float(), exact, atol=error, rtol=error) for found, exact in pairs)


def _norms(library: Native) -> bool:
    x, weight, d = _numbers(3, 48), _numbers(48) + 2, _numbers(3, 48).flip(1)
    d_x, d_weight = _norm_back(x, weight, d)
    found = library.norm_back(x, weight, EPS, again := d.clone(), again=True)
    right = _near(library.norm(x, weight, EPS), _norm(x, weight)) and _near(again, _norm(x, weight))
    right &= _near(found[0], d_x) and _near(found[1], d_weight)
    narrow = library.norm(x.bfloat16(), weight.bfloat16(), EPS).float()
    return right and torch.allclose(narrow, _norm(x, weight), atol=0.05)


def _rotations(library: Native) -> bool:
    heads, norms, d = _numbers(3, 4, 32), (_numbers(32) + 2, _numbers(32) - 2), _numbers(3, 4, 32).flip(0)
    angles = _numbers(3, 1, 16)
    how = Rotation(angles.cos(), angles.sin(), 2, 1, norms, EPS)
    weights = torch.stack((norms[0], norms[0], norms[1]))
    q, k, others = library.rotate(heads, how)
    d_heads, d_norms = library.rotate_back(heads, how, (d[:, :2], d[:, 2:3], d[:, 3:]))
    expected = _turned(_norm(heads[:, :3], weights), how.cos, how.sin)
    d_turned, d_weights = _norm_back(heads[:, :3], weights, _turned(d[:, :3], how.cos, -how.sin))
    return (
        (_near(torch.cat((q, k), dim=1), expected) and torch.equal(others, heads[:, 3:]))
        and (_near(d_heads[:, :3], d_turned) and torch.equal(d_heads[:, 3:], d[:, 3:]))
        and _near(d_norms, torch.stack((d_weights[0] + d_weights[1], d_weights[2])))
    )


def _gates(library: Native) -> bool:
    both, d = _numbers(3, 40) * 3, _numbers(3, 20)
    gate, up = both[:, :20], both[:, 20:]
    share = 1 / (1 + (-gate).exp())
    d_both = torch.cat((d * up * share * (1 + gate * (1 - share)), d * gate * share), dim=1)
    right = _near(library.gate(both), gate * share * up) and _near(library.gate_back(both, d, again=True), d_both)
    return right and _near(d, gate * share * up)


def _decodes(library: Native, dtype: torch.dtype) -> bool:
    """Check `decode` for two rows of one token each, which see themselves, in one layer."""
    error, way = 1e-4 if dtype == torch.float32 else 0.1, library.products[dtype]
    if way == NONE:
        return True
    shapes = {"qkv": (64, 32), "o": (32, 32), "gate_up": (64, 32), "down": (32, 32)}
    matrices = {name: (_numbers(*shape) / 4).to(dtype) for name, shape in shapes.items()}
    norms = {
        name: (_numbers(16 if name in ("q_norm", "k_norm") else 32).roll(i) + 2).to(dtype) for i, name in enumerate(NORMS)
    }
    last, embedding, angles = _numbers(32).to(dtype), _numbers(4, 32).to(dtype), _numbers(3, 1, 8)
    cos, sin, table, slots = angles.cos().to(dtype), angles.sin().to(dtype), np.array([[2], [1]], np.int32), np.arange(2)
    tokens, positions, to = np.array([3, 1]), np.array([2, 0]), np.array([1, 0])
    packed = {name: library.pack(matrix) for name, matrix in matrices.items()}
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 32}
    weights = DecodingWeights([packed | norms], embedding, last, **shape, products=way, eps=EPS)
    kv = torch.zeros((1, 3, 1, 16, 32), dtype=dtype)
    room = torch.empty(library.decoding_room(weights, np.array([0, 2])), dtype=torch.uint8)
    given = (table, slots, [slots * 0], slots * 0 + 1, np.array([32, 16]), room)
    found = library.decode(weights, DecodingRows(tokens, positions, to, (cos, sin), kv, *given), threads=1)[to]
    x, cos, sin = embedding[tokens], cos[positions], sin[positions]

    def product(x: Tensor, name: str) -> Tensor:
        return (x[:, None] * matrices[name].float()).sum(-1)

    wide = {name: norm.float() for name, norm in norms.items()}
    heads = product(_norm(x.float(), wide["input_norm"]), "qkv").view(2, 4, 16)
    key = _turned(_norm(heads[:, 2:3], wide["k_norm"]), cos.float(), sin.float())
    x = x.float() + product(heads[:, 3].repeat(1, 2), "o")
    gate, up = product(_norm(x, wide["post_norm"]), "gate_up").chunk(2, dim=-1)
    x = x + product(gate / (1 + (-gate).exp()) * up, "down")
    written = kv[0, [2, 1], 0, 0].float()
    right = torch.allclose(written, torch.cat((key[:, 0], heads[:, 3]), dim=-1), atol=error, rtol=error)
    return right and torch.allclose(found.float(), _norm(x, last.float()), atol=error, rtol=error)


TRIALS = (_pages, _sums, _products, _outers, _norms, _rotations, _gates)


def _numbers(*shape: int) -> Tensor:
    """Numbers between -1 and 1, each unlike its neighbours."""
    assert math.prod(shape) <= 2048  # the cosine of more may start threads
    return torch.linspace(-2, 9, math.prod(shape)).cos().view(shape)


def _near(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-5)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _norm_back(x: Tensor, weight: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight, from the gradient d of `_norm`'s output."""
    scale = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    along = (d * weight * x).mean(-1, keepdim=True) * scale.square()
    return (d * weight - x * along) * scale, (d * x * scale).sum(0)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
