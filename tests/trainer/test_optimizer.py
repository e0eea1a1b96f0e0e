import math

import pytest
import torch
from trainer_cases import decoder

from tidemill.core.errors import TrainingDiverged
from tidemill.trainer.optimizer import Optimizer, lr_factor
from tidemill.trainer.trainer_kinds import TrainerSettings


def test_schedule_by_hand():
    cosine = [lr_factor(i, updates=6, warmup=2, schedule="cosine", floor=0.1) for i in range(8)]
    shape = [0.1 + 0.9 * (1 + math.cos(math.pi * x)) / 2 for x in (0, 1 / 3, 2 / 3, 1, 1, 1)]
    assert cosine == pytest.approx([0.5, 1.0, *shape])
    linear = [lr_factor(i, updates=5, warmup=0, schedule="linear", floor=0.5) for i in range(5)]
    assert linear == pytest.approx([1, 0.875, 0.75, 0.625, 0.5])
    assert [lr_factor(i, updates=3, warmup=4, schedule="constant", floor=0) for i in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert lr_factor(0, updates=1, warmup=0, schedule="linear", floor=0.0) == 1


def filled(model, seed=0, size=1.0):
    torch.manual_seed(seed)
    for p in model.parameters():
        p.grad = size * torch.randn_like(p)
    return [p.grad.clone() for p in model.parameters()]


def tensors(blocks, copied=False):
    return {block.name: block.tensor.clone() if copied else block.tensor for block in blocks}


def test_scaled_and_clipped_once_then_adamw():
    """Against AdamW written out, over three updates: scale, then clip, then the step with its decay on matrices only."""
    settings = TrainerSettings(lr=0.1, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6, max_grad_norm=0.5, schedule="linear")
    model = decoder(torch.float64)
    optimizer = Optimizer(model, settings, updates=4)
    expected = [p.detach().clone() for p in model.parameters()]
    first, second = ([torch.zeros_like(p) for p in expected] for _ in range(2))
    for update in range(3):
        gradients = [0.25 * g for g in filled(model, update, size=1e-3 if update == 1 else 1.0)]
        norm = torch.cat([g.flatten() for g in gradients]).norm().item()
        metrics = optimizer.apply(0.25)
        lr = 0.1 * (1 - update / 3)
        assert metrics == {"grad_norm": pytest.approx(norm), "lr": pytest.approx(lr)}
        assert (norm > 0.5) is (update != 1)
        for i, g in enumerate(gradients):
            g = g * min(1, 0.5 / norm)
            first[i], second[i] = 0.8 * first[i] + 0.2 * g, 0.9 * second[i] + 0.1 * g**2
            hats = first[i] / (1 - 0.8 ** (update + 1)), second[i] / (1 - 0.9 ** (update + 1))
            decay = 1 - lr * 0.3 if g.ndim >= 2 else 1
            expected[i] = decay * expected[i] - lr * hats[0] / (hats[1].sqrt() + 1e-6)
    for p, e in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), e, rtol=1e-8, atol=1e-9)
    assert optimizer.done == 3 and all(p.grad is None for p in model.parameters())


def test_it_is_torch_s_own_to_the_last_bit():
    settings = TrainerSettings(lr=0.1, weight_decay=0.3, betas=(0.8, 0.9), max_grad_norm=0)
    ours, theirs = decoder(), decoder()
    theirs.load_state_dict(ours.state_dict())
    parameters = list(theirs.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.3},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer, adam = Optimizer(ours, settings, updates=9), torch.optim.AdamW(groups, betas=(0.8, 0.9), fused=True)
    for update in range(3):
        for p, gradient in zip(parameters, filled(ours, update), strict=True):
            p.grad = gradient
        for group in adam.param_groups:
            group["lr"] = optimizer.lr
        adam.step()
        optimizer.apply(1.0)
    for ours_now, theirs_now in zip(ours.parameters(), parameters, strict=True):
        assert torch.equal(ours_now, theirs_now)


def test_clipping_can_be_off():
    model = decoder()
    optimizer = Optimizer(model, TrainerSettings(lr=1e-3, max_grad_norm=0), updates=1)
    gradients = filled(model, size=100)
    optimizer.apply(1.0)
    moments = tensors(optimizer.state())
    for (name, _), g in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(moments[f"exp_avg.{name}"], 0.1 * g, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_takes_no_step(bad):
    model = decoder()
    optimizer = Optimizer(model, TrainerSettings(lr=0.1), updates=5)
    filled(model)
    optimizer.apply(1.0)
    before, moments = [p.detach().clone() for p in model.parameters()], tensors(optimizer.state(), copied=True)
    filled(model)
    model.embed.weight.grad[3, 2] = bad
    with pytest.raises(TrainingDiverged, match="gradient norm of update 1 is"):
        optimizer.apply(1.0)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(torch.equal(t, moments[n]) for n, t in tensors(optimizer.state()).items())
    assert optimizer.done == 1 and all(p.grad is None for p in model.parameters())


def test_parameters_nothing_reached_have_a_zero_gradient():
    """Momentum and decay go on as they would with an explicit zero: skipping rows must not change the update (I6)."""
    states = []
    for explicit in (True, False):
        model = decoder()
        optimizer = Optimizer(model, TrainerSettings(lr=0.1, weight_decay=0.1), updates=5)
        filled(model)
        optimizer.apply(1.0)
        if explicit:
            filled(model, size=0.0)
        assert optimizer.apply(1.0)["grad_norm"] == 0
        states.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_steps_must_be_known():
    with pytest.raises(ValueError, match="steps=0"):
        Optimizer(decoder(), TrainerSettings(), updates=0)
