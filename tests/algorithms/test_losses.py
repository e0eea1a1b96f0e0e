"""Values and gradients against NumPy in float64, with what stands under a stop-gradient frozen; and `evaluate`."""

import inspect
import re
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch

from tidemill.algorithms import losses
from tidemill.algorithms.losses import LOSSES, PROPORTIONAL, LossInput, evaluate, loss_by_name, ratio
from tidemill.algorithms.presets import ANCHORED, PER_SEQUENCE
from tidemill.core.errors import CodecError
from tidemill.core.serialization import decode, encode
from tidemill.core.types import LossSpec

LENGTHS = (5, 1, 9, 1, 4, 2, 1, 12, 3, 7)


@dataclass
class Rows:
    """Tokens of ragged sequences as float64 arrays [N]."""

    pi: np.ndarray
    old: np.ndarray
    mu: np.ndarray
    a: np.ndarray
    ref: np.ndarray
    lag: np.ndarray
    sequence: np.ndarray
    h: np.ndarray

    def of(self, i):
        return np.flatnonzero(self.sequence == i)

    def per_sequence(self, reduce, values):
        """[N] each token's sequence's value."""
        out = np.zeros(len(values), values.dtype)
        for i in np.unique(self.sequence):
            out[self.of(i)] = reduce(values[self.of(i)])
        return out


def make(seed=0, name="", drift=0.8, mismatch=0.3, lengths=LENGTHS):
    """Ratios on every side of every bound used here. Advantages of both signs and 0, alike in a sequence where they must."""
    rng, n = np.random.default_rng(seed), sum(lengths)
    pi = -rng.exponential(1.0, n) - 0.1
    old = np.minimum(pi + rng.normal(0, drift, n), -0.01)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    a = rng.normal(0, 1, len(lengths) if name in PER_SEQUENCE else n)
    a[1::7] = 0
    mu, ref = np.minimum(old + rng.normal(0, mismatch, n), -0.01), pi + rng.normal(0, 1, n)
    a = a[sequence] if name in PER_SEQUENCE else a
    return Rows(pi, old, mu, a, ref, rng.integers(0, 4, n), sequence, rng.exponential(1, n))


def inputs(rows, dtype=torch.float64):
    x = {k: torch.tensor(v) for k, v in vars(rows).items()}
    pi, old, mu, a, ref, h = (x[k].to(dtype) for k in ("pi", "old", "mu", "a", "ref", "h"))
    count = int(rows.sequence.max(initial=-1)) + 1
    pi, of_critic = pi.requires_grad_(), {"old_values": old.clone(), "returns": ref.clone()}
    found = LossInput(pi, mu, old, a, x["sequence"].long(), count, ref, h.requires_grad_(), x["lag"].long(), **of_critic)
    return replace(found, values=pi)  # a critic's values are numbers like any other: what is differentiated is one of them


def gradient(total, x):
    (found,) = torch.autograd.grad(total, x.logprobs, allow_unused=True)
    return np.zeros(len(x.logprobs)) if found is None else found.numpy()


# The references: `pi` is complex where it is differentiated, `sg` is its value under a stop-gradient. Maxima, minima and
# clips of complex numbers go by the real part.


def np_clip(r, a, low, high):
    return np.minimum(r * a, np.clip(r, 1 - low, 1 + high) * a)


def np_reinforce(b, pi, sg):
    return -b.a * pi


def np_ppo_clip(b, pi, sg, clip_low=0.2, clip_high=0.2, dual_clip=0.0):
    objective = np_clip(np.exp(pi - b.old), b.a, clip_low, clip_high)
    return -np.where((b.a < 0) & (dual_clip > 0), np.maximum(objective, dual_clip * b.a), objective)


def np_aipo(b, pi, sg, cap=5.0):
    return -np.minimum(np.exp(sg - b.mu), cap) * b.a * pi


def np_a3po(b, pi, sg, clip_low=0.2, clip_high=0.2):
    alpha = np.array([0.0 if d == 0 else 1 / d for d in b.lag])
    hat = alpha * b.mu + (1 - alpha) * sg
    return -np.exp(hat - b.mu) * np_clip(np.exp(pi - hat), b.a, clip_low, clip_high)


