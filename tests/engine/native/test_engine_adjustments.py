"""Penalties, a bias and `min_tokens`: the recorded logprobs are those of the distribution that was sampled from."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import BASE, VOCAB, decoder, engine, kept, prompts, reference, reference_logprobs
from gpu_in_pytorch import compute_again

from tidemill.core.types import Finish, GenerateRequest, SamplingParams
from tidemill.engine.native.sampler import Adjustment

ENDS = tuple(range(0, VOCAB, 3))
CASES: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -1.25, "temperature": 0.7},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": ((3, 4.0), (7, -100.0))},
    "min tokens": {"min_tokens": 6},
    "all": {
        "presence_penalty": -0.5,
        "frequency_penalty": 0.8,
        "repetition_penalty": 0.7,
        "logit_bias": ((5, 1.5),),
        "min_tokens": 5,
        "temperature": 1.2,
        "top_k": 20,
        "top_p": 0.95,
    },
    "neutral": {},
    "greedy": {"temperature": 0.0, "frequency_penalty": 2.0, "min_tokens": 8},
}


def adjusted(logits: np.ndarray, p: SamplingParams, prompt: np.ndarray, reply: np.ndarray) -> np.ndarray:
    """The formulas, token by token."""
    found = logits.copy()
    for token in range(len(logits)):
        if token in prompt or token in reply:
            found[token] = found[token] / p.repetition_penalty if found[token] > 0 else found[token] * p.repetition_penalty
        count = int((reply == token).sum())
        found[token] -= count * p.frequency_penalty + (count > 0) * p.presence_penalty
        found[token] += dict(p.logit_bias).get(token, 0.0)
        if len(reply) < p.min_tokens and token in ENDS:
            found[token] = -1e30
    return found


@pytest.mark.parametrize("kind", ["one by one", "ahead", "invariant"])
async def test_logprobs_are_of_what_was_sampled_from(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cases in one batch, two of them twins of a neutral row."""
    if kind == "ahead":
        compute_again(monkeypatch)
    under_test, model = engine(eos_ids=ENDS, max_sequences=12, batch_invariant=kind == "invariant"), decoder(BASE)
    text = prompts(1, 9, 10)[0]
    asked = [SamplingParams(max_tokens=24, seed=4, **case) for case in CASES.values()]
    requests = [GenerateRequest(text, p, extras=("model_logprobs",)) for p in asked]
    found = await asyncio.gather(*map(under_test.generate, requests))
    for (name, case), p, completion in zip(CASES.items(), asked, found, strict=True):
        n = len(completion.tokens)
        assert n >= max(p.min_tokens, 1) and (completion.finish is Finish.STOP) == (completion.tokens[-1] in ENDS), name
        unmodified = reference_logprobs(model, text, completion.tokens)
        np.testing.assert_allclose(completion.extras["model_logprobs"], unmodified, atol=2e-5, err_msg=name)
        rows = reference(model, np.concatenate([text, completion.tokens])[:-1])[len(text) - 1 :]
        for t in range(n):
            row = adjusted(rows[t], p, text, completion.tokens[:t])
            if p.temperature == 0:
                assert completion.tokens[t] == row.argmax() and completion.logprobs[t] == 0
            else:
                expected = kept(row, p)[completion.tokens[t]]
                assert completion.logprobs[t] == pytest.approx(expected, abs=3e-5), (name, t, case)
    assert len(np.unique(found[list(CASES).index("greedy")].tokens)) > 1
    await under_test.close()


async def test_rows_beside_them_sample_what_they_sample_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are launched ahead and steps that have to know first take turns."""
    compute_again(monkeypatch)
    texts, plain = prompts(4), [SamplingParams(max_tokens=30, seed=i) for i in range(4)]
    under_test = engine()
    alone = [await under_test.generate(GenerateRequest(t, p)) for t, p in zip(texts, plain, strict=True)]
    calls = [asyncio.ensure_future(under_test.generate(GenerateRequest(t, p))) for t, p in zip(texts, plain, strict=True)]
    for i in range(6):
        changed = SamplingParams(max_tokens=3, seed=i, repetition_penalty=1.5)
        await under_test.generate(GenerateRequest(texts[i % 4], changed))
    for before, beside in zip(alone, await asyncio.gather(*calls), strict=True):
        np.testing.assert_array_equal(before.tokens, beside.tokens)
    under_test._scheduler.check_integrity()
    await under_test.close()


async def test_an_end_comes_as_soon_as_it_may() -> None:
    under_test = engine(eos_ids=ENDS)
    text = prompts(1)[0]

    async def length(least: int, seed: int) -> int:
        params = SamplingParams(max_tokens=40, min_tokens=least, seed=seed)
        return len((await under_test.generate(GenerateRequest(text, params))).tokens)

    lengths = {least: [await length(least, seed) for seed in range(12)] for least in (0, 4, 12)}
    assert min(lengths[0]) < 4 < 12 < max(lengths[12]) < 40
    assert min(lengths[4]) >= 4 and min(lengths[12]) >= 12
    everything = await under_test.generate(GenerateRequest(text, SamplingParams(min_tokens=5, stop_ids=tuple(range(VOCAB)))))
    assert everything.finish is Finish.STOP, "where all tokens are ends one of them has to be sampled"
    assert (await under_test.generate(GenerateRequest(text, SamplingParams(max_tokens=3, ignore_eos=True)))).tokens.size == 3
    await under_test.close()


def test_the_repetition_penalty_is_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(50, generator=torch.Generator().manual_seed(2)) * 4
    prompt, reply = np.array([3, 3, 8, 40]), np.array([1, 8, 9, 9])
    for penalty in (0.3, 1.0, 1.7):
        ids = torch.from_numpy(np.concatenate([prompt, reply]))[None]
        expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits[None].clone())[0]  # pyright: ignore
        found = logits.clone()
        Adjustment(SamplingParams(repetition_penalty=penalty), (), prompt, reply).apply(found)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_tokens": -1},
        {"presence_penalty": 2.1},
        {"frequency_penalty": float("nan")},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e30},
        {"logit_bias": ((1, 101.0),)},
    ],
)
def test_values_that_no_logit_bears(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.*: expected a value "):
        SamplingParams(**wrong)
