"""The sampling check: sound engines pass; wrong logprobs, and right ones of tokens drawn otherwise, end a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from test_controller import World, controller
from virtual_time import run_virtually

from tidemill.controller.sampling_check import check_sampling, compare_sampling, pearson
from tidemill.core.errors import ConfigError, PolicyMismatch
from tidemill.core.types import Array, Completion, Finish, GenerateRequest, Sample, SamplingParams, Support, Version
from tidemill.observability.diagnosis.mismatch import GROSS

NOW = Version(0, fingerprint="f0")


def logits_after(tokens: Array, vocab: int) -> Array:
    """A model: the next token depends on the last two."""
    last = np.concatenate([[0, 0], tokens])[-2:]
    return np.random.default_rng([*last.tolist()]).normal(0, 2, vocab)


def log_softmax(row: Array) -> Array:
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


@dataclass
class Fake:
    """An engine and a trainer of that model. `drawn` and `said` change what is drawn, and what is reported of it."""

    vocab: int = 40
    drawn: Callable[[Array], Array] = lambda logprobs: logprobs
    said: Callable[[Array], Array] = lambda logprobs: logprobs
    top_k: int = 0
    served: Version = NOW
    asked: int = 0
    context: int = 64

    async def generate(self, request: GenerateRequest) -> Completion:
        self.asked += 1
        assert request.params.ignore_eos and not request.params.stop_ids
        rng, tokens, logprobs = np.random.default_rng(request.params.seed), request.tokens.tolist(), list[float]()
        supports = list[Array]()
        assert len(tokens) < self.context, "an engine refuses it"
        for _ in range(min(request.params.max_tokens, self.context - len(tokens))):
            row = log_softmax(logits_after(np.array(tokens), self.vocab) / request.params.temperature)
            if self.top_k:
                kept = np.argsort(-row)[: self.top_k]
                supports.append(kept.astype(np.int32))
                row = log_softmax(np.where(np.isin(np.arange(self.vocab), kept), row, -np.inf))
            weights = np.exp(log_softmax(self.drawn(row)))
            token = int(rng.choice(self.vocab, p=weights / weights.sum()))
            logprobs.append(float(self.said(row)[token]))
            tokens.append(token)
        reply = np.array(tokens[len(request.tokens) :], np.int32)
        offsets = np.arange(len(reply) + 1, dtype=np.int32) * self.top_k
        support = Support(np.concatenate(supports), offsets) if supports else None
        stamped = np.full(len(reply), self.served.step, np.int32)
        of = len(request.tokens)
        return Completion(reply, np.array(logprobs, np.float32), stamped, (self.served,), Finish.LENGTH, of, support=support)

    async def forward(self, samples: list[Sample]) -> list[Array]:
        found = list[Array]()
        for sample in samples:
            values, at = np.zeros(len(sample.tokens), np.float32), 0
            for place in np.flatnonzero(sample.mask):
                row = log_softmax(logits_after(sample.tokens[:place], self.vocab) / sample.temperature)
                if sample.support is not None:
                    begin, end = sample.support.offsets[at : at + 2]
                    row = log_softmax(np.where(np.isin(np.arange(self.vocab), sample.support.ids[begin:end]), row, -np.inf))
                    at += 1
                values[place] = row[sample.tokens[place]]
            found.append(values)
        return found

    async def check(self, params: SamplingParams = SamplingParams(), dtype: str = "float32") -> None:
        await check_sampling(
            self.generate,
            self.forward,
            params,
            self.vocab,
            NOW,
            dtype,
            ["engine.options.quantization"],
            context=self.context,
        )


@pytest.mark.parametrize("context", [2, 4, 5, 9, 24])
async def test_it_fits_any_context(context: int) -> None:
    await Fake(context=context).check()
    with pytest.raises(ConfigError, match="quantization"):
        await Fake(context=context, said=lambda logprobs: logprobs - 0.01).check()


def warmer(by: float) -> Callable[[Array], Array]:
    return lambda logprobs: logprobs / by


def greedier(logprobs: Array) -> Array:
    """What a speculation without a check does: a fifth of the time it takes the likeliest token."""
    likeliest = np.arange(len(logprobs)) == logprobs.argmax()
    return np.logaddexp(logprobs + np.log(0.8), np.where(likeliest, np.log(0.2), -np.inf))


def without_the_second(logprobs: Array) -> Array:
    return np.where(logprobs == np.sort(logprobs)[-2], -np.inf, logprobs)


SOUND = {
    "whole": (Fake(), SamplingParams()),
    "temperature": (Fake(), SamplingParams(temperature=0.6)),
    "truncated": (Fake(top_k=7), SamplingParams(top_k=7)),
    "many tokens": (Fake(vocab=300), SamplingParams(temperature=0.5)),
    "rounding": (Fake(said=lambda row: row + 1e-6), SamplingParams()),
    "greedy": (Fake(vocab=9), SamplingParams(temperature=0.01)),
}


@pytest.mark.parametrize("kind", SOUND)
async def test_a_sound_engine_passes(kind: str) -> None:
    fake, params = SOUND[kind]
    await fake.check(params)
    assert fake.asked >= 512


WRONG = {
    "logprobs": (Fake(said=lambda row: row * 1.01), SamplingParams(), "the logprobs of 512 .* at most 3e-04 is rounding"),
    "logprobs, truncated": (Fake(top_k=7, said=lambda row: row - 0.05), SamplingParams(top_k=7), "the logprobs"),
    "temperature": (Fake(drawn=warmer(1.3)), SamplingParams(), "not drawn by their probabilities.*once in a million"),
    "greedier": (Fake(drawn=greedier), SamplingParams(), "not drawn by their probabilities"),
    "many tokens": (Fake(vocab=300, drawn=greedier), SamplingParams(temperature=0.5), "not drawn"),
    "truncated": (Fake(top_k=7, drawn=greedier), SamplingParams(top_k=7), "not drawn"),
    "one token never": (Fake(drawn=without_the_second), SamplingParams(), "not drawn"),
}


@pytest.mark.parametrize("kind", WRONG)
async def test_a_wrong_one_is_refused_in_one_sentence_that_names_the_option(kind: str) -> None:
    fake, params, said = WRONG[kind]
    with pytest.raises(ConfigError, match=said) as error:
        await fake.check(params)
    message = str(error.value)
    assert message.startswith("engine.options.quantization: ") and ". " not in message and "leave it out" in message


async def test_bfloat16_has_its_own_bound() -> None:
    fake = Fake(said=lambda row: row + 4e-3)
    await fake.check(dtype="bfloat16")
    with pytest.raises(ConfigError):
        await fake.check()


async def test_another_version_is_no_evidence() -> None:
    with pytest.raises(PolicyMismatch, match="sampled from policy@v3"):
        await Fake(served=Version(3)).check()


def test_chance_alone_fails_about_as_rarely_as_it_says() -> None:
    """Of multinomial samples, 1 in 10,000 exceeds the quantile for that, within a small factor."""
    rng = np.random.default_rng(0)
    probabilities = np.exp(log_softmax(rng.normal(0, 2, 60)))
    statistic = [pearson(rng.multinomial(256, probabilities).astype(float), probabilities, 256, True) for _ in range(20_000)]
    values, freedom = np.array([each for each, _ in statistic]), statistic[0][1]
    assert len({each for _, each in statistic}) == 1 and freedom >= 6
    assert abs(values.mean() - freedom) < 0.2
    share = 2 / (9 * freedom)
    bound = freedom * (1 - share + 3.719 * share**0.5) ** 3
    assert (values > bound).mean() < 1e-3


async def test_a_distribution_that_is_too_even_gives_no_verdict() -> None:
    even = Fake(vocab=4000)
    report = await compare_sampling(
        even.generate, even.forward, SamplingParams(temperature=50.0), 4000, "policy", context=64
    )
    assert not report.fault(GROSS["float32"]) and report.freedom <= 2


def test_a_run_ends_before_its_first_step() -> None:
    world = World()
    run = controller(world, steps=3, batch=2, max_lag=1)
    seen = list[int]()

    async def served(versions: Sequence[Version]) -> None:
        seen.extend(version.step for version in versions)
        raise ConfigError("engine.options.quantization: with this, no")

    run.hooks = replace(run.hooks, served=served)
    with pytest.raises(ConfigError, match="quantization"):
        run_virtually(run.run())
    assert seen == [0] and not [line for line in world.log if line.startswith("gradient")]