def np_gspo(b, pi, sg, clip_low=3e-4, clip_high=4e-4):
    return -np_clip(np.exp(b.per_sequence(np.mean, pi - b.old)), b.a, clip_low, clip_high)


def np_gspo_token(b, pi, sg, clip_low=3e-4, clip_high=4e-4):
    s = np.exp(b.per_sequence(np.mean, sg - b.old)) * np.exp(pi) / np.exp(sg)
    return -np_clip(s, b.a, clip_low, clip_high)


def np_cispo(b, pi, sg, clip_low=1.0, clip_high=4.0):
    return -np.clip(np.exp(sg - b.old), 1 - clip_low, 1 + clip_high) * b.a * pi


def np_sapo(b, pi, sg, tau_positive=1.0, tau_negative=1.05):
    tau = np.where(b.a > 0, tau_positive, tau_negative)
    return -(4 / tau) / (1 + np.exp(-tau * (np.exp(pi - b.old) - 1))) * b.a


def np_dppo_tv(b, pi, sg, delta=0.15):
    moved = np.exp(sg) - np.exp(b.mu)
    dropped = ((b.a > 0) & (moved > delta)) | ((b.a < 0) & (moved < -delta))
    return -np.where(dropped, 0, np.exp(pi - b.mu)) * b.a


def np_dppo_kl(b, pi, sg, delta=0.05):
    p, m = np.exp(sg), np.exp(b.mu)
    far = m * np.log(m / p) + (1 - m) * np.log((1 - m) / (1 - p)) > delta
    return -np.where(far & (np.sign(p - m) == np.sign(b.a)), 0, np.exp(pi - b.mu)) * b.a


def np_gmpo(b, pi, sg, bound=0.4):
    log_r = pi - b.old
    bounded = np.where(b.a > 0, np.minimum(log_r, bound), np.maximum(log_r, -bound))
    return -b.a * np.exp(b.per_sequence(np.mean, bounded))


def np_importance(b, pi, sg):
    return -np.exp(pi - b.mu) * b.a


def np_topr(b, pi, sg, cap=1.0):
    whole = np.exp(b.per_sequence(np.sum, sg - b.mu))
    return -np.where(b.a >= 0, 1, np.minimum(whole, cap)) * b.a * pi


def np_rollout_mask(b, pi, sg, clip_low=0.2, clip_high=0.28):
    rho = np.exp(sg - b.mu)
    return -np.where((rho > 1 - clip_low) & (rho < 1 + clip_high), rho, 0) * b.a * pi


def np_cross_entropy(b, pi, sg):
    return -pi


def np_kl_k1(b, pi, sg, importance=1.0):
    return np.exp(pi - b.mu) ** importance * (pi - b.ref)


def np_kl_k2(b, pi, sg, importance=1.0):
    return np.exp(sg - b.mu) ** importance * (pi - b.ref) ** 2 / 2


def np_kl_k3(b, pi, sg, importance=1.0):
    return np.exp(pi - b.mu) ** importance * (np.exp(b.ref - pi) - 1 + pi - b.ref)


def np_entropy(b, pi, sg):
    return -b.h


def np_value(b, pi, sg, clip=0.0):
    near = b.old + np.clip(pi - b.old, -clip, clip) if clip else pi
    return np.where(np.abs(near - b.ref) > np.abs(pi - b.ref), (near - b.ref) ** 2, (pi - b.ref) ** 2) / 2


def np_score(b, pi, sg):
    return -b.a * pi


