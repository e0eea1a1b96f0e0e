"""Is the gradient the right one? On a policy small enough to enumerate, with another policy that sampled: expectations,
not samples. Where theory says unbiased, the corrected gradient is the on-policy one; where a factor is cut, the bias is the
predicted one."""

import itertools

import numpy as np
import pytest
import torch

from tidemill.algorithms.advantages import ADVANTAGES, Scores
from tidemill.algorithms.corrections import CORRECTIONS, Ratios
from tidemill.algorithms.losses import LossInput, evaluate, loss_by_name
from tidemill.core.types import LossSpec

LETTERS = 3


class Policy:
    """Words of `length` letters: a first letter, then each by the one before it. Logits are the parameters."""

    def __init__(self, length, seed):
        generator = torch.Generator().manual_seed(seed)
        self.length = length
        self.logits = torch.randn(LETTERS + 1, LETTERS, generator=generator, dtype=torch.float64).requires_grad_()
        self.words = list(itertools.product(range(LETTERS), repeat=length))

    def token_logprobs(self):
        """[words, length], live."""
        table = torch.log_softmax(self.logits, -1)
        return torch.stack([torch.stack([table[(0, *(w + 1 for w in word))[t], word[t]] for t in range(self.length)])
                            for word in self.words])  # fmt: skip


def rewards(policy):
    return np.random.default_rng(5).normal(size=len(policy.words))


def on_policy(policy):
    """The gradient of -E_pi[R]: what every unbiased loss has."""
    logprobs = policy.token_logprobs().sum(1)
    objective = (logprobs.exp() * torch.from_numpy(rewards(policy))).sum()
    return torch.autograd.grad(-objective, policy.logits)[0]


def expected(policy, sampler, loss, factors=None, weights=None):
    """E over words of the sampler: the loss on each, its tokens summed; `factors` [words, length] times the reward."""
    live, mu = policy.token_logprobs(), sampler.token_logprobs().detach()
    reward = torch.from_numpy(rewards(policy))[:, None].expand_as(live)
    a = reward if factors is None else reward * torch.from_numpy(factors)
    n = len(policy.words)
    x = LossInput(
        live.flatten(),
        mu.flatten(),
        live.detach().flatten(),
        a.flatten(),
        torch.arange(n).repeat_interleave(policy.length),
        n,
    )
    probability = mu.sum(1).exp() if weights is None else weights
    total, _ = evaluate(loss_by_name(loss), x, probability.repeat_interleave(policy.length))
    return torch.autograd.grad(total, policy.logits)[0]


def factors_of(name, policy, sampler, **constants):
    """[words, length] of a correction, each word an attempt."""
    live, mu = policy.token_logprobs().detach().numpy(), sampler.token_logprobs().detach().numpy()
    n = len(policy.words)
    a = np.repeat(rewards(policy), policy.length)
    x = Ratios(live.ravel(), mu.ravel(), a, np.full(n, policy.length), np.zeros(live.size, np.int64))
    return CORRECTIONS[name](x, **constants).reshape(live.shape)


def same(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=atol)


HUGE = {"cap": 1e6}
WIDE = {"low": 0.0, "high": 1e6}


@pytest.mark.parametrize(
    ("loss", "correction"),
    [
        (LossSpec("aipo", HUGE), None),
        (LossSpec("importance"), None),
        (LossSpec("reinforce"), ("tis", HUGE)),
        (LossSpec("reinforce"), ("icepop", WIDE)),
        (LossSpec("ppo_clip"), ("tis", HUGE)),
        (LossSpec("cispo"), ("icepop", WIDE)),
        (LossSpec("sapo"), ("tis", HUGE)),
        (LossSpec("dppo_tv", {"delta": 1.0}), None),
    ],
)
def test_one_token_at_a_time_is_unbiased(loss, correction):
    policy, sampler = Policy(1, 0), Policy(1, 1)
    factors = factors_of(correction[0], policy, sampler, **correction[1]) if correction else None
    same(expected(policy, sampler, loss, factors), on_policy(policy))
    if factors is not None:  # and without its correction it is not
        biased = expected(policy, sampler, loss)
        assert (biased - on_policy(policy)).abs().max() > 1e-2


