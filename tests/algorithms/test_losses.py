"""Values and gradients against NumPy in float64. A factor under stop-gradient is frozen before the finite difference."""

import numpy as np
import pytest
import torch

from tidemill.algorithms.corrections import ratio, truncated
from tidemill.algorithms.losses import LOSSES, PROPORTIONAL, Loss, LossInput, aipo, evaluate, loss_by_name, ppo_clip
from tidemill.types import LossSpec

N = 64
POLICY_LOSSES = {
    "ppo_clip": {},
    "asymmetric": {"clip_low": 0.1, "clip_high": 0.4},
    "dual": {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.8},
    "tis": {"clip_low": 0.2, "clip_high": 0.28, "tis_cap": 1.3},
    "aipo": {"cap": 1.2},
}


def make(seed=0, drift=0.5, mismatch=0.3):
    """(log pi, log p_hat, log mu, A) as float64 arrays, with ratios on every side of every bound used here."""
    rng = np.random.default_rng(seed)
    pi = -rng.exponential(1.0, N) - 0.5
    old = pi + rng.normal(0, drift, N)
    return pi, old, old + rng.normal(0, mismatch, N), rng.normal(0, 1, N)


def inputs(pi, old, mu, a, grad=True):
    live = torch.tensor(pi, dtype=torch.float64, requires_grad=grad)
    rest = [torch.tensor(v, dtype=torch.float64) for v in (mu, old, a)]
    return LossInput(live, *rest, sequence=torch.zeros(len(pi), dtype=torch.int64), sequences=1)


def function(kind):
    return loss_by_name(LossSpec("aipo" if kind == "aipo" else "ppo_clip", POLICY_LOSSES[kind]))


def reference(kind, pi, old, mu, a, frozen):
    """[N] terms; `frozen` is the log pi that stands under stop-gradient."""
    c = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0, "tis_cap": 0} | POLICY_LOSSES[kind]
    if kind == "aipo":
        return -np.minimum(np.exp(frozen - mu), c["cap"]) * a * pi
    r = np.exp(pi - old)
    objective = np.minimum(r * a, np.clip(r, 1 - c["clip_low"], 1 + c["clip_high"]) * a)
    if c["dual_clip"]:
        objective = np.where(a < 0, np.maximum(objective, c["dual_clip"] * a), objective)
    k = np.minimum(np.exp(old - mu), c["tis_cap"]) if c["tis_cap"] else 1.0
    return -k * objective