CASES = {
    **{name: (name, {}) for name in LOSSES},
    "asymmetric": ("ppo_clip", {"clip_low": 0.1, "clip_high": 0.4}),
    "dual": ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.8}),
    "aipo-low-cap": ("aipo", {"cap": 1.2}),
    "a3po-asymmetric": ("a3po", {"clip_low": 0.1, "clip_high": 0.4}),
    "gspo-wide": ("gspo", {"clip_low": 0.05, "clip_high": 0.2}),
    "gspo_token-wide": ("gspo_token", {"clip_low": 0.05, "clip_high": 0.2}),
    "cispo-two-sided": ("cispo", {"clip_low": 0.1, "clip_high": 0.4}),
    "sapo-taus": ("sapo", {"tau_positive": 0.7, "tau_negative": 3.0}),
    "dppo_tv-tight": ("dppo_tv", {"delta": 0.03}),
    "dppo_kl-tight": ("dppo_kl", {"delta": 0.01}),
    "gmpo-tight": ("gmpo", {"bound": 0.1}),
    "topr-cap": ("topr", {"cap": 2.5}),
    "rollout_mask-wide": ("rollout_mask", {"clip_low": 0.5, "clip_high": 1.0}),
    "value-clip": ("value", {"clip": 0.3}),
    **{f"{k}-plain": (k, {"importance": 0}) for k in ("kl_k1", "kl_k2", "kl_k3")},
}
POLICY_CASES = [case for case, (name, _) in CASES.items() if name in PROPORTIONAL]


def function(case):
    return loss_by_name(LossSpec(*CASES[case]))


def reference(case, rows, pi=None):
    name, constants = CASES[case]
    return globals()[f"np_{name}"](rows, rows.pi if pi is None else pi, rows.pi, **constants)


