"""A tiny decoder and samples of every kind the trainer meets, for the tests beside this file."""

import itertools

import numpy as np
import torch

from tidemill.core.types import LossSpec, Sample
from tidemill.models.architecture import Architecture
from tidemill.models.decoder import Decoder
from tidemill.models.value_model import ValueModel
from tidemill.trainer import training_pass

VOCAB = 23
LOSSES = {"policy": LossSpec("ppo_clip", {"clip_low": 0.2, "clip_high": 0.28}), "supervised": LossSpec("cross_entropy")}

CPU = torch.device("cpu")
_numbers = itertools.count()
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def architecture(**changes):
    raw = {
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 24,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    return Architecture.from_dict(raw | changes)


def decoder(dtype=torch.float32, seed=0, **changes):
    model = Decoder(architecture(**changes)).to(dtype)
    model.initialise(torch.Generator().manual_seed(seed), std=0.3)
    return model


def sample(rng, prompt, sampled, *, group=-1, tool=0, **changes):
    """A row of `prompt` tokens, `sampled` ones with `tool` tokens in their middle; behaviour near the tiny model's."""
    body = rng.integers(0, VOCAB, sampled + tool)
    tokens = np.concatenate([prompt, body]).astype(np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    middle = len(prompt) + sampled // 2
    mask[middle : middle + tool] = False
    fields = {
        "tokens": tokens,
        "mask": mask,
        "logprobs": np.where(mask, -np.log(VOCAB) - 0.3 * rng.random(len(tokens)), 0).astype(np.float32),
        "versions": np.where(mask, 3, -1).astype(np.int32),
        "advantages": np.where(mask, rng.normal(), 0).astype(np.float32),
        "weights": np.where(mask, rng.uniform(0.2, 1), 0).astype(np.float32),
        "group": group,
        "attempt": next(_numbers),  # an attempt of its own
    }
    return Sample(**fields | changes)


def batch(seed=0):
    """Groups that share a prompt (one of them also sampled tokens), lone rows, a tool call, a temperature, old logprobs,
    rows without advantage, without weight, without anything; and supervised ones."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, n) for n in (9, 4, 1)]
    rows = [sample(rng, prompts[0], n, group=0) for n in (3, 7, 1, 5)]
    rows += [sample(rng, prompts[1], n, group=1, tool=2) for n in (4, 6)]
    rows += [sample(rng, prompts[2], 12, temperature=0.7), sample(rng, prompts[0], 2, group=5)]
    rows[0].old_logprobs = rows[0].logprobs + np.float32(0.1) * rows[0].mask
    rows.append(sample(rng, prompts[0], 4, group=0, advantages=np.zeros(13, np.float32)))
    rows.append(sample(rng, prompts[1], 3, group=1, weights=np.zeros(7, np.float32)))
    none = np.zeros(6, bool)
    rows.append(sample(rng, prompts[1], 2, mask=none, weights=none.astype(np.float32)))
    for n in (5, 8):
        weights = np.ones(n, np.float32)
        weights[:2] = 0
        rows.append(sample(rng, prompts[2], n - 1, mask=np.zeros(n, bool), weights=weights, loss="supervised", group=-1))
    twin = sample(rng, prompts[1], 5, group=1)
    rows += [twin, sample(rng, twin.tokens[:7], 3, group=1)]  # shares two sampled tokens with its sibling
    order = rng.permutation(len(rows))
    return [rows[i] for i in order]


def value_model(policy=None, seed=1, dtype=torch.float32):
    """A critic of its own, or a head on the policy's decoder."""
    model = ValueModel(policy or decoder(dtype, seed=seed), shared=policy is not None)
    with torch.no_grad():
        model.head.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(seed))
    return model


def parameters(model, critic=None):
    named = dict(model.named_parameters())
    return named | ({f"critic.{n}": p for n, p in critic.trained.named_parameters()} if critic else {})


def gradients(samples, model, budget=10_000, losses=LOSSES, critic=None, dropout=None, **compute):
    """The sums that one call accumulates, by parameter, and what the call returned."""
    for p in parameters(model, critic).values():
        p.grad = None
    result = training_pass.forward_backward(
        model, samples, losses, training_pass.Compute(CPU, budget, **compute), critic=critic, dropout=dropout
    )
    return {n: p.grad.clone() for n, p in parameters(model, critic).items() if p.grad is not None}, result


def assert_same(actual, expected, tolerance):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        scale = float(value.abs().max()) + 1e-30
        assert float((actual[name] - value).abs().max()) / scale < tolerance, name