@pytest.mark.parametrize("kind", POLICY_LOSSES)
@pytest.mark.parametrize("seed", range(4))
def test_value_and_gradient_match_numpy(kind, seed):
    pi, old, mu, a = make(seed)
    x = inputs(pi, old, mu, a)
    terms = function(kind)(x).terms
    np.testing.assert_allclose(terms.detach().numpy(), reference(kind, pi, old, mu, a, pi), rtol=1e-12, atol=1e-14)
    (gradient,) = torch.autograd.grad(terms.sum(), x.logprobs)
    h = 1e-6
    up, down = (reference(kind, pi + d, old, mu, a, pi) for d in (h, -h))
    np.testing.assert_allclose(gradient.numpy(), (up - down) / (2 * h), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_on_policy_gradient_is_minus_advantage(kind):
    pi, _, _, a = make()
    x = inputs(pi, pi, pi, a)
    (gradient,) = torch.autograd.grad(function(kind)(x).terms.sum(), x.logprobs)
    np.testing.assert_allclose(gradient.numpy(), -a, rtol=1e-12)


def test_cross_entropy_is_minus_logprob():
    pi, old, mu, a = make()
    x = inputs(pi, old, mu, a)
    result = loss_by_name(LossSpec("cross_entropy"))(x)
    assert torch.equal(result.terms, -x.logprobs)


@pytest.mark.parametrize("a", [1.5, -1.5])
@pytest.mark.parametrize("r", [0.5, 0.89, 0.91, 1.0, 1.39, 1.41, 2.9, 3.1])
def test_which_tokens_are_dropped(a, r):
    """Asymmetric bounds 0.9 and 1.4, dual clip 3: every sign on every side."""
    x = inputs(np.array([-1.0]), np.array([-1.0 - np.log(r)]), np.array([-1.0]), np.array([a]))
    result = ppo_clip(x, clip_low=0.1, clip_high=0.4, dual_clip=3.0)
    (gradient,) = torch.autograd.grad(result.terms.sum(), x.logprobs)
    dropped = r > 1.4 if a > 0 else (r < 0.9 or r > 3.0)
    assert bool(result.metrics["clipped"]) is dropped
    assert gradient.item() == pytest.approx(0.0 if dropped else -a * r)


@pytest.mark.parametrize("a", [1.5, -1.5])
@pytest.mark.parametrize("rho", [0.2, 1.0, 3.9, 4.1, 50.0])
def test_aipo_caps_but_never_drops(a, rho):
    x = inputs(np.array([-1.0]), np.array([-7.0]), np.array([-1.0 - np.log(rho)]), np.array([a]))
    result = aipo(x, cap=4.0)
    (gradient,) = torch.autograd.grad(result.terms.sum(), x.logprobs)
    assert gradient.item() == pytest.approx(-a * min(rho, 4.0))
    assert bool(result.metrics["clipped"]) is (rho > 4.0)


def test_rho_is_r_times_k_for_a_perturbed_engine():
    pi, old, mu, a = make()
    x = inputs(pi, old, torch.tensor(mu).bfloat16().double().numpy(), a)
    rho, r = ratio(x.logprobs, x.behaviour), ratio(x.logprobs, x.old)
    torch.testing.assert_close(rho, r * truncated(x.old, x.behaviour, 1e9), rtol=1e-12, atol=0)


def test_correction_is_detached():
    old = torch.tensor([-1.0], requires_grad=True)
    assert not truncated(old, torch.tensor([-1.5]), 2.0).requires_grad


def test_extreme_log_ratios_stay_finite():
    x = inputs(np.array([-900.0, -0.1]), np.array([-0.1, -900.0]), np.array([-0.1, -900.0]), np.array([-1.0, -1.0]))
    for loss in (ppo_clip, aipo):
        terms = loss(x).terms
        (gradient,) = torch.autograd.grad(terms.sum(), x.logprobs)
        assert torch.isfinite(terms).all() and torch.isfinite(gradient).all()


@pytest.mark.parametrize("kind", POLICY_LOSSES)
@pytest.mark.parametrize("garbage", [float("nan"), float("-inf"), float("inf")])
def test_garbage_without_a_weight_has_exactly_no_gradient(kind, garbage):
    pi, old, mu, a = make()
    weights = torch.tensor(np.random.default_rng(1).uniform(0.5, 1, N))
    weights[::3] = 0
    clean = inputs(pi, old, mu, a)
    value, sums = evaluate(function(kind), clean, weights)
    (expected,) = torch.autograd.grad(value, clean.logprobs)
    for v in (pi, old, mu, a):
        v[::3] = garbage
    dirty = inputs(pi, old, mu, a)
    total, metrics = evaluate(function(kind), dirty, weights)
    (gradient,) = torch.autograd.grad(total, dirty.logprobs)
    assert torch.equal(gradient, expected) and (gradient[::3] == 0).all()
    assert torch.equal(total, value) and metrics == sums
    assert metrics["tokens"] == (weights != 0).sum()


def test_evaluate_weighs_terms_and_sums_metrics():
    pi, old, mu, a = make()
    weights = np.random.default_rng(2).uniform(0, 1, N)
    x = inputs(pi, old, mu, a)
    total, metrics = evaluate(function("asymmetric"), x, torch.tensor(weights))
    assert total.item() == pytest.approx((weights * reference("asymmetric", pi, old, mu, a, pi)).sum(), rel=1e-12)
    r = np.exp(pi - old)
    assert metrics["clipped"].item() == (((a > 0) & (r > 1.4)) | ((a < 0) & (r < 0.9))).sum() > 0
    assert metrics["ratio"].item() == pytest.approx(r.sum())
    assert metrics["loss"].item() == total.item() and "entropy" not in metrics


def test_no_token_at_all():
    empty = inputs(*[np.zeros(0)] * 4)
    total, metrics = evaluate(ppo_clip, empty, torch.zeros(0, dtype=torch.float64))
    assert total.item() == 0 and metrics["tokens"] == 0


@pytest.mark.parametrize("name", sorted(PROPORTIONAL))
def test_zero_advantage_has_no_gradient_where_that_is_promised(name):
    pi, old, mu, a = make()
    x = inputs(pi, old, mu, 0 * a)
    (gradient,) = torch.autograd.grad(LOSSES[name](x).terms.sum(), x.logprobs)
    assert (gradient == 0).all()


def test_unknown_names_and_constants_say_what_is_accepted():
    with pytest.raises(ValueError, match=r"loss 'ppo'.*ppo_clip, aipo, cross_entropy, or FILE\.py:function"):
        loss_by_name(LossSpec("ppo"))
    with pytest.raises(ValueError, match=r"'aipo' has no constant clip_high: it takes cap"):
        loss_by_name(LossSpec("aipo", {"clip_high": 0.2}))
    with pytest.raises(ValueError, match="takes none"):
        loss_by_name(LossSpec("cross_entropy", {"cap": 1.0}))


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("ppo_clip", {"clip_low": -0.1}),
        ("ppo_clip", {"dual_clip": 0.9}),
        ("ppo_clip", {"tis_cap": -1}),
        ("aipo", {"cap": 0}),
    ],
)
def test_constants_out_of_range_are_refused(name, params):
    with pytest.raises(ValueError, match="expected"):
        loss_by_name(LossSpec(name, params))(inputs(*make()))