def reference_gradient(case, rows, weights):
    """Of sum(weights * terms) by a complex step, a difference without cancellation: exact, and undisturbed by kinks."""
    found, h = np.zeros(len(rows.pi)), 1e-30
    for i in range(len(found)):
        pi = rows.pi.astype(complex)
        pi[i] += 1j * h
        found[i] = (weights * reference(case, rows, pi)).imag.sum() / h
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_value_and_gradient_match_numpy(case, seed):
    rows = make(seed, CASES[case][0])
    x, weights = inputs(rows), np.random.default_rng(seed).uniform(0.5, 1.5, len(rows.pi))
    terms = function(case)(x).terms
    np.testing.assert_allclose(terms.detach().numpy(), reference(case, rows), rtol=1e-12, atol=1e-13)
    found = gradient((torch.tensor(weights) * terms).sum(), x)
    np.testing.assert_allclose(found, reference_gradient(case, rows, weights), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", [c for c in POLICY_CASES if "clipped" in function(c)(inputs(make())).metrics])
def test_every_bound_is_met_on_both_sides(case):
    """Else the test above would say nothing about it."""
    clipped = np.concatenate([function(case)(inputs(make(s, CASES[case][0]))).metrics["clipped"].numpy() for s in range(4)])
    assert 0 < clipped.sum() < len(clipped)


def test_entropy_is_minus_the_entropy_given():
    x = inputs(make())
    assert x.entropy is not None
    (found,) = torch.autograd.grad(function("entropy")(x).terms.sum(), x.entropy)
    assert (found == -1).all()


def tokens(ratios, a, log_pi=-1.0, lengths=None, lag=1):
    """Rows with pi / mu = pi / p_hat = the ratios given; one token a sequence, unless lengths say otherwise."""
    ratios = np.asarray(ratios, np.float64)
    n = len(ratios)
    pi, sequence = np.full(n, log_pi), np.repeat(np.arange(len(lengths or ratios)), lengths or 1)
    old = pi - np.log(ratios)
    return Rows(pi, old, old.copy(), np.broadcast_to(np.float64(a), n).copy(), old, np.full(n, lag), sequence, 0 * pi)


@pytest.mark.parametrize(
    ("name", "constants", "rows", "expected"),
    [
        (
            "ppo_clip",
            {"clip_low": 0.2, "clip_high": 0.28},
            tokens([1.5, 0.5, 1.5, 0.5], [2, 2, -2, -2]),
            [-2.56, -1, 3, 1.6],
        ),
        ("ppo_clip", {"dual_clip": 3.0}, tokens([5, 5], [-1, 1]), [3.0, -1.2]),
        ("aipo", {"cap": 5.0}, tokens([8.0, 0.25], [1, -1]), [5.0, -0.25]),
        ("a3po", {}, tokens([4, 4], [1, -1], lag=2), [-2.4, 4.0]),  # r = 2, p_hat / mu = 2
        ("a3po", {}, tokens([4, 4], [1, -1], lag=0), [-4.0, 4.0]),  # r = 1, p_hat / mu = 4
        ("gspo", {"clip_low": 0.02, "clip_high": 0.05}, tokens([np.exp(0.2), 1], 1, lengths=[2]), [-1.05, -1.05]),
        ("gspo", {"clip_low": 0.02, "clip_high": 0.05}, tokens([np.exp(0.2), 1], -1, lengths=[2]), [np.exp(0.1)] * 2),
        ("cispo", {}, tokens([8.0, 0.1], 1), [5.0, 0.1]),
        ("sapo", {}, tokens([2, 2], [1, -1]), [-2.924234315, 2.8219996159]),
        ("gmpo", {}, tokens([np.exp(0.9), 1], 1, lengths=[2]), [-1.221402758] * 2),
        ("gmpo", {}, tokens([np.exp(0.9), 1], -1, lengths=[2]), [np.exp(0.45)] * 2),
        ("topr", {}, tokens(np.exp([-0.5, 0.2]), -1, lengths=[2]), [-0.7408182207] * 2),
        ("topr", {}, tokens(np.exp([-0.5, 0.2]), 1, lengths=[2]), [1, 1]),
        ("rollout_mask", {}, tokens([0.79, 0.81, 1.27, 1.29], 1), [0, 0.81, 1.27, 0]),
        ("importance", {}, tokens([3.0], 2), [-6.0]),
        ("reinforce", {}, tokens([3.0], 2), [2.0]),
        ("kl_k1", {"importance": 0}, tokens([2.0], 1), [np.log(2)]),
        ("kl_k2", {"importance": 0}, tokens([2.0], 1), [np.log(2) ** 2 / 2]),
        ("kl_k3", {"importance": 0}, tokens([2.0], 1), [0.1931471806]),
        ("kl_k3", {}, tokens([2.0], 1), [0.3862943611]),
    ],
)
def test_numbers_worked_out_by_hand(name, constants, rows, expected):
    terms = loss_by_name(LossSpec(name, constants))(inputs(rows)).terms
    np.testing.assert_allclose(terms.detach().numpy(), expected, rtol=1e-7, atol=1e-12)


def keeps(r, a, low=0.9, high=1.4):
    return 0.0 if (a > 0 and r > high) or (a < 0 and r < low) else r


RULES = {  # a token's gradient is -A times this
    "ppo_clip": ({"clip_low": 0.1, "clip_high": 0.4}, keeps),
    "dual": ({"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 3.0}, lambda r, a: 0.0 if a < 0 and r > 3 else keeps(r, a)),
    "a3po": ({"clip_low": 0.1, "clip_high": 0.4}, keeps),  # at lag 1, p_hat = mu
    "gspo": ({"clip_low": 0.1, "clip_high": 0.4}, keeps),
    "gspo_token": ({"clip_low": 0.1, "clip_high": 0.4}, keeps),
    "gmpo": ({"bound": 0.3}, lambda r, a: keeps(r, a, np.exp(-0.3), np.exp(0.3))),
    "cispo": ({"clip_low": 0.1, "clip_high": 0.4}, lambda r, a: min(max(r, 0.9), 1.4)),
    "aipo": ({"cap": 1.4}, lambda r, a: min(r, 1.4)),
    "rollout_mask": ({"clip_low": 0.1, "clip_high": 0.4}, lambda r, a: r if 0.9 < r < 1.4 else 0.0),
    "topr": ({"cap": 1.4}, lambda r, a: 1.0 if a > 0 else min(r, 1.4)),
}


@pytest.mark.parametrize("a", [1.5, -1.5])
@pytest.mark.parametrize("rule", RULES)
def test_what_is_dropped_and_what_is_capped(rule, a):
    """Every sign on every side of asymmetric bounds."""
    constants, factor = RULES[rule]
    ratios = np.array([0.5, 0.73, 0.75, 0.89, 0.91, 1.0, 1.34, 1.36, 1.39, 1.41, 2.9, 3.1])
    x = inputs(tokens(ratios, a))
    result = LOSSES["ppo_clip" if rule == "dual" else rule](x, **constants)
    factors = np.array([factor(r, a) for r in ratios])
    np.testing.assert_allclose(gradient(result.terms.sum(), x), -a * factors, rtol=1e-12, atol=1e-15)
    altered = (a < 0) & (ratios > 1.4) if rule == "topr" else ~np.isclose(factors, ratios)
    np.testing.assert_array_equal(result.metrics["clipped"].numpy(), altered)


@pytest.mark.parametrize("a", [1.5, -1.5])
@pytest.mark.parametrize(
    ("name", "delta", "mu", "moves"),  # pi - mu -> whether it is far
    [
        ("dppo_tv", 0.15, 0.5, {-0.16: True, -0.14: False, 0.0: False, 0.14: False, 0.16: True}),
        ("dppo_kl", 0.05, 0.5, {-0.16: True, -0.15: False, 0.0: False, 0.15: False, 0.16: True}),
        ("dppo_kl", 0.04, 0.9, {-0.11: True, -0.1: False}),  # KL(mu, pi) of the last is 0.037, KL(pi, mu) 0.044
        ("dppo_kl", 0.05, 1.0, {-0.5: True, 0.0: False}),  # log(1 - mu) and log(1 - pi) are -inf here
        ("dppo_kl", 0.05, 0.5, {0.5: True}),
        ("dppo_tv", 0.15, 1e-6, {1e-3: False, 0.16: True}),  # a ratio of 1000 is no matter
    ],
)
def test_dppo_drops_what_goes_on_outwards(name, delta, mu, moves, a):
    moved, far = np.array(list(moves)), np.array(list(moves.values()))
    x = inputs(tokens((mu + moved) / mu, a, np.log(mu + moved)))
    result = LOSSES[name](x, delta=delta)
    dropped = far & (np.sign(moved) == np.sign(a))
    np.testing.assert_allclose(gradient(result.terms.sum(), x), np.where(dropped, 0, -a * (mu + moved) / mu), rtol=1e-9)
    np.testing.assert_array_equal(result.metrics["clipped"].numpy(), dropped)


def test_rho_is_r_times_k_for_a_perturbed_engine():
    rows = make()
    x = inputs(replace(rows, mu=torch.tensor(rows.mu).bfloat16().double().numpy()))
    r, k = ratio(x.logprobs, x.old), ratio(x.old, x.behaviour)
    torch.testing.assert_close(ratio(x.logprobs, x.behaviour), r * k, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_extreme_log_ratios_stay_finite(case, dtype):
    some = np.array([-900.0, -0.1, 0.0, -30.0, -1e-9, 1e-7])  # a log probability may be rounded to just above 0
    pi, old, ref = (x.ravel() for x in np.meshgrid(some, some, some))
    n = len(pi)
    sequence = np.arange(n) // 5
    for a in (1.0, -1.0):
        rows = Rows(pi, old, old[::-1].copy(), np.full(n, a), ref, np.arange(n) % 4, sequence, np.ones(n))
        x = inputs(rows, dtype)
        terms = function(case)(x).terms
        assert terms.dtype == dtype and torch.isfinite(terms).all()
        assert np.isfinite(gradient(terms.sum() + 0 * x.logprobs.sum(), x)).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("garbage", [float("nan"), float("-inf"), float("inf")])
def test_garbage_without_a_weight_has_exactly_no_gradient(case, garbage):
    rows = make(name=CASES[case][0])
    weights = torch.tensor(np.random.default_rng(1).uniform(0.5, 1, len(rows.pi)))
    without = np.arange(len(rows.pi)) % 3 == 0
    without |= np.isin(rows.sequence, (1, 4, 9))  # a row of one token, one in the middle, the last
    weights[torch.tensor(without)] = 0
    clean = inputs(rows)
    value, sums = evaluate(function(case), clean, weights)
    expected = gradient(value, clean)
    for name in ("pi", "old", "mu", "a", "ref", "h"):
        getattr(rows, name)[without] = garbage
    dirty = inputs(rows)
    total, metrics = evaluate(function(case), dirty, weights)
    found = gradient(total, dirty)
    assert np.array_equal(found, expected) and (found[without] == 0).all()
    assert torch.equal(total, value) and metrics == sums
    assert metrics["tokens"] == (weights != 0).sum()


@pytest.mark.parametrize("case", CASES)
def test_no_token_at_all(case):
    for rows in (make(lengths=()), make()):
        x = inputs(rows)
        total, metrics = evaluate(function(case), x, torch.zeros(len(rows.pi), dtype=torch.float64))
        assert total.item() == 0 and metrics["tokens"] == 0 and (gradient(total, x) == 0).all()


def test_evaluate_weighs_terms_and_sums_metrics():
    rows = make()
    weights = np.random.default_rng(2).uniform(0, 1, len(rows.pi))
    total, metrics = evaluate(function("asymmetric"), replace(inputs(rows), entropy=None), torch.tensor(weights))
    assert total.item() == pytest.approx((weights * reference("asymmetric", rows)).sum(), rel=1e-12)
    r = np.exp(rows.pi - rows.old)
    assert metrics["clipped"].item() == (((rows.a > 0) & (r > 1.4)) | ((rows.a < 0) & (r < 0.9))).sum() > 0
    assert metrics["ratio"].item() == pytest.approx(r.sum())
    assert metrics["loss"].item() == total.item() and "entropy" not in metrics


def test_entropy_is_summed_over_the_tokens_with_a_weight():
    rows = make()
    rows.h[:] = np.arange(len(rows.h))
    weights = torch.zeros(len(rows.h))
    weights[3] = weights[5] = 0.5
    assert evaluate(function("cross_entropy"), inputs(rows), weights)[1]["entropy"] == 8


def test_selecting_cuts_every_field():
    x = inputs(make())
    x = replace(x, extras={"place": torch.arange(len(x.logprobs))[:, None]})
    keep = torch.arange(len(x.logprobs)) % 2 == 0
    cut = x.select(keep)
    assert cut.sequences == x.sequences
    assert torch.equal(cut.extra("place"), x.extra("place")[keep])
    for f in fields(LossInput):
        if f.name not in ("sequences", "extras"):
            assert torch.equal(getattr(cut, f.name), getattr(x, f.name)[keep])
    bare = LossInput(x.logprobs, x.behaviour, x.old, x.advantages, x.sequence, x.sequences).select(keep)
    assert bare.reference is bare.entropy is bare.lag is None


@pytest.mark.parametrize(
    ("case", "missing", "message"),
    [
        *((k, "reference", f"{k} needs reference logprobs: set algorithm.reference") for k in ("kl_k1", "kl_k2", "kl_k3")),
        ("a3po", "lag", "a3po needs each token's lag"),
        ("entropy", "entropy", "entropy needs each token's entropy"),
    ],
)
def test_what_a_loss_needs_and_does_not_get_is_named(case, missing, message):
    with pytest.raises(ValueError, match=message):
        function(case)(replace(inputs(make()), **{missing: None}))


def test_tables():
    assert PER_SEQUENCE | ANCHORED <= PROPORTIONAL < set(LOSSES)
    assert set(LOSSES) - PROPORTIONAL == {"cross_entropy", "kl_k1", "kl_k2", "kl_k3", "entropy", "value", "score"}
    assert {"np_" + name for name in LOSSES} == {n for n in globals() if n.startswith("np_")} - {"np_clip"}


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_said_to_read_p_hat_is_what_reads_it(name):
    rows = make(name=name)
    expected = LOSSES[name](inputs(rows)).terms
    found = LOSSES[name](replace(inputs(rows), old=torch.full_like(expected, torch.nan))).terms
    assert torch.equal(found, expected) is (name not in ANCHORED) and found.isnan().any().item() is (name in ANCHORED)
    if name in ANCHORED:
        assert torch.equal(
            LOSSES[name](replace(inputs(rows), behaviour=torch.full_like(expected, torch.nan))).terms, expected
        )


@pytest.mark.parametrize("each", LOSSES.values(), ids=lambda f: f.__name__)
def test_each_says_its_formula_its_source_when_and_at_what_cost(each):
    formula, _, rest = inspect.cleandoc(each.__doc__).rpartition("\n\n")
    assert formula.endswith(".")
    assert re.fullmatch(r"Source: .+\.\nWhen: .+\.\nCost: .+\.", rest, re.DOTALL)
    assert [line for line in rest.split("\n") if re.match(r"\w+: ", line)] == re.findall(
        r"(?m)^(?:Source|When|Cost): .*", rest
    )
    constants = [p for p in inspect.signature(each).parameters.values() if p.name != "x"]
    assert all(p.kind is p.KEYWORD_ONLY and type(p.default) is float for p in constants)


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_the_loss_of_a_critic(clip):
    rng = np.random.default_rng(0)
    v, target, old = rng.normal(0, 1, 50), rng.normal(0, 1, 50), rng.normal(0, 1, 50)
    near = np.clip(v, old - clip, old + clip) if clip else v
    live = torch.tensor(v, requires_grad=True)
    x = replace(values_only(50), values=live, returns=torch.tensor(target), old_values=torch.tensor(old))
    result = LOSSES["value"](x, clip=clip)
    found = result.terms
    np.testing.assert_allclose(result.metrics["value_error"].detach(), (v - target) ** 2, rtol=1e-12)
    np.testing.assert_allclose(found.detach(), np.maximum((v - target) ** 2, (near - target) ** 2) / 2, rtol=1e-12)
    (slope,) = torch.autograd.grad(found.sum(), live)
    held = (np.abs(v - old) > clip) & (np.abs(near - target) > np.abs(v - target)) if clip else np.zeros(50, bool)
    np.testing.assert_allclose(slope, np.where(held, 0, v - target), rtol=1e-12)
    assert held.any() == (clip > 0)
    if clip:
        np.testing.assert_array_equal(result.metrics["value_clipped"], (near - target) ** 2 > (v - target) ** 2)


def test_the_loss_of_a_score_is_linear_in_it():
    live, a = torch.tensor([2.0, -1.0], requires_grad=True), torch.tensor([0.5, -3.0])
    terms = LOSSES["score"](replace(values_only(2), values=live, advantages=a)).terms
    assert terms.tolist() == [-1.0, -3.0]
    assert torch.autograd.grad(terms.sum(), live)[0].tolist() == [-0.5, 3.0]


@pytest.mark.parametrize("name", ["value", "score"])
def test_values_are_asked_for_by_name(name):
    with pytest.raises(ValueError, match=rf"{name} needs a critic's values and returns: set algorithm\.critic"):
        LOSSES[name](values_only(3))


def values_only(count):
    nothing = torch.zeros(count)
    return LossInput(nothing, nothing, nothing, nothing, torch.arange(count), count)


def test_unknown_names_and_constants_say_what_is_accepted():
    with pytest.raises(
        ValueError, match=r"loss 'ppo_clop'.*ppo_clip, .*score, or FILE\.py:function; did you mean 'ppo_clip'"
    ):
        loss_by_name(LossSpec("ppo_clop"))
    with pytest.raises(ValueError, match=r"'aipo' has no constant clip_high: it takes cap"):
        loss_by_name(LossSpec("aipo", {"clip_high": 0.2}))
    with pytest.raises(ValueError, match="takes none"):
        loss_by_name(LossSpec("aipo", also=(LossSpec("cross_entropy", {"cap": 1.0}),)))


@pytest.mark.parametrize(
    ("name", "constant", "value"),
    [
        *(
            (n, c, -0.1)
            for n in ("ppo_clip", "a3po", "gspo", "gspo_token", "cispo", "rollout_mask")
            for c in ("clip_low", "clip_high")
        ),
        *(("ppo_clip", "dual_clip", v) for v in (0.9, 1.0, -1)),
        *((n, "cap", v) for n in ("aipo", "topr") for v in (0, -1)),
        *(("sapo", c, 0) for c in ("tau_positive", "tau_negative")),
        *((n, "delta", -0.1) for n in ("dppo_tv", "dppo_kl")),
        ("gmpo", "bound", -0.1),
        *((n, "importance", 0.5) for n in ("kl_k1", "kl_k2", "kl_k3")),
    ],
)
def test_constants_out_of_range_are_refused(name, constant, value):
    for wrong in (value, float("nan")):
        with pytest.raises(ValueError, match=rf"{constant}=.*expected"):
            loss_by_name(LossSpec(name, {constant: wrong}))(inputs(make(name=name)))
    with pytest.raises(ValueError, match=r"clip=-1: expected"):
        LOSSES["value"](values_only(1), clip=-1)


EXTRAS = LossSpec(
    "ppo_clip",
    {"clip_low": 0.1, "clip_high": 0.4},
    also=(
        LossSpec("kl_k3", {"importance": 1.0}, weight=0.01),
        LossSpec("kl_k1", weight=-0.5, also=(LossSpec("cross_entropy", weight=3.0),)),
        LossSpec("entropy", weight=0.02),
    ),
)


def test_extras_are_added_each_times_its_weight():
    rows = make()
    x, weights = inputs(rows), np.random.default_rng(5).uniform(0, 1, len(rows.pi))
    parts = {"asymmetric": 1, "kl_k3": 0.01, "kl_k1": -0.5, "cross_entropy": -1.5}
    result = loss_by_name(EXTRAS)(x)
    expected = sum(w * reference(case, rows) for case, w in parts.items()) - 0.02 * rows.h
    np.testing.assert_allclose(result.terms.detach(), expected, rtol=1e-12)
    found = gradient((torch.tensor(weights) * result.terms).sum(), x)
    expected = sum(w * reference_gradient(case, rows, weights) for case, w in parts.items())
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    assert list(result.metrics) == ["clipped", "ratio", "kl", "kl_k1/kl"]
    np.testing.assert_allclose(result.metrics["kl"].detach(), reference("kl_k3", rows))
    np.testing.assert_allclose(result.metrics["kl_k1/kl"].detach(), reference("kl_k1", rows))
    alone = loss_by_name(LossSpec("aipo", weight=0.25))(x).terms
    torch.testing.assert_close(alone, LOSSES["aipo"](x).terms / 4)


def test_extras_travel():
    assert decode(encode({"policy": EXTRAS}), dict[str, LossSpec]) == {"policy": EXTRAS}
    assert decode(encode({"name": "aipo"}), LossSpec) == LossSpec("aipo")
    with pytest.raises(CodecError):
        decode(encode({"name": "aipo", "also": [{"params": {}}]}), LossSpec)


def test_a_users_loss_from_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from tidemill.algorithms.losses import Loss\n"
        "def reinforce(x, *, strength=1.0):\n    return Loss(-strength * x.advantages * x.logprobs)\n"
        "def reduced(x):\n    return Loss(x.logprobs.mean())\n"
        "def wrong(x):\n    return 3\n"
    )
    path, rows = str(tmp_path / "mine.py"), make()
    mine = LossSpec(f"{path}:reinforce", {"strength": 2.0})
    for spec, factor in ((mine, 2), (LossSpec("reinforce", also=(replace(mine, weight=0.5),)), 2)):
        terms = loss_by_name(spec)(inputs(rows)).terms
        np.testing.assert_allclose(terms.detach(), -factor * rows.a * rows.pi)
    with pytest.raises(ValueError, match="no constant power: it takes strength"):
        loss_by_name(LossSpec(f"{path}:reinforce", {"power": 2.0}))
    with pytest.raises(ValueError, match="has no 'missing'"):
        loss_by_name(LossSpec(f"{path}:missing"))
    with pytest.raises(ValueError, match="does not exist"):
        loss_by_name(LossSpec(f"{tmp_path}/none.py:f"))
    for name, given in (("reduced", r"shape \(\)"), ("wrong", "int")):
        for spec in (LossSpec(f"{path}:{name}"), LossSpec("aipo", also=(LossSpec(f"{path}:{name}"),))):
            with pytest.raises(ValueError, match=f"{given}: expected Loss"):
                evaluate(loss_by_name(spec), inputs(rows), torch.ones(len(rows.pi)))


def test_the_bound_on_log_ratios():
    assert losses.LOG_RATIO_BOUND == 20
    x = torch.tensor([30.0, -30.0, 1.0], requires_grad=True)
    r = ratio(x, 0)
    torch.testing.assert_close(r, torch.tensor([20.0, -20.0, 1.0]).exp())
    assert torch.autograd.grad(r.sum(), x)[0].ne(0).tolist() == [False, False, True]
