"""Sampling check: what an engine samples against what the trainer computes, before anything is trained.

    two prompts, many seeds  ->  tokens and logprobs  ->  the trainer's logprobs of the same tokens: their gap
                                                      ->  the tokens' frequencies against the trainer's probabilities

Some settings of an engine change how it samples: speculation, quantised weights or KV, other kernels. Wrong logprobs show in
the gap. Right logprobs of tokens that are drawn from something else show in the frequencies, by Pearson's chi-square test:
a sound engine fails it about once in a million times.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tidemill.core.errors import ConfigError, PolicyMismatch
from tidemill.core.seeding import derive_seed
from tidemill.core.types import Array, Completion, GenerateRequest, Sample, SamplingParams, Support, Version
from tidemill.observability.diagnosis.mismatch import GROSS, Limit, LogprobGap

SEEDS, AT_ONCE = 256, 2  # replies to each prompt; few at a time, so that an engine with drafts has some
DEPTH = 4  # tokens of a reply
WHOLE = 128  # tokens of a vocabulary up to which all are compared, not only those that were sampled
LEAST = 8.0  # expected replies in a cell of the test
SIGMAS = 4.75  # standard deviations that a normal variable exceeds once in a million times

Generate = Callable[[GenerateRequest], Awaitable[Completion]]
Forward = Callable[[list[Sample]], Awaitable[list[Array]]]


@dataclass(slots=True)
class SamplingReport:
    """The result of a check."""

    gap: LogprobGap = field(default_factory=LogprobGap)
    replies: int = 0
    chi_square: float = 0.0
    freedom: int = 0  # degrees of it; 0: the probabilities are too even to be seen in so few replies

    @property
    def most(self) -> float:
        """The chi-square that sampling alone exceeds once in a million times, after Wilson and Hilferty (1931)."""
        share = 2 / (9 * max(self.freedom, 1))
        return self.freedom * (1 - share + SIGMAS * share**0.5) ** 3

    def fault(self, limit: Limit) -> str:
        """A sentence on what is wrong; "" if nothing is."""
        if said := limit.exceeded(self.gap):
            return f"the logprobs of {self.gap.tokens} sampled tokens are not the trainer's: {said}"
        if self.gap.not_finite:
            return f"{self.gap.not_finite} logprobs of sampled tokens are not finite"
        if self.freedom and self.chi_square > self.most:
            return (
                f"the tokens of {self.replies} replies are not drawn by their probabilities: their chi-square is "
                f"{self.chi_square:.0f}, and chance brings more than {self.most:.0f} once in a million times"
            )
        return ""

    def detail(self) -> dict[str, float]:
        """The figures, for a record."""
        return {
            "logprob_gap": self.gap.metrics()["logprob_gap"],
            "tokens": float(self.gap.tokens),
            "chi_square": self.chi_square,
            "chi_square_most": self.most,
        }


async def compare_sampling(
    generate: Generate, forward: Forward, params: SamplingParams, vocab: int, policy: str, seed: int = 0, *, context: int
) -> SamplingReport:
    """Sample many short replies with `params`, and compare them with what `forward` says of their tokens.

    context: tokens that a sequence may hold; prompts are cut to it, and so are replies if it is as short as one.
    """
    asked = replace(params, max_tokens=DEPTH, stop_ids=(), ignore_eos=True)
    report, forward = SamplingReport(), _of_policy(forward, policy)
    for number, prompt in enumerate(_prompts(vocab, seed, max(1, context - DEPTH))):
        seeds = [derive_seed("sampling check", seed, number, i) for i in range(SEEDS)]
        requests = [GenerateRequest(prompt, replace(asked, seed=each), policy) for each in seeds]
        replies = list[Completion]()
        for begin in range(0, SEEDS, AT_ONCE):
            replies += await asyncio.gather(*map(generate, requests[begin : begin + AT_ONCE]))
        report.replies += len(replies)
        await _compare_logprobs(report, forward, prompt, replies, asked.temperature)
        if asked.temperature > 0:
            await _compare_frequencies(report, forward, prompt, replies, asked.temperature, vocab)
    return report


def _of_policy(forward: Forward, policy: str) -> Forward:
    """The trainer's forward pass with rows of this policy."""
    return lambda rows: forward([replace(row, policy=policy) for row in rows])


