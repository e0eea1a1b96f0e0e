"""A step's gradient and update, computed at once or in parts while sampling goes on.

    groups -> rows -> logprobs that the algorithm asks for -> prepare -> forward and backward -> (the last part) apply

A part uses what `prepare` makes of its groups alone. For an algorithm that is `by_group` this equals what the whole step
would give: a row's weight follows from the row and its siblings, and the scale, which follows from the step, is applied
once, at the end (I6). The whole step is prepared all the same. If a part was trained with other numbers, the run ends
before any weight has changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tidemill.core.interfaces import Algorithm, Trainer
from tidemill.core.types import Array, Group, LossSpec, Metrics, PreparedStep, Sample, TrainResult, Update


@dataclass(slots=True)
class Begun:
    """The first groups of a step, whose gradient the trainer has already accumulated."""

    groups: list[Group] = field(default_factory=list)
    rows: list[Sample] = field(default_factory=list)
    known: dict[str, list[Array]] = field(default_factory=dict)  # logprobs of the rows, by policy
    samples: list[Sample] = field(default_factory=list)
    losses: dict[str, LossSpec] | None = None  # of the samples
    logprobs: list[Array] = field(default_factory=list)  # from the passes
    sums: Counter[str] = field(default_factory=Counter)  # metrics of the passes
    drops: bool = False  # one of the passes dropped inputs

    async def ask(self, trainer: Trainer, algorithm: Algorithm, groups: Sequence[Group], step: int) -> None:
        """Add the rows of more groups, and the logprobs that the algorithm asks for."""
        rows = algorithm.rows(groups, step)
        for policy in algorithm.asks:
            self.known.setdefault(policy, []).extend(await trainer.forward(rows, policy))
        self.groups += groups
        self.rows += rows

    async def add(self, trainer: Trainer, algorithm: Algorithm, groups: Sequence[Group], step: int) -> None:
        """Accumulate the gradient of more groups of a `by_group` algorithm. Nothing is applied."""
        first = len(self.rows)
        await self.ask(trainer, algorithm, groups, step)
        known = {policy: found[first:] for policy, found in self.known.items()}
        prepared = algorithm.prepare(groups, step, self.rows[first:], known)
        self._expect(self.losses in (None, prepared.losses))
        self.samples += prepared.samples
        self.losses = prepared.losses
        await self.train(trainer, prepared.samples, prepared.losses)

    async def train(self, trainer: Trainer, samples: list[Sample], losses: dict[str, LossSpec]) -> None:
        """Accumulate the gradient of these samples."""
        result = await trainer.forward_backward(samples, losses)
        self.logprobs += result.logprobs
        self.sums.update(result.metrics)
        self.drops |= result.drops

    def served(self, samples: Sequence[Sample]) -> list[Array]:
        """The logprobs of these samples, which were trained, under the weights that were served.

        Passes that dropped inputs have others: then those are returned that were computed before, where there are any.
        """
        if not self.drops:
            return self.logprobs
        both = zip(samples, self.logprobs, strict=True)
        return [passed if sample.old_logprobs is None else sample.old_logprobs for sample, passed in both]

    def check(self, prepared: PreparedStep) -> None:
        """Verify that the part trained so far is the beginning of the whole step's samples."""
        if self.losses is not None:
            (update,) = prepared.updates
            self._expect(len(self.samples) <= len(update.samples) and prepared.losses == self.losses)
            self._expect(all(map(_same, self.samples, update.samples)))

    @staticmethod
    def _expect(same: bool) -> None:
        if not same:
            raise AssertionError("a part of this step was trained with other numbers than the whole came to: bound broken")


def computed_tokens(group: Group) -> int:
    """Upper bound on the tokens that a pass over a group's attempts computes.

    The attempts' first rows share what comes before their first sampled token; further rows are counted whole. A row
    without a reply has nothing to train, and no pass computes it.
    """
    prompt, tokens = 0, 0
    for place, t in ((place, t) for rows in group.attempts for place, t in enumerate(rows) if t.learnt.any()):
        shared = int(np.argmax(t.mask)) if place == 0 else 0
        prompt, tokens = max(prompt, shared), tokens + len(t.tokens) - shared
    return prompt + tokens


async def train_on(
    trainer: Trainer,
    algorithm: Algorithm,
    fresh: Sequence[Group],
    again: Sequence[Group],
    step: int,
    before_update: Callable[[Update, TrainResult], Awaitable[None]] | None = None,
    begun: Begun | None = None,
) -> tuple[PreparedStep, TrainResult, Metrics]:
    """Train one step: its samples, the outputs of their passes, and the last update's metrics.

    again: replayed groups of earlier steps, which differ from fresh ones only in their age.
    before_update: awaited once, when the first update's gradient is accumulated and no weight has changed.
    begun: the first of the `fresh` groups, if their gradient was accumulated early.
    """
    groups, begun = [*fresh, *again], begun or Begun()
    early = len(begun.groups)
    await begun.ask(trainer, algorithm, groups[early:], step)
    prepared = algorithm.prepare(groups, step, begun.rows, begun.known)
    begun.check(prepared)
    result, sums, metrics = TrainResult({}, []), Counter[str](), Metrics()
    for number, update in enumerate(prepared.updates):
        passes = begun if number == 0 else Begun()
        await passes.train(trainer, update.samples[len(passes.samples) :], prepared.losses)
        result = TrainResult({}, passes.served(update.samples))
        sums.update(passes.sums)
        if number == 0 and before_update is not None:
            await before_update(update, result)
        metrics |= await trainer.apply(update.scale)  # of several policies, only some may have a further update
    counts = {"streamed": float(early), "replayed": float(len(again))}
    metrics = metrics | {name: count for name, count in counts.items() if count}
    if len(prepared.updates) > 1:  # later passes used weights that the step did not begin with
        result = TrainResult({}, list(begun.known["policy"]))
    return prepared, TrainResult(dict(sums), result.logprobs), metrics


def _same(one: Sample, other: Sample) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("tokens", "advantages", "weights"))
