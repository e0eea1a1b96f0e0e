"""A whole decoder's gradients with the compiled kernels of its layers, and with PyTorch's own operations in their place."""

import copy

import numpy as np
import pytest
import torch
from trainer_cases import CPU, LOSSES, assert_same, batch, decoder, gradients

from tidemill.core.types import LossSpec
from tidemill.models import decoder as module
from tidemill.models.kernels.library import native
from tidemill.trainer import training_pass

SHAPES = {"hidden_size": 48, "head_dim": 32, "intermediate_size": 72}
FAMILIES = [{}, {"model_type": "llama"}]  # with norms of queries and keys, and without


@pytest.fixture(autouse=True)
def _compiled():
    if native() is None:
        pytest.skip("no C compiler")


def found(monkeypatch, model, own=False, **compute):
    """Gradients and logprobs; `own`: of PyTorch's operations."""
    with monkeypatch.context() as patch:
        if own:
            patch.setattr(module, "layer_kernels", lambda *_: None)
        sums, result = gradients(batch(), model, **compute)
    return sums, np.concatenate(result.logprobs)


def distance(sums, exact):
    apart = torch.stack([(sums[n].double() - exact[n]).norm() / exact[n].norm() for n in exact])
    return float(apart.square().mean().sqrt())


@pytest.mark.parametrize("changes", FAMILIES)
def test_float32_is_the_same(monkeypatch, changes):
    model = decoder(**SHAPES, **changes)
    (ours, logprobs), (own, expected) = found(monkeypatch, model), found(monkeypatch, model, own=True)
    assert_same(ours, own, 1e-5)
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    assert any(not torch.equal(ours[n], own[n]) for n in own)  # else they were not used


@pytest.mark.parametrize("changes", FAMILIES)
@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16_is_as_close_to_the_truth(monkeypatch, changes, autocast):
    """Under a smooth loss: with one that clips, a rounding that takes a token over the edge is all that would be seen."""
    compute = {"autocast": torch.bfloat16 if autocast else None, "losses": dict.fromkeys(LOSSES, LossSpec("cross_entropy"))}
    apart = []
    for seed in range(4):
        model = decoder(seed=seed, **SHAPES, **changes).to(torch.float32 if autocast else torch.bfloat16)
        exact, _ = found(monkeypatch, copy.deepcopy(model).double(), losses=compute["losses"])
        apart.append([distance(found(monkeypatch, model, own, **compute)[0], exact) for own in (False, True)])
    ours, own = np.mean(apart, axis=0)
    assert 0.01 < ours < 1.08 * own < 0.1


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_recomputing_changes_no_bit(monkeypatch, autocast):
    model = decoder(**SHAPES)
    (plain, seen), (again, seen_again) = (
        found(monkeypatch, model, autocast=autocast, checkpointing=checkpointing) for checkpointing in (False, True)
    )
    assert all(torch.equal(plain[n], again[n]) for n in plain) and np.array_equal(seen, seen_again)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_forward_pass_alone_gives_the_same_logprobs(autocast):
    model, samples = decoder(**SHAPES), [s for s in batch() if s.weights.any()]
    compute = training_pass.Compute(CPU, 10_000, autocast)
    with_gradient = training_pass.forward_backward(model, samples, LOSSES, compute).logprobs
    alone = training_pass.forward(model, samples, compute)
    for a, b in zip(with_gradient, alone, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_what_only_products_read_is_narrowed_at_once():
    model, x = decoder(**SHAPES), torch.randn(5, 48)
    layer = model.layers[0]
    for enabled, expected in ((True, torch.bfloat16), (False, torch.float32)):
        for learning in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled), torch.set_grad_enabled(learning):
                assert layer.input_norm(x).dtype == layer.post_norm(x).dtype == expected
                assert model.norm(x).dtype == torch.float32


def test_what_no_kernel_writes_is_left_to_autocast(monkeypatch):
    """Half precision: the norm's kernel writes floats or bfloat16."""
    model = decoder(**SHAPES)
    with torch.autocast("cpu", torch.float16):
        assert model.layers[0].input_norm(torch.randn(5, 48)).dtype == torch.float32
    ours, own = (found(monkeypatch, model, own, autocast=torch.float16)[1] for own in (False, True))
    np.testing.assert_allclose(ours, own, atol=0.03)  # halves are rounded in other places
