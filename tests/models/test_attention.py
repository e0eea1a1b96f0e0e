"""Packing, windows, checkpointing and low precision: none of them changes what a sequence computes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_zoo import CONFIGS, logits, random_decoder
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from tidemill.models import decoder as decoder_module
from tidemill.models.attention import length_buckets, packed_attention, packed_positions
from tidemill.models.decoder import Decoder, Layer, recomputed
from tidemill.models.logprobs import token_logprobs


def reference(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """One sequence, one query at a time."""
    out = torch.empty_like(q)
    for i in range(q.shape[0]):
        low = 0 if window is None else max(0, i - window + 1)
        for head in range(q.shape[1]):
            kv = head * k.shape[1] // q.shape[1]
            weights = (k[low : i + 1, kv] @ q[i, head] / math.sqrt(q.shape[2])).softmax(0)
            out[i, head] = weights @ v[low : i + 1, kv]
    return out


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 24), min_size=1, max_size=6),
    st.sampled_from([(4, 2), (2, 2), (3, 1)]),
    st.sampled_from([None, 1, 3, 30]),
    st.integers(0, 99),
)
def test_packed_attention_is_attention(lengths: list[int], heads: tuple[int, int], window: int | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(sum(lengths), h, 4, generator=generator, dtype=torch.float64) for h in (*heads, heads[1]))
    got = packed_attention(lengths, [None, window])(1, q, k, v)
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    expected = torch.cat([reference(*part, window) for part in parts])
    assert got.dtype == torch.float64 and (got - expected).abs().max() < 1e-12


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=60))
def test_buckets_are_a_partition_with_little_padding(lengths: list[int]) -> None:
    buckets = length_buckets(lengths)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        longest = lengths[bucket[0]]
        assert all(0.85 * longest - 8 <= lengths[i] <= longest for i in bucket)


def gradients(decoder: Decoder, tokens: Tensor, lengths: list[int], checkpointing: float = 0.0) -> list[Tensor]:
    attend = packed_attention(lengths, decoder.arch.windows)
    hidden = decoder(tokens, packed_positions(lengths), attend, checkpointing=checkpointing)
    logprobs, _ = token_logprobs(decoder, hidden, tokens.roll(-1), 0.7)
    # Each token's weight is a function of its own sequence only, so that the sum does not depend on the packing.
    weights = torch.cat(
        [torch.sin(tokens[a : a + n].double().cumsum(0)) for a, n in zip(offsets(lengths), lengths, strict=True)]
    )
    last = torch.tensor([a + n - 1 for a, n in zip(offsets(lengths), lengths, strict=True)])
    weights[last] = 0.0
    decoder.zero_grad()
    (logprobs * weights).sum().backward()
    return [p.grad.clone() for p in decoder.parameters() if p.grad is not None]


def offsets(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


@pytest.mark.parametrize("name", CONFIGS)
def test_packing_changes_neither_logits_nor_gradients(name: str) -> None:
    decoder = random_decoder(name, dtype=torch.float64)
    lengths = [17, 3, 40, 1, 17, 26]
    tokens = torch.randint(48, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    parts = tokens.split(lengths)
    packed, grads = logits(decoder, tokens, lengths), gradients(decoder, tokens, lengths)
    alone = torch.cat([logits(decoder, part, [len(part)]) for part in parts])
    assert (packed - alone).abs().max() < 1e-10
    order = [2, 5, 0, 1, 4, 3]
    other = gradients(decoder, torch.cat([parts[i] for i in order]), [lengths[i] for i in order])
    singles = [sum(g) for g in zip(*(gradients(decoder, p, [len(p)]) for p in parts), strict=True)]
    scale = max(g.abs().max() for g in grads)
    for a, b, c in zip(grads, other, singles, strict=True):
        assert (a - b).abs().max() < 1e-10 * scale and (a - c).abs().max() < 1e-10 * scale


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("wanted", [[], [0], [8, 12, 42], [3, 3, 40, 1]])
def test_the_last_layer_is_computed_of_what_is_wanted(wanted: list[int], checkpointing: bool) -> None:
    decoder, lengths, chosen = (
        random_decoder("qwen3-tied-bias", dtype=torch.float64),
        [9, 4, 30],
        torch.tensor(wanted).long(),
    )
    tokens = torch.randint(48, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    attend, rows = packed_attention(lengths, decoder.arch.windows), list[int]()
    decoder.layers[-1].gate_up.register_forward_hook(lambda module, given, out: rows.append(len(out)))  # type: ignore[union-attr]

    def gradient(of: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        hidden = decoder(tokens, packed_positions(lengths), attend, of, checkpointing=checkpointing)
        hidden = hidden if of is not None else hidden[chosen]
        decoder.zero_grad()
        (hidden * torch.arange(hidden.numel()).view(hidden.shape).sin()).sum().backward()
        return hidden.detach(), [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in decoder.parameters()]

    whole, expected = gradient(None)
    hidden, found = gradient(chosen)
    assert set(rows) == {len(wanted), sum(lengths)}
    torch.testing.assert_close(hidden, whole)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("share", [True, 0.5, 0.7])
@pytest.mark.parametrize("name", ["llama3-biases", "qwen3-tied-bias"])
def test_checkpointing_gives_the_same_gradient(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, lengths = random_decoder(name), [9, 4, 30]
    tokens = torch.randint(48, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    plain, again = gradients(decoder, tokens, lengths), list[int]()

    def noted(layer: Layer, *given: Any, **how: Any) -> Any:
        again.append(layer.index)
        return recompute(layer, *given, **how)

    monkeypatch.setattr(decoder_module, "recompute", noted)
    found = gradients(decoder, tokens, lengths, checkpointing=share)
    assert len(again) == math.floor(share * len(decoder.layers) + 1e-9), "no more and no fewer layers than asked for"
    assert len(plain) == len(list(decoder.parameters())) and all(bool(g.any()) for g in plain)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


@pytest.mark.parametrize(
    ("layers", "share", "which"), [(8, 0.5, [1, 3, 5, 7]), (9, 1 / 3, [2, 5, 8]), (4, 0.1, []), (3, 1, [0, 1, 2])]
)
def test_the_layers_that_are_computed_again_are_spread(layers: int, share: float, which: list[int]) -> None:
    assert [layer for layer in range(layers) if recomputed(layer, share)] == which


def test_autocast_and_bfloat16_weights_stay_close() -> None:
    decoder, lengths = random_decoder("qwen3"), [20, 7]
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(parameter.bfloat16())  # what is compared is the arithmetic, not the rounding of weights
    tokens = torch.randint(48, (27,), generator=torch.Generator().manual_seed(0))
    attend = packed_attention(lengths, decoder.arch.windows)
    with torch.no_grad():
        exact = decoder(tokens, packed_positions(lengths), attend)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = decoder(tokens, packed_positions(lengths), attend)
        low = decoder.to(torch.bfloat16)(tokens, packed_positions(lengths), attend)
    assert mixed.dtype == torch.float32 and low.dtype == torch.bfloat16
    for other in (mixed, low.float()):
        assert 1e-5 < (other - exact).abs().mean() / exact.abs().mean() < 2e-2


def test_low_precision_attention_is_computed_in_float32() -> None:
    lengths = [12, 30]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(42, h, 8, generator=generator).bfloat16() for h in (4, 2, 2))
    attend = packed_attention(lengths, [None])
    wide = attend(0, q.float(), k.float(), v.float())
    assert (wide - attend(0, q.double(), k.double(), v.double())).abs().max() < 1e-6
    assert torch.equal(attend(0, q, k, v), wide.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):  # the rotary embedding leaves q and k in float32
        assert torch.equal(attend(0, q.float(), k.float(), v), wide.bfloat16())


def test_norms_and_head_keep_float64() -> None:
    """Else every invariance above would hold only to float32, by luck of rounding the same way."""
    decoder = random_decoder("qwen3", dtype=torch.float64)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * decoder.norm.weight
    assert (decoder.norm(x) - expected).abs().max() < 1e-14
    assert (decoder.logits(x) - x @ decoder.head_weight.T).abs().max() < 1e-13
