"""Products that autocast narrows, where the processor multiplies floats faster: its numbers, but for the order of sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_cases import CPU, batch, decoder, gradients

from tidemill.models.kernels.cpu.bindings import NONE, PAIRED, TILED, WIDENED
from tidemill.models.kernels.library import native
from tidemill.models.served_linear import Linear
from tidemill.trainer import training_pass
from tidemill.trainer.micro_batches import filled, rows_of

FLOAT, NARROW = torch.float32, torch.bfloat16
SHAPES = [(1, 16, 1), (5, 48, 33), (70, 17, 130), (300, 256, 64)]
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Chooses how the processor multiplies; at first as this module is for."""
    kernels = native()
    if kernels is None:
        pytest.skip("no C compiler")

    def choose(way: int) -> None:
        monkeypatch.setattr(kernels, "products", kernels.products | {NARROW: way})

    choose(WIDENED)
    return choose


def layer(inputs: int, outputs: int, bias: bool) -> Linear:
    made = Linear(inputs, outputs, bias)
    generator = torch.Generator().manual_seed(outputs)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(generator=generator)
    return made


def drawn(*shape: int, seed: int, dtype: torch.dtype = FLOAT) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradient_for(out: Tensor) -> Tensor:
    return drawn(*out.shape, seed=3, dtype=NARROW).to(out.dtype)


def computed(module: Linear, x: Tensor, product: Product | None = None) -> list[Tensor]:
    """What comes out of the layer, or of `product`, and the gradients of x and the layer's parameters."""
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", NARROW):
        out = module(x) if product is None else product(x, module.weight, module.bias)
    return [out, *torch.autograd.grad(out, [x, *module.parameters()], gradient_for(out))]


def exact(module: Linear, x: Tensor) -> list[Tensor]:
    """The same in float64, of what is rounded to bfloat16."""
    x, weight, *bias = (t.detach().to(NARROW).double() for t in (x, *module.parameters()))
    out = F.linear(x, weight, *bias)
    d = gradient_for(out)
    return [out, d @ weight, d.T @ x, *[d.sum(0) for _ in bias]]


def apart(found: Tensor, right: Tensor) -> float:
    return float((found.detach().double() - right.detach()).norm() / right.detach().norm())


@pytest.mark.parametrize("rows", [7, 512])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT, NARROW])
@pytest.mark.parametrize("n, inputs, outputs", SHAPES)
def test_they_are_autocasts(way, monkeypatch, n, inputs, outputs, dtype, bias, rows) -> None:
    monkeypatch.setattr("tidemill.models.trained_linear.ROWS", rows)
    module, x = layer(inputs, outputs, bias), drawn(n, inputs, seed=1, dtype=dtype)
    found, autocasts, right = computed(module, x), computed(module, x, F.linear), exact(module, x)
    assert type(found[0].grad_fn).__name__ == "_ProductBackward"
    assert [t.dtype for t in found] == [t.dtype for t in autocasts] == [NARROW, dtype, *[FLOAT] * (1 + bias)]
    for ours, others, expected in zip(found, autocasts, right, strict=True):
        assert apart(ours, others.double()) < 2**-7
        assert apart(ours, expected) <= 1.02 * apart(others, expected) + 1e-6
    assert all(apart(ours, expected) < 1e-6 for ours, expected in zip(found[2:], right[2:], strict=True))  # not rounded
    rounded = [expected.to(NARROW) for expected in right[:2]]
    assert all((a == b).double().mean() > 0.99 for a, b in zip(found, rounded, strict=False))  # once


def test_what_has_no_use_for_a_gradient(way) -> None:
    """An input, weights and a bias that are not trained, no rows, and a pass forward alone."""
    module, x = layer(16, 8, True), drawn(4, 16, seed=1, dtype=NARROW)
    every = computed(module, x)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    with torch.autocast("cpu", NARROW):
        out = module(learnt := x.detach().requires_grad_())
        assert torch.equal(torch.autograd.grad(out, learnt, gradient_for(out))[0], every[1])
        with torch.no_grad():
            assert torch.equal(module(x), every[0]) and module(x[:0]).shape == (0, 8)
        module.bias.requires_grad_()
        out = module(x)
        assert torch.equal(torch.autograd.grad(out, module.bias, gradient_for(out))[0], every[3])


class Products(TorchDispatchMode):
    """The dtypes of what is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.name():
            self.dtypes += [x.dtype for x in args if isinstance(x, Tensor)]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [FLOAT, NARROW])
def test_floats_are_multiplied(way, dtype) -> None:
    """Forwards and back, whatever autocast is around."""
    module, x = layer(64, 32, True), drawn(40, 64, seed=1, dtype=dtype)
    with Products() as products, torch.autocast("cpu", NARROW):
        computed(module, x)
    assert len(products.dtypes) >= 3 * 2 and set(products.dtypes) == {FLOAT}


def kept(module: Linear, x: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        computed(module, x)
    return found


@pytest.mark.parametrize("dtype", [FLOAT, NARROW])
def test_what_is_kept_is_narrow(way, dtype) -> None:
    module, x = layer(32, 48, True), drawn(9, 32, seed=1, dtype=dtype)
    read, weight = kept(module, x)
    assert weight.data_ptr() == module.weight.data_ptr() and read.dtype == NARROW and torch.equal(read, x.to(NARROW))
    assert dtype == FLOAT or read.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_whole_decoder(way, checkpointing) -> None:
    """As close to float64 as with autocast's own products."""
    distances: list[list[float]] = []
    for seed in range(4):
        model = decoder(seed=seed, hidden_size=48, head_dim=32, intermediate_size=72)
        way(WIDENED)
        expected, _ = gradients(
            batch(), decoder(torch.float64, seed=seed, hidden_size=48, head_dim=32, intermediate_size=72)
        )
        found, _ = gradients(batch(), model, autocast=NARROW, checkpointing=checkpointing)
        way(NONE)
        others, _ = gradients(batch(), model, autocast=NARROW)
        distances.append([sum(apart(g[n], e) for n, e in expected.items()) for g in (found, others)])
    ours, others = torch.tensor(distances).mean(0)
    assert 0 < ours < 1.08 * others


def test_elsewhere_products_are_pytorchs(way) -> None:
    module, x = layer(32, 48, True), drawn(9, 32, seed=1)

    def is_ours(x: Tensor, module: Linear = module, dtype: torch.dtype = NARROW, enabled: bool = True) -> bool:
        with torch.autocast("cpu", dtype, enabled=enabled):
            return type(module(x).grad_fn).__name__ == "_ProductBackward"

    assert is_ours(x)
    assert not is_ours(x, enabled=False) and not is_ours(x, dtype=torch.float16)
    assert not is_ours(x.double(), layer(32, 48, True).double()) and not is_ours(x, layer(32, 48, True).to(NARROW))
    for other in (NONE, PAIRED, TILED):
        way(other)
        assert not is_ours(x)
        assert all(torch.equal(a, b) for a, b in zip(computed(module, x), computed(module, x, F.linear), strict=True))


def test_sizes_are_few_only_where_products_are_onednns(way) -> None:
    rows = rows_of([s for s in batch() if s.weights.any()])
    tokens = sum(row.length for row in rows)
    assert filled(tokens, 1000) > tokens
    few = filled(tokens, 1000)
    for other, expected in ((WIDENED, tokens), (PAIRED, tokens), (TILED, few), (NONE, few)):
        way(other)
        assert len(training_pass.Compute(CPU, 1000, NARROW).pack(rows).tokens) == expected
        assert len(training_pass.Compute(CPU, 1000).pack(rows).tokens) == tokens
