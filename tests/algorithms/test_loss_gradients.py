"""What holds for every loss: one gradient however it is cut into calls, A alone on policy, degree 1 in A; and the KL's."""

import numpy as np
import pytest
import torch
from test_losses import CASES, EXTRAS, POLICY_CASES, Rows, function, gradient, inputs, make

from tidemill.algorithms.losses import LossInput, evaluate, loss_by_name
from tidemill.algorithms.presets import PER_SEQUENCE
from tidemill.core.types import LossSpec


def part(rows, chosen):
    """Those sequences alone, in that order, numbered anew; and which tokens these are."""
    where = np.concatenate([rows.of(i) for i in chosen])
    values = {name: value[where] for name, value in vars(rows).items()}
    values["sequence"] = np.repeat(np.arange(len(chosen)), [len(rows.of(i)) for i in chosen])
    return Rows(**values), where


@pytest.mark.parametrize("case", [*CASES, "extras"])
@pytest.mark.parametrize("seed", range(3))
def test_calls_add_up_however_the_sequences_are_divided(case, seed):
    """I6."""
    loss = loss_by_name(EXTRAS) if case == "extras" else function(case)
    rows, rng = make(seed, CASES.get(case, [""])[0], drift=0.2), np.random.default_rng(seed)
    weights = rng.uniform(0, 1, len(rows.pi)) * (rng.random(len(rows.pi)) > 0.2)
    x = inputs(rows)
    total, sums = evaluate(loss, x, torch.tensor(weights))
    expected = gradient(total, x)
    for calls in (1, 2, 3, 10):
        found, value, tokens = np.zeros_like(expected), 0.0, 0
        for chosen in np.array_split(rng.permutation(rows.sequence.max() + 1), calls):
            some, where = part(rows, chosen)
            x = inputs(some)
            total, metrics = evaluate(loss, x, torch.tensor(weights[where]))
            found[where] += gradient(total, x)
            value, tokens = value + metrics["loss"].item(), tokens + metrics["tokens"].item()
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)
        assert value == pytest.approx(sums["loss"].item(), abs=1e-10) and tokens == sums["tokens"]


def on_policy(name):
    rows = make(name=name)
    rows.old = rows.mu = rows.pi
    return rows


@pytest.mark.parametrize("case", POLICY_CASES)
def test_on_policy_gradient_is_minus_advantage(case):
    rows = on_policy(CASES[case][0])
    lengths = rows.per_sequence(len, rows.pi)
    for weights in (np.ones_like(lengths), 1 / lengths):  # the reduction "sequence"
        x = inputs(rows)
        found = gradient((torch.tensor(weights) * function(case)(x).terms).sum(), x)
        np.testing.assert_allclose(found, -rows.a * weights, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", POLICY_CASES)
@pytest.mark.parametrize("seed", range(3))
def test_a_factor_on_the_advantage_is_one_on_the_loss(case, seed):
    """Positive homogeneity: what makes corrections exact that are multiplied into the advantages beforehand."""
    name = CASES[case][0]
    rows, rng = make(seed, name), np.random.default_rng(seed)
    c = rng.uniform(0, 3, len(rows.pi)) * (rng.random(len(rows.pi)) > 0.3)
    if name in PER_SEQUENCE:
        c = c[rows.sequence]
    assert (c == 0).any() and (c > 1).any()
    x = inputs(rows)
    expected = torch.tensor(c) * function(case)(x).terms
    rows.a = c * rows.a
    y = inputs(rows)
    terms = function(case)(y).terms
    np.testing.assert_allclose(terms.detach(), expected.detach(), rtol=1e-12, atol=1e-14)
    weights = torch.tensor(rng.uniform(0.5, 1, len(rows.pi)))
    np.testing.assert_allclose(
        gradient((weights * terms).sum(), y), gradient((weights * expected).sum(), x), rtol=1e-10, atol=1e-13
    )


@pytest.mark.parametrize("case", POLICY_CASES)
def test_a_sequence_without_advantage_has_no_gradient(case):
    rows = make(name=CASES[case][0])
    flat = rows.sequence % 2 == 0
    rows.a[flat] = 0
    x = inputs(rows)
    terms = function(case)(x).terms
    assert (terms[torch.tensor(flat)] == 0).all() and (gradient(terms.sum(), x)[flat] == 0).all()


@pytest.mark.parametrize("bounds", [{}, {"clip_low": 0.05, "clip_high": 0.2}])
@pytest.mark.parametrize("seed", range(3))
def test_gspo_of_tokens_is_gspo_of_sequences_for_one_advantage(bounds, seed):
    rows = make(seed, "gspo", drift=0.2)
    weights = torch.tensor(np.random.default_rng(seed).uniform(0.1, 1, 10)[rows.sequence])  # one a sequence
    whole, tokens = inputs(rows), inputs(rows)
    a, b = (loss_by_name(LossSpec(name, bounds)) for name in ("gspo", "gspo_token"))
    first, second = (weights * a(whole).terms).sum(), (weights * b(tokens).terms).sum()
    assert first.item() == pytest.approx(second.item(), rel=1e-12)
    np.testing.assert_allclose(gradient(second, tokens), gradient(first, whole), rtol=1e-10, atol=1e-14)


def kl(p, q):
    return (p * (p / q).log()).sum()


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("importance", [0, 1])
@pytest.mark.parametrize("k", ["kl_k1", "kl_k2", "kl_k3"])
def test_kl_estimators_against_the_exact_kl(k, importance, stale):
    """The expectation under mu, enumerated over a softmax of four."""
    logits, other, reference = torch.tensor(np.random.default_rng(7).normal(0, 1, (3, 4)))
    logits.requires_grad_()
    pi = logits.softmax(0)
    mu = other.softmax(0) if stale else pi.detach()
    ref = reference.softmax(0)
    (reverse,), (forward,) = (torch.autograd.grad(d, logits, retain_graph=True) for d in (kl(pi, ref), kl(ref, pi)))
    x = LossInput(pi.log(), mu.log(), mu.log(), torch.ones(4), torch.arange(4), 4, ref.log())
    total, metrics = evaluate(loss_by_name(LossSpec(k, {"importance": importance})), x, mu)
    (found,) = torch.autograd.grad(total, logits)
    is_reverse = torch.allclose(found, reverse, rtol=1e-10, atol=1e-12)
    assert is_reverse is bool(importance or (k == "kl_k2" and not stale))
    if not importance and not stale and k != "kl_k2":
        torch.testing.assert_close(found, forward if k == "kl_k3" else 0 * found, rtol=1e-10, atol=1e-12)
    exact = total.item() == pytest.approx(kl(pi, ref).item(), rel=1e-10)
    assert exact is (k != "kl_k2" and bool(importance or not stale))
    assert metrics["loss"] == total and set(metrics) == {"loss", "tokens", "kl"}