async def check_sampling(
    generate: Generate,
    forward: Forward,
    params: SamplingParams,
    vocab: int,
    served: Version,
    dtype: str,
    names: Sequence[str],
    *,
    context: int,
) -> SamplingReport:
    """Raise ConfigError if engines do not sample what the trainer computes.

    dtype: the coarsest one in use. names: the settings that may be the cause.
    """

    async def stamped(request: GenerateRequest) -> Completion:
        completion = await generate(request)
        if completion.sources != (served,):
            raise PolicyMismatch(f"engines serve {served}, and sampled from {', '.join(map(str, completion.sources))}")
        return completion

    report = await compare_sampling(stamped, forward, params, vocab, served.policy, context=context)
    if fault := report.fault(GROSS[dtype]):
        raise ConfigError(f"{', '.join(names)}: with this, {fault}; leave it out, or give another value")
    return report


def _prompts(vocab: int, seed: int, most: int) -> list[np.ndarray]:
    """A prompt that repeats itself, so that drafts are found, and one that does not; of `most` tokens at most."""
    rng = np.random.default_rng(seed)
    both = np.resize(rng.integers(0, vocab, 5), 23), rng.integers(0, vocab, 16)
    return [prompt[:most].astype(np.int32) for prompt in both]


async def _compare_logprobs(
    report: SamplingReport, forward: Forward, prompt: Array, replies: list[Completion], temperature: float
) -> None:
    """Add the gap of a quarter of the replies, the later ones: drafts need earlier replies."""
    chosen = replies[-SEEDS // 4 :]
    if temperature == 0:
        return  # a greedy choice is certain, and has a logprob of 0
    rows = [_sample(np.concatenate([prompt, each.tokens]), len(prompt), temperature, each.support) for each in chosen]
    for reply, values in zip(chosen, await forward(rows), strict=True):
        report.gap.add(reply.logprobs, values[len(prompt) :])


async def _compare_frequencies(
    report: SamplingReport, forward: Forward, prompt: Array, replies: list[Completion], temperature: float, vocab: int
) -> None:
    """Add the chi-square of each next token, along the tokens that were sampled most often."""
    context = np.asarray(prompt)
    for depth in range(len(replies[0].tokens)):
        seen = Counter(int(reply.tokens[depth]) for reply in replies)
        support = None if replies[0].support is None else replies[0].support.at(depth, vocab)
        candidates = support if support is not None else np.arange(vocab) if vocab <= WHOLE else np.array(sorted(seen))
        one = None if support is None else Support(support, np.array([0, len(support)], np.int32))
        rows = [_sample(np.append(context, each).astype(np.int32), len(context), temperature, one) for each in candidates]
        said = np.array([values[-1] for values in await forward(rows)], np.float64)
        observed = np.array([seen[int(each)] for each in candidates], np.float64)
        all_known = support is not None or vocab <= WHOLE
        chi_square, freedom = pearson(observed, np.exp(said), len(replies), all_known)
        report.chi_square, report.freedom = report.chi_square + chi_square, report.freedom + freedom
        likeliest = seen.most_common(1)[0][0]
        replies = [reply for reply in replies if reply.tokens[depth] == likeliest]
        if len(replies) < 2 * LEAST:
            return
        context = np.append(context, likeliest)


def pearson(observed: Array, probabilities: Array, count: int, all_known: bool) -> tuple[float, int]:
    """Pearson's chi-square of `count` replies, and its degrees of freedom.

    observed, probabilities: [C], of some tokens. Cells with few expected replies are joined. all_known: no other token can
    be sampled; otherwise the others are a cell of their own.
    """
    order = np.argsort(-probabilities, kind="stable")
    expected, observed = probabilities[order] * count, observed[order]
    large = expected >= LEAST
    cells = list(zip(expected[large], observed[large], strict=True))
    wanted = found = 0.0
    for each, seen in zip(expected[~large], observed[~large], strict=True) if all_known else ():
        wanted, found = wanted + each, found + seen
        if wanted >= LEAST:
            cells.append((wanted, found))
            wanted = found = 0.0
    rest = count - sum(e for e, _ in cells), count - sum(o for _, o in cells)
    if rest[0] >= LEAST or not cells:
        cells.append(rest)
    else:
        last = cells.pop()
        cells.append((last[0] + rest[0], last[1] + rest[1]))
    return float(sum((o - e) ** 2 / e for e, o in cells if e > 0)), len(cells) - 1


def _sample(tokens: Array, start: int, temperature: float, support: Support | None) -> Sample:
    """A row whose logprobs from `start` on are asked for."""
    zero, mask = np.zeros(len(tokens), np.float32), np.arange(len(tokens)) >= start
    unknown = np.full(len(tokens), -1, np.int32)
    return Sample(tokens, mask, zero, unknown, zero, mask.astype(np.float32), temperature=temperature, support=support)
