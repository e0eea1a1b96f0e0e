"""While passes are computed: weights prepared once, gradients added up where they lie."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from trainer_cases import CPU, LOSSES, assert_same, batch, decoder, gradients

from tidemill.models.kernels.cpu.bindings import NONE, PAIRED, TILED, WIDENED, Native
from tidemill.models.kernels.library import native
from tidemill.models.served_linear import Linear, gathering
from tidemill.trainer import training_pass
from tidemill.trainer.parallel_micro_batches import Lanes

NARROW = torch.bfloat16
WIDE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96}
WAYS = {"none": NONE, "widened": WIDENED, "pairs": PAIRED, "tiles": TILED}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of multiplying bfloat16, whichever is the quickest here; that of tiles is PyTorch's in a trainer."""
    compiled, kind = native(), WAYS[request.param]
    if compiled is None or (kind in (WIDENED, PAIRED) and not compiled.multiplies(kind)):
        pytest.skip("no such products on this processor")
    monkeypatch.setitem(compiled.products, NARROW, kind)
    return kind


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often the kernels multiplied."""
    calls = dict.fromkeys(("pack", "linear", "add_outer"), 0)

    def counting(name: str) -> Callable[..., object]:
        function = getattr(Native, name)

        def counted(*given: object, **named: object) -> object:
            calls[name] += 1
            return function(*given, **named)

        return counted

    for name in calls:
        monkeypatch.setattr(Native, name, counting(name))
    return calls


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm().detach() / expected.double().norm().detach())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("outputs, inputs", [(64, 96), (96, 64), (40, 64), (64, 40)])
def test_a_layer_in_several_passes(way: int, outputs: int, inputs: int, biased: bool) -> None:
    """Against float64, with the weights and inputs as bfloat16 has them, from a gradient that is there."""
    module = Linear(inputs, outputs, biased)
    begun = drawn(outputs, inputs, seed=3)
    module.weight.grad = begun.clone()
    weight = module.weight.detach().to(NARROW).double().requires_grad_()
    bias = module.bias.detach().to(NARROW).double().requires_grad_() if biased else None
    with gathering(module):
        for seed in range(3):
            x = drawn(17 + seed, inputs, seed=seed).to(NARROW).float().requires_grad_()
            d = drawn(17 + seed, outputs, seed=seed + 9).to(NARROW)
            with torch.autocast("cpu", NARROW):
                out = module(x)
            out.backward(d)
            exact = x.detach().double().requires_grad_()
            expected = F.linear(exact, weight, bias)
            expected.backward(d.double())
            assert out.dtype == NARROW and apart(out, expected) < 4e-3
            assert x.grad is not None and exact.grad is not None and apart(x.grad, exact.grad) < 4e-3
    assert weight.grad is not None and module.weight.grad is not None
    unrounded = way == WIDENED or (way == PAIRED and outputs % 32 == inputs % 32 == 0)
    assert apart(module.weight.grad - begun, weight.grad) < (1e-6 if unrounded else 4e-3)
    if bias is not None:
        assert module.bias.grad is not None and bias.grad is not None and apart(module.bias.grad, bias.grad) < 4e-3
    assert module.gathered is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_autograds(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several micro-batches, added to what an earlier call left."""
    model = decoder(dtype, **WIDE)
    gathered, _ = gradients(batch(), model, budget=40)
    training_pass.forward_backward(model, batch(1), LOSSES, training_pass.Compute(CPU, 40))
    both = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    monkeypatch.setattr(training_pass, "gathering", lambda *models, **how: gathering())
    expected, _ = gradients(batch(), model, budget=40)
    assert_same(gathered, expected, 1e-12 if dtype == torch.float64 else 1e-5)
    training_pass.forward_backward(model, batch(1), LOSSES, training_pass.Compute(CPU, 40))
    summed = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert_same(both, summed, 1e-12 if dtype == torch.float64 else 1e-5)


def test_pairs_are_prepared_once_and_multiplied_in_every_micro_batch(counted: dict[str, int]) -> None:
    compiled = native()
    if compiled is None or compiled.products[NARROW] != PAIRED:
        pytest.skip("no such products on this processor")
    model = decoder(**WIDE)
    matrices = sum(isinstance(each, Linear) for each in model.modules())
    for _ in range(2):
        counted.update(dict.fromkeys(counted, 0))
        lanes = Lanes()
        rows = [s for s in batch() if s.weights.any() and s.advantages.any()]
        training_pass.forward_backward(model, rows, LOSSES, training_pass.Compute(CPU, 20, NARROW, lanes=lanes))
        assert lanes.begun > 2 and counted["pack"] == 2 * matrices
        assert counted["linear"] == 2 * counted["add_outer"] == 2 * matrices * lanes.begun


def test_a_layer_by_itself_prepares_nothing(way: int, counted: dict[str, int]) -> None:
    module = Linear(64, 64, True)
    with torch.autocast("cpu", NARROW):
        module(drawn(5, 64, seed=0)).float().sum().backward()
    assert module.weight.grad is not None and counted == {"pack": 0, "linear": 0, "add_outer": 0}


def test_weights_that_have_changed_are_read_anew(way: int) -> None:
    model, other = decoder(seed=1, **WIDE), decoder(seed=2, **WIDE)
    how = training_pass.Compute(CPU, 100, NARROW)
    before = training_pass.forward(model, batch(), how)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
    expected = training_pass.forward(other, batch(), how)
    assert any((a != b).any() for a, b in zip(before, expected, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(training_pass.forward(model, batch(), how), expected, strict=True))


def test_a_frozen_matrix_has_no_gradient(way: int) -> None:
    model = decoder(**WIDE)
    frozen = model.layers[0].down.weight.requires_grad_(False)
    found, _ = gradients(batch(), model, autocast=NARROW)
    assert frozen.grad is None and "layers.0.down.weight" not in found
    assert found["layers.0.gate_up.weight"].any() and found["layers.1.down.weight"].any()


def test_nothing_is_left_behind_where_a_pass_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()

    def fails(*given: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(training_pass, "evaluate", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        training_pass.forward_backward(model, batch(), LOSSES, training_pass.Compute(CPU, 40))
    assert all(each.gathered is None for each in model.modules() if isinstance(each, Linear))