def test_a_users_loss_from_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from tidemill.algorithms.losses import Loss\n"
        "def reinforce(x, *, strength=1.0):\n    return Loss(-strength * x.advantages * x.logprobs)\n"
        "def reduced(x):\n    return Loss(x.logprobs.mean())\n"
        "def wrong(x):\n    return 3\n"
    )
    path = str(tmp_path / "mine.py")
    pi, old, mu, a = make()
    terms = loss_by_name(LossSpec(f"{path}:reinforce", {"strength": 2.0}))(inputs(pi, old, mu, a)).terms
    np.testing.assert_allclose(terms.detach().numpy(), -2 * a * pi)
    with pytest.raises(ValueError, match="no constant power: it takes strength"):
        loss_by_name(LossSpec(f"{path}:reinforce", {"power": 2.0}))
    with pytest.raises(ValueError, match="has no 'missing'"):
        loss_by_name(LossSpec(f"{path}:missing"))
    with pytest.raises(ValueError, match="does not exist"):
        loss_by_name(LossSpec(f"{tmp_path}/none.py:f"))
    for name, given in (("reduced", r"shape \(\)"), ("wrong", "int")):
        with pytest.raises(ValueError, match=f"{given}: expected Loss"):
            evaluate(loss_by_name(LossSpec(f"{path}:{name}")), inputs(pi, old, mu, a), torch.ones(N))


def test_entropy_is_summed_over_the_tokens_with_a_weight():
    pi, old, mu, a = make()
    x = inputs(pi, old, mu, a)
    x = LossInput(x.logprobs, x.behaviour, x.old, x.advantages, x.sequence, 1, entropy=torch.arange(float(N)))
    weights = torch.zeros(N)
    weights[3] = weights[5] = 0.5
    assert evaluate(lambda x: Loss(-x.logprobs), x, weights)[1]["entropy"] == 8
