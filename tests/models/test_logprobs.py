"""Chunked logprobs equal the plain computation, forward and backward, and never hold all logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_zoo import random_decoder
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tidemill.models import logprobs as module
from tidemill.models.logprobs import KeptIds, token_logprobs


def case(rows: int, vocab: int, width: int, dtype: torch.dtype = torch.float64) -> tuple[Any, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + vocab)
    head = SimpleNamespace(head_weight=torch.randn(vocab, width, generator=generator, dtype=dtype).requires_grad_())
    hidden = torch.randn(rows, width, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(vocab, (rows,), generator=generator)
    return head, hidden, targets, torch.rand(rows, generator=generator, dtype=dtype) + 0.5


def plain(head: Any, hidden: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    distribution = torch.distributions.Categorical(logits=hidden @ head.head_weight.T / temperature[:, None])
    return distribution.log_prob(targets), distribution.entropy()


@settings(max_examples=40)
@given(st.integers(1, 9), st.integers(1, 12), st.sampled_from([None, 1, 2, 4, 100]), st.booleans(), st.booleans())
def test_values_and_gradients_are_exact(rows: int, vocab: int, chunk: int | None, use_logp: bool, use_entropy: bool) -> None:
    head, hidden, targets, temperature = case(rows, vocab, 5)
    weights = torch.linspace(-1, 2, rows, dtype=torch.float64)

    def loss(logp: Tensor, entropy: Tensor | None) -> Tensor:
        total = hidden.sum() * 0 + head.head_weight.sum() * 0
        total = total + (weights * logp).sum() if use_logp else total
        return total + (weights.flip(0) * entropy).sum() if use_entropy and entropy is not None else total

    expected = plain(head, hidden, targets, temperature)
    expected_grads = torch.autograd.grad(loss(*expected), (hidden, head.head_weight))
    logp, entropy = token_logprobs(head, hidden, targets, temperature, entropy=use_entropy, chunk=chunk)
    grads = torch.autograd.grad(loss(logp, entropy), (hidden, head.head_weight))
    assert (entropy is not None) == use_entropy
    assert torch.allclose(logp, expected[0], rtol=0, atol=1e-12)
    assert entropy is None or torch.allclose(entropy, expected[1], rtol=0, atol=1e-12)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-12)


def test_one_temperature_for_all() -> None:
    head, hidden, targets, _ = case(6, 9, 4)
    every = torch.full((6,), 0.7, dtype=torch.float64)
    for chunk in (None, 4):
        one, _ = token_logprobs(head, hidden, targets, 0.7, chunk=chunk)
        assert torch.equal(one, token_logprobs(head, hidden, targets, every, chunk=chunk)[0])
    with pytest.raises(ValueError, match="temperature=0"):
        token_logprobs(head, hidden, targets, 0)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("entropy", [False, True])
def test_all_logits_are_never_held(entropy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PLAIN", 1000)
    monkeypatch.setattr(module, "_CHUNK", {"cpu": 1 << 12})
    monkeypatch.setattr(module, "_ROWS", 1)
    head, hidden, targets, temperature = case(64, 500, 3, torch.float32)

    def largest() -> int:
        with Largest() as mode:
            logp, entropies = token_logprobs(head, hidden, targets, temperature, entropy=entropy)
            (logp.sum() + (0 if entropies is None else entropies.sum())).backward()
        return mode.elements

    assert largest() <= 1 << 12
    monkeypatch.setattr(module, "_PLAIN", 1 << 30)
    assert largest() == 64 * 500  # the check can fail


def test_autocast_does_not_reach_the_head() -> None:
    decoder = random_decoder("qwen3")
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = torch.arange(5)
    for chunk in (None, 2):
        exact, _ = token_logprobs(decoder, hidden, targets, chunk=chunk)
        reference = torch.autograd.grad(exact.sum(), (hidden, decoder.head_weight))
        with torch.autocast("cpu", torch.bfloat16):
            mixed, _ = token_logprobs(decoder, hidden, targets, chunk=chunk)
        grads = torch.autograd.grad(mixed.sum(), (hidden, decoder.head_weight))
        assert mixed.dtype == torch.float32 and torch.equal(mixed, exact)
        assert all(torch.equal(a, b) for a, b in zip(grads, reference, strict=True))


def test_bfloat16_weights_get_bfloat16_gradients_of_a_float32_head() -> None:
    decoder = random_decoder("qwen3", dtype=torch.bfloat16)
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    logp, _ = token_logprobs(decoder, hidden, torch.arange(5), chunk=2)
    expected = (hidden.float() @ decoder.head_weight.float().T).log_softmax(-1)[torch.arange(5), torch.arange(5)]
    assert logp.dtype == torch.float32 and torch.allclose(logp, expected, atol=1e-5)
    logp.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16
    assert decoder.head_weight.grad is not None and decoder.head_weight.grad.dtype == torch.bfloat16


def test_frozen_weights_and_no_rows() -> None:
    head, hidden, targets, temperature = case(6, 9, 4)
    head.head_weight.requires_grad_(False)
    for chunk in (None, 4):
        logp, _ = token_logprobs(head, hidden, targets, temperature, chunk=chunk)
        assert bool(torch.autograd.grad(logp.sum(), hidden)[0].any())
        empty, entropy = token_logprobs(head, hidden[:0], targets[:0], temperature[:0], entropy=True, chunk=chunk)
        assert empty.shape == (0,) and entropy is not None and entropy.shape == (0,)


def kept_ids(kept: dict[int, list[int]], vocab: int, lacks: bool) -> KeptIds:
    """The ids that rows keep, listed for each, or as those that they lack, where rows may share a set."""
    lists = [sorted({*range(vocab)} - {*ids}) if lacks else ids for ids in kept.values()]
    distinct = [list(each) for each in dict.fromkeys(map(tuple, lists))] if lacks else lists
    offsets = torch.tensor([0, *np.cumsum([len(each) for each in distinct])])
    sets = torch.tensor([distinct.index(each) for each in lists])
    ids = torch.tensor([i for each in distinct for i in each])
    return KeptIds(torch.tensor([*kept]), sets, ids, offsets, torch.full((len(distinct),), lacks))


@pytest.mark.parametrize("chunk", [None, 1, 3])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("lacks", [False, True])
@pytest.mark.parametrize("every", [False, True])
def test_over_the_ids_that_were_kept(chunk: int | None, entropy: bool, lacks: bool, every: bool) -> None:
    """Some rows, or every one, are of a few ids only; against the plain distribution over these ids."""
    head, hidden, targets, temperature = case(5, 9, 4)
    kept = {1: [int(targets[1]), 2, 7] if int(targets[1]) not in (2, 7) else [2, 7], 3: [int(targets[3])]}
    if every:
        both = sorted({int(targets[0]), int(targets[2]), int(targets[4]), 8})
        kept = dict(sorted((kept | {0: both, 2: both, 4: both}).items()))
    support = kept_ids(kept, 9, lacks)
    left_out = torch.zeros(5, 9, dtype=torch.bool)
    for row, each in kept.items():
        left_out[row] = True
        left_out[row, each] = False
    logits = (hidden @ head.head_weight.T / temperature[:, None]).masked_fill(left_out, -1e9)
    distribution = torch.distributions.Categorical(logits=logits)
    expected = distribution.log_prob(targets).sum() + (distribution.entropy() @ torch.arange(5.0).double() if entropy else 0)
    logp, found = token_logprobs(head, hidden, targets, temperature, entropy=entropy, support=support, chunk=chunk)
    total = logp.sum() + (found @ torch.arange(5.0).double() if found is not None else 0)
    assert torch.allclose(total, expected, rtol=1e-12) and float(logp[3].detach()) == 0
    for ours, theirs in zip(
        torch.autograd.grad(total, (hidden, head.head_weight)),
        torch.autograd.grad(expected, (hidden, head.head_weight)),
        strict=True,
    ):
        assert torch.isfinite(ours).all() and torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)
