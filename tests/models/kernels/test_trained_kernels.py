"""Gradients of what lies between the matrix products: the kernels against PyTorch's own operations in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.models.decoder import rotate
from tidemill.models.kernels.cpu.bindings import Native
from tidemill.models.kernels.cpu.trained_kernels import Trained, as_tensor, layer_kernels
from tidemill.models.kernels.library import native
from tidemill.models.kernels.rotation import Rotation

FLOAT, NARROW = torch.float32, torch.bfloat16
ERROR = {FLOAT: 1e-6, NARROW: 2**-8}  # of a tensor, in proportion to its norm
SIZES = [(1, 2), (1, 64), (3, 17), (70, 48), (200, 128), (33, 1000)]


class Made(Trained):
    """What products make is made at once."""

    def norm(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
        return as_tensor(super().norm(x, weight, eps, dtype))

    def gate(self, gate_up: Tensor) -> Tensor:
        return as_tensor(super().gate(gate_up))


@pytest.fixture
def trained(kernels: Native) -> Made:
    return Made(kernels)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = FLOAT, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def learnt(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.detach().requires_grad_() for t in tensors)


def exact(*tensors: Tensor) -> tuple[Tensor, ...]:
    return learnt(*(t.detach().double() for t in tensors))


def close(found: Tensor, expected: Tensor, error: float) -> None:
    assert found.shape == expected.shape
    assert float((found.detach().double() - expected.detach()).norm()) <= error * float(expected.detach().norm()) + 1e-30


def gradients(outputs: list[Tensor], inputs: tuple[Tensor, ...], seed: int = 7) -> tuple[Tensor, ...]:
    d = [drawn(*out.shape, seed=seed + i, dtype=NARROW).to(out.dtype) for i, out in enumerate(outputs)]
    found = torch.autograd.grad(outputs, inputs, d)
    assert all(g.dtype == given.dtype for g, given in zip(found, inputs, strict=True))
    return found


def normed(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


@pytest.mark.parametrize("read, weighed, wrote", [(FLOAT, FLOAT, None), (FLOAT, FLOAT, NARROW), (NARROW, NARROW, None)])
@pytest.mark.parametrize("rows, size", SIZES)
def test_norm(trained: Made, rows, size, read, weighed, wrote) -> None:
    x, weight = learnt(drawn(rows, size, dtype=read, scale=3), drawn(size, seed=1, dtype=weighed))
    out = trained.norm(x, weight, 1e-5, wrote)
    expected = normed(*(wide := exact(x, weight)))
    assert out.dtype == (wrote or read)
    close(out, expected, ERROR[out.dtype])
    for found, right in zip(gradients([out], (x, weight)), gradients([expected], wide), strict=True):
        close(found, right, ERROR[read])


@pytest.mark.parametrize("read, weighed, turned", [(FLOAT, FLOAT, FLOAT), (NARROW, FLOAT, FLOAT), (NARROW, NARROW, NARROW)])
@pytest.mark.parametrize("with_norms", [True, False])
@pytest.mark.parametrize(
    "n, queries, keys, size", [(1, 1, 1, 2), (5, 4, 2, 16), (60, 3, 1, 24), (70, 4, 4, 32), (33, 8, 2, 64), (130, 2, 1, 128)]
)
def test_rotate(trained: Made, n, queries, keys, size, with_norms, read, weighed, turned) -> None:
    angles = torch.rand(n, 1, size // 2, generator=torch.Generator().manual_seed(n)) * 6
    cos, sin = angles.cos().to(turned), angles.sin().to(turned)
    heads = drawn(n, queries + 2 * keys, size, dtype=read, scale=2)
    weights = [drawn(size, seed=i, dtype=NARROW).to(weighed) for i in (1, 2)] if with_norms else []
    given = learnt(heads, *weights)
    found = trained.rotate(given[0], Rotation(cos, sin, queries, keys, (given[1], given[2]) if weights else None, 1e-5))
    assert [part.dtype for part in found] == [torch.promote_types(read, turned)] * 2 + [read]
    wide = exact(heads, *weights)
    q, k, v = wide[0].split([queries, keys, keys], dim=1)
    if weights:
        q, k = normed(q, wide[1]), normed(k, wide[2])
    expected = [rotate(q, cos.double(), sin.double()), rotate(k, cos.double(), sin.double()), v]
    for part, right in zip(found, expected, strict=True):
        close(part, right, 2 * ERROR[read])  # thrice rounded
    for part, right in zip(gradients(list(found), given), gradients(expected, wide), strict=True):
        close(part, right, ERROR[read])


def test_what_is_narrow_is_rounded_where_a_narrow_model_rounds(trained: Made) -> None:
    """Under autocast weights and angles are wide: a narrow row is rounded, weights are, and what comes of both."""
    x, weight = drawn(50, 3, 64, dtype=NARROW), drawn(64, seed=1)
    right = F.rms_norm(x.float(), (64,), None, 1e-5).to(NARROW) * weight.to(NARROW)
    q, k, _ = trained.rotate(x, Rotation(torch.ones(50, 1, 32), torch.zeros(50, 1, 32), 1, 1, (weight, weight), 1e-5))
    for found, expected in ((trained.norm(x, weight, 1e-5), right), (q, right[:, :1].float()), (k, right[:, 1:2].float())):
        assert found.dtype == expected.dtype
        assert (found == expected).double().mean() > 0.99  # a scale's last place may turn a rounding


@pytest.mark.parametrize("dtype", [FLOAT, NARROW])
@pytest.mark.parametrize("n, size", [(1, 1), (7, 13), (50, 256), (20, 700)])
def test_gate(trained: Made, n, size, dtype) -> None:
    (x,) = learnt(drawn(n, 2 * size, dtype=dtype, scale=4))
    with torch.no_grad():
        x[0, 0], x[-1, 0] = -200.0, 200.0
    (wide,) = exact(x)
    gate, up = wide.chunk(2, dim=-1)
    out, expected = trained.gate(x), F.silu(gate) * up
    close(out, expected, ERROR[dtype])
    close(*gradients([out], (x,)), *gradients([expected], (wide,)), ERROR[dtype])


def test_a_number_alone(trained: Made) -> None:
    """Its norm does not depend on it but for eps: what is left of two large numbers is small."""
    x, weight = learnt(torch.tensor([[0.01], [3.0]]), torch.tensor([2.0]))
    expected = torch.autograd.grad(normed(*(wide := exact(x, weight))).sum(), wide)
    found = torch.autograd.grad(trained.norm(x, weight, 1e-5).sum(), (x, weight))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [FLOAT, NARROW])
def test_any_strides(trained: Made, dtype) -> None:
    """Of what comes in, and of the gradients that come back."""

    def apart(*shape: int, seed: int) -> Tensor:  # no dimension is dense
        return drawn(*shape, 2, seed=seed, dtype=dtype)[..., 0].transpose(0, -1).contiguous().transpose(0, -1)

    cos, sin = (apart(20, 1, 8, seed=i) for i in (4, 5))
    weights = drawn(16, seed=2, dtype=dtype), drawn(16, seed=3, dtype=dtype)
    x, heads, gate_up = apart(20, 30, seed=0), apart(20, 7, 16, seed=1), apart(20, 26, seed=6)

    def all_of(x: Tensor, heads: Tensor, gate_up: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        x, heads, gate_up = learnt(x, heads, gate_up)
        normed = trained.norm(x, torch.ones(30, dtype=dtype), 1e-5)
        turned = trained.rotate(heads, Rotation(cos, sin, 3, 2, weights, 1e-5))
        outputs = [normed, *turned, trained.gate(gate_up)]
        grads = [apart(*out.shape, seed=9) for out in outputs]
        if x.is_contiguous():
            grads = [g.contiguous() for g in grads]
        return [*outputs, *torch.autograd.grad(outputs, (x, heads, gate_up), grads)]

    assert not x.is_contiguous() and not heads.is_contiguous() and not gate_up.is_contiguous()
    given = x, heads, gate_up, cos, sin
    for a, b in zip(all_of(*given), all_of(*(t.contiguous() for t in given)), strict=True):
        assert torch.equal(a, b)
    summed = torch.autograd.grad(trained.gate(g := learnt(gate_up)[0]).sum(), g)[0]  # of stride 0
    assert torch.equal(summed, torch.autograd.grad(trained.gate(g), g, torch.ones(20, 13, dtype=dtype))[0])


@pytest.mark.parametrize("n", [17, 64, 1000])
def test_the_same_bits_with_any_number_of_threads(trained: Made, threads: None, n) -> None:
    x, weight, gate_up = drawn(n, 40), drawn(40, seed=1), drawn(n, 50, seed=2)
    heads, angles = drawn(n, 8, 32, seed=3), drawn(n, 1, 16, seed=4)
    weights = drawn(32, seed=5), drawn(32, seed=6)

    def every() -> list[Tensor]:
        given = learnt(x, weight, heads, *weights, gate_up)
        turned = trained.rotate(given[2], Rotation(angles.cos(), angles.sin(), 4, 2, (given[3], given[4]), 1e-5))
        outputs = [trained.norm(given[0], given[1], 1e-5), *turned, trained.gate(given[5])]
        return [*outputs, *gradients(outputs, given)]

    torch.set_num_threads(1)
    expected = every()
    for count in (2, 3, 7):
        torch.set_num_threads(count)
        assert all(torch.equal(a, b) for a, b in zip(every(), expected, strict=True))


def test_what_has_no_use_for_a_gradient(trained: Made) -> None:
    """Outputs that no loss reads, no rows at all, and weights that are not trained."""
    (heads,) = learnt(drawn(5, 4, 16))
    cos, sin = drawn(5, 1, 8, seed=1), drawn(5, 1, 8, seed=2)
    weights = drawn(16, seed=3), drawn(16, seed=4)
    v = trained.rotate(heads, Rotation(cos, sin, 2, 1, weights, 1e-5))[2]
    (found,) = torch.autograd.grad(v.sum(), heads)
    assert torch.equal(found, (torch.arange(4) == 3).float()[:, None].expand(5, 4, 16))
    q = trained.rotate(heads, Rotation(cos, sin, 2, 1, weights, 1e-5))[0]
    (found,) = torch.autograd.grad(q.sum(), heads)
    assert found[:, :2].all() and not found[:, 2:].any()
    x, weight = learnt(torch.empty(0, 8), torch.ones(8))
    found = torch.autograd.grad(trained.norm(x, weight, 1e-5).sum(), (x, weight))
    assert found[0].shape == (0, 8) and torch.equal(found[1], torch.zeros(8))


def test_a_gradient_that_comes_in_is_only_read(trained: Made) -> None:
    """Others may read it: of a sum, all that was added gets the same one."""
    x, weight = learnt(drawn(9, 40), drawn(40, seed=1))
    for out in (trained.norm(x, weight, 1e-5), trained.gate(x)):
        d = drawn(*out.shape, seed=2)
        torch.autograd.grad(out, x, given := d.clone())
        assert torch.equal(given, d)


def test_a_second_derivative_is_refused(trained: Made) -> None:
    (x,) = learnt(drawn(3, 8))
    (once,) = torch.autograd.grad(trained.gate(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


def test_where_they_are_used() -> None:
    x = torch.ones(3)
    assert isinstance(layer_kernels(x, x.bfloat16()), Trained) == (native() is not None)
    for other in (x.double(), x.half(), x.to("meta")):
        assert layer_kernels(other) is None and layer_kernels(x, other) is None
    with torch.no_grad():
        assert layer_kernels(x) is native() and layer_kernels(x.double()) is None
