"""Products whose way back makes again the norm or the gate that they read: the same numbers, and less is kept."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.models.decoder import RMSNorm, gated
from tidemill.models.kernels.cpu.bindings import NONE, WIDENED
from tidemill.models.kernels.cpu.trained_kernels import Deferred, as_tensor
from tidemill.models.kernels.library import native
from tidemill.models.served_linear import Linear

FLOAT, NARROW = torch.float32, torch.bfloat16
ROWS, INPUTS, OUTPUTS = 70, 48, 33
WAYS = {  # dtypes of what goes in and of weights, whether autocast narrows, and how the processor multiplies narrow numbers
    "floats": (FLOAT, FLOAT, False, NONE),
    "narrow weights": (NARROW, NARROW, False, NONE),
    "narrowed": (FLOAT, FLOAT, True, NONE),
    "narrowed, of what is narrow": (NARROW, FLOAT, True, NONE),
    "widened": (FLOAT, FLOAT, True, WIDENED),
    "widened, of what is narrow": (NARROW, FLOAT, True, WIDENED),
}
Case = tuple[Linear, Callable[[Tensor], "Tensor | Deferred"], Tensor, bool]


def drawn(*shape: int, seed: int, dtype: torch.dtype = FLOAT) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=product(WAYS, ["norm", "gate"], [False, True]), ids=lambda p: f"{p[0]}-{p[1]}{'-bias' * p[2]}")
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A layer, what makes its input of what, and whether autocast narrows."""
    if (kernels := native()) is None:
        pytest.skip("no C compiler")
    name, made_by, bias = request.param
    dtype, weights, narrows, way = WAYS[name]
    monkeypatch.setattr(kernels, "products", kernels.products | {NARROW: way})
    layer = Linear(INPUTS, OUTPUTS, bias)
    norm = RMSNorm(INPUTS, 1e-5, multiplied=True)
    with torch.no_grad():
        for i, parameter in enumerate([*layer.parameters(), norm.weight]):
            parameter.copy_(drawn(*parameter.shape, seed=i))
    layer.add_module("norm", norm)  # so that its weight is one of the layer's parameters
    if made_by == "gate":
        del layer.norm
        return layer.to(weights), gated, drawn(ROWS, 2 * INPUTS, seed=9, dtype=dtype if not narrows else NARROW), narrows
    return layer.to(weights), norm, 3 * drawn(ROWS, INPUTS, seed=9, dtype=dtype), narrows


def computed(case: Case, kept: bool, d: Tensor | None = None) -> list[Tensor | None]:
    """What comes out, and what a loss changes by with what goes in and each parameter that is trained."""
    layer, maker, x, narrows = case
    x = x.detach().requires_grad_(x.requires_grad)
    learnt = [t for t in (x, *layer.parameters()) if t.requires_grad]
    with torch.autocast("cpu", NARROW, enabled=narrows):
        made = maker(x)
        assert isinstance(made, Deferred)
        out = layer(as_tensor(made) if kept else made)
    d = drawn(*out.shape, seed=5).to(out.dtype) if d is None else d
    return [out, *torch.autograd.grad(out, learnt, d, allow_unused=True)]


def same(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    return all(
        a is b is None or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))
        for a, b in zip(found, expected, strict=True)
    )


def test_the_numbers_are_those_of_one_that_keeps_it(case: Case) -> None:
    case[2].requires_grad_()
    before, d = case[2].detach().clone(), drawn(ROWS, OUTPUTS, seed=5).to(computed(case, True)[0].dtype)
    given = d.clone()
    found = computed(case, False, d)
    assert same(found, computed(case, True, d)) and all(t is not None and t.any() for t in found)
    assert torch.equal(given, d) and torch.equal(before, case[2])  # what others hold is as it was


def test_whatever_is_trained(case: Case) -> None:
    parameters = list(case[0].parameters())
    for learnt in product([False, True], repeat=1 + len(parameters)):
        for t, learns in zip((case[2], *parameters), learnt, strict=True):
            t.requires_grad_(learns)
        if any(learnt):
            assert same(computed(case, False), computed(case, True))


def test_what_it_reads_is_not_kept(case: Case) -> None:
    layer, maker, x, narrows = case
    x.requires_grad_()
    found: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t),
        torch.autocast("cpu", NARROW, enabled=narrows),
    ):
        layer(maker(x))
    there = {t.data_ptr() for t in (x, *layer.parameters())}
    assert x.data_ptr() in {t.data_ptr() for t in found}
    assert all(t.data_ptr() in there or t.shape == layer.weight.shape for t in found)  # weights may be narrowed


def test_the_way_back_may_be_taken_twice(case: Case) -> None:
    layer, maker, x, narrows = case
    x.requires_grad_()
    with torch.autocast("cpu", NARROW, enabled=narrows):
        out = layer(maker(x))
    once, twice = (torch.autograd.grad(out.float().square().sum(), x, retain_graph=True) for _ in range(2))
    assert torch.equal(*once, *twice) and x.grad is None


def test_no_rows(case: Case) -> None:
    layer, maker, x, narrows = case
    found = computed((layer, maker, x[:0].requires_grad_(), narrows), False)
    assert all(t is not None and not t.any() for t in found)


def test_where_it_is_not_for_a_tensor_is_made() -> None:
    """Of float64, and of weights that are not of its dtype, PyTorch decides."""
    layer, x = Linear(INPUTS, OUTPUTS, False), drawn(ROWS, 2 * INPUTS, seed=1)
    assert isinstance(gated(x.double()), Tensor)
    if isinstance(made := gated(x), Deferred):
        assert torch.equal(layer(made), F.linear(as_tensor(made), layer.weight))
        with pytest.raises(RuntimeError, match="dtype"):
            layer.bfloat16()(made)