@pytest.mark.parametrize("correction", [("tis_sequence", HUGE), ("mis_sequence", WIDE)])
@pytest.mark.parametrize("loss", ["reinforce", "ppo_clip", "cispo"])
def test_the_product_over_an_attempt_is_unbiased(loss, correction):
    policy, sampler = Policy(3, 0), Policy(3, 1)
    factors = factors_of(correction[0], policy, sampler, **correction[1])
    same(expected(policy, sampler, LossSpec(loss), factors), on_policy(policy))


def test_a_ratio_for_each_token_leaves_the_bias_of_what_came_before_and_after():
    """Token-level factors weigh each token by its own ratio alone: the state it is in, and the reward that follows, are the
    sampler's. The gradient is that of E_mu[prefix] E_pi[token] E_mu[suffix]: enumerated by hand here."""
    policy, sampler = Policy(2, 0), Policy(2, 1)
    factors = factors_of("tis", policy, sampler, **HUGE)
    live, mu = policy.token_logprobs(), sampler.token_logprobs().detach()
    r = torch.from_numpy(rewards(policy))
    first = (live[:, 0].exp() * mu[:, 1].exp() * r).sum()  # pi for the first letter, the sampler after it
    second = (mu[:, 0].exp() * live[:, 1].exp() * r).sum()
    predicted = torch.autograd.grad(-(first + second), policy.logits)[0]
    found = expected(policy, sampler, LossSpec("reinforce"), factors)
    same(found, predicted)
    assert (found - on_policy(policy)).abs().max() > 1e-3


@pytest.mark.parametrize("cap", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("way", ["tis_sequence", "aipo"])
def test_a_cut_factor_has_the_predicted_bias(way, cap):
    """mu min(pi / mu, C) = min(pi, C mu): the gradient is as if words were drawn from that."""
    length = 3 if way == "tis_sequence" else 1
    policy, sampler = Policy(length, 0), Policy(length, 1)
    live, mu = policy.token_logprobs().sum(1), sampler.token_logprobs().sum(1).detach()
    drawn = torch.minimum(live.exp(), cap * mu.exp()).detach()
    predicted = torch.autograd.grad(-(drawn * torch.from_numpy(rewards(policy)) * live).sum(), policy.logits)[0]
    if way == "aipo":
        found = expected(policy, sampler, LossSpec("aipo", {"cap": cap}))
    else:
        found = expected(policy, sampler, LossSpec("reinforce"), factors_of(way, policy, sampler, cap=cap))
    same(found, predicted)
    assert (found - on_policy(policy)).abs().max() > 1e-3


@pytest.mark.parametrize("way", ["icepop", "mis_sequence"])
def test_a_masked_factor_has_the_predicted_bias(way):
    length = 3 if way == "mis_sequence" else 1
    policy, sampler = Policy(length, 0), Policy(length, 1)
    live, mu = policy.token_logprobs().sum(1), sampler.token_logprobs().sum(1).detach()
    k = (live - mu).exp().detach()
    high = float(k.median()) * 1.01
    kept = (k <= high).double()
    assert 0 < kept.sum() < len(kept)
    predicted = torch.autograd.grad(
        -(kept * live.exp().detach() * torch.from_numpy(rewards(policy)) * live).sum(), policy.logits
    )[0]
    found = expected(policy, sampler, LossSpec("reinforce"), factors_of(way, policy, sampler, low=0.0, high=high))
    same(found, predicted)


@pytest.mark.parametrize("name", ["rloo", "dr_grpo", "reinforce"])
def test_baselines_do_not_move_the_expectation(name):
    """All groups of three words, enumerated. rloo and reinforce: the on-policy gradient; dr_grpo: (n - 1) / n of it."""
    policy, size = Policy(1, 0), 3
    live = policy.token_logprobs()[:, 0]
    r, total = rewards(policy), torch.zeros((), dtype=torch.float64)
    for group in itertools.product(range(LETTERS), repeat=size):
        index = list(group)
        scores = Scores(r[index], np.zeros(size, np.int64), np.ones(size, np.int64))
        a = torch.from_numpy(ADVANTAGES[name](scores))
        total = total - live[index].sum().exp().detach() * (a * live[index]).sum() / size
    share = (size - 1) / size if name == "dr_grpo" else 1.0
    same(torch.autograd.grad(total, policy.logits)[0], share * on_policy(policy))
