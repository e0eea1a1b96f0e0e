"""A trainer of several ranks behind the `Trainer` protocol: deals rows, asks all ranks, puts their answers together.

    samples -> deal -> each rank's rows -> forward_backward on all ranks at once -> sums of metrics, logprobs in order
    publish -> each rank writes or announces the blocks it holds -> one update of several parts

Every call goes to every rank, because ranks meet in collective operations. An error that only some of them meet would leave
the others waiting there, so it ends the group: all ranks are killed, and the call raises that error. The loss of a rank is
the loss of the trainer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tidemill.core.errors import PeerLost, PolicyMismatch
from tidemill.core.interfaces import Trainer
from tidemill.core.types import Array, LossSpec, Metrics, Sample, Telemetry, TrainResult, Version
from tidemill.core.weight_update import WeightUpdate

T = TypeVar("T")
AGREE_S = 5.0  # for the other ranks to meet the same error, or to be found dead
UNEVEN = 1.15  # prompt groups are parted if the fullest rank would have so many times the mean of tokens


def deal(samples: Sequence[Sample], ranks: int) -> list[list[int]]:
    """Indices of the samples of each rank, ascending, with about equal numbers of tokens.

    The rows of an attempt stay together, because a loss may sum over all of them. Those of a prompt group stay together
    while the ranks remain even, because they share the prompt's computation.
    """
    if ranks == 1:
        return [list(range(len(samples)))]
    units = _units(samples, lambda i, s: s.group if s.group >= 0 else -1 - i)
    dealt = _longest_first(samples, units, ranks)
    loads = [sum(len(samples[i].tokens) for i in each) for each in dealt]
    if max(loads) * ranks > UNEVEN * sum(loads):
        attempts = _units(samples, lambda i, s: (s.group, s.attempt) if s.group >= 0 else (-1, i))
        dealt = _longest_first(samples, attempts, ranks)
    return [sorted(each) for each in dealt]


def _units(samples: Sequence[Sample], key: Callable[[int, Sample], Any]) -> list[list[int]]:
    units = dict[Any, list[int]]()
    for i, sample in enumerate(samples):
        units.setdefault(key(i, sample), []).append(i)
    return list(units.values())


def _longest_first(samples: Sequence[Sample], units: list[list[int]], ranks: int) -> list[list[int]]:
    """Give each unit, the longest first, to the rank with the fewest tokens so far (Graham, 1969)."""
    tokens = [sum(len(samples[i].tokens) for i in unit) for unit in units]
    dealt, loads = [list[int]() for _ in range(ranks)], [0] * ranks
    for n in sorted(range(len(units)), key=lambda n: -tokens[n]):
        rank = loads.index(min(loads))
        dealt[rank] += units[n]
        loads[rank] += tokens[n]
    return dealt


class TrainerGroup:
    """`interfaces.Trainer` over the trainers of all ranks."""

    def __init__(self, ranks: Sequence[Trainer], end: Callable[[str], None]) -> None:
        """end: kills every rank, called with the reason."""
        self._ranks, self._end = list(ranks), end

    async def _all(self, ask: Callable[[int, Trainer], Awaitable[T]]) -> list[T]:
        """Ask all ranks at once. An error that not all of them meet ends the group; the first one is raised."""
        failed = list[BaseException]()  # in the order in which they came

        async def asked(number: int, rank: Trainer) -> T:
            try:
                return await ask(number, rank)
            except Exception as error:
                failed.append(error)
                raise

        answers = [asyncio.ensure_future(asked(number, rank)) for number, rank in enumerate(self._ranks)]
        try:
            await asyncio.wait(answers, return_when=asyncio.FIRST_EXCEPTION)  # bounded: calls have deadlines
            if failed:
                await asyncio.wait(answers, timeout=AGREE_S)
                cause = next((error for error in failed if isinstance(error, PeerLost)), failed[0])
                if len(failed) < len(answers) or isinstance(cause, PeerLost):
                    self._end(f"was ended because another rank failed: {cause}".partition("\n")[0])
                raise cause
            return [each.result() for each in answers]
        finally:
            for each in answers:
                each.cancel()
            await asyncio.gather(*answers, return_exceptions=True)

    async def forward(self, samples: list[Sample], policy: str = "policy") -> list[Array]:
        dealt = deal(samples, len(self._ranks))
        found = await self._all(lambda i, rank: rank.forward([samples[n] for n in dealt[i]], policy))
        return _in_order(dealt, found, len(samples))

    async def forward_backward(self, samples: list[Sample], losses: dict[str, LossSpec]) -> TrainResult:
        dealt = deal(samples, len(self._ranks))
        found = await self._all(lambda i, rank: rank.forward_backward([samples[n] for n in dealt[i]], losses))
        metrics = Metrics()
        for each in found:
            for name, value in each.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value
        logprobs = _in_order(dealt, [each.logprobs for each in found], len(samples))
        return TrainResult(metrics, logprobs, any(each.drops for each in found))

    async def apply(self, scale: float) -> Metrics:
        return (await self._all(lambda i, rank: rank.apply(scale)))[0]

    async def publish(self, version: Version, full: bool = False) -> WeightUpdate:
        updates = await self._all(lambda i, rank: rank.publish(version, full))
        first = updates[0]
        if other := next((each for each in updates if each.version.exact != first.version.exact), None):
            raise PolicyMismatch(f"ranks of the trainer announce {first.version.exact} and {other.version.exact}")
        if other := next((each for each in updates if each.base != first.base), None):
            raise PolicyMismatch(f"ranks of the trainer announce changes of {first.base} and of {other.base}")
        return replace(first, parts=tuple(part for each in updates for part in each.parts))

    async def send(self, update: WeightUpdate) -> str:
        return next(filter(None, await self._all(lambda i, rank: rank.send(update))), "")

    async def snapshot(self) -> None:
        await self._all(lambda i, rank: rank.snapshot())

    async def save(self, folder: str) -> None:
        await self._all(lambda i, rank: rank.save(folder))

    async def load(self, folder: str) -> None:
        await self._all(lambda i, rank: rank.load(folder))

    async def export(self, folder: str) -> None:
        await self._all(lambda i, rank: rank.export(folder))

    async def sleep(self) -> None:
        await self._all(lambda i, rank: rank.sleep())

    async def wake(self) -> None:
        await self._all(lambda i, rank: rank.wake())

    async def telemetry(self) -> Telemetry:
        """The first rank's, with the sums of all ranks' counters."""
        found = await self._all(lambda i, rank: rank.telemetry())
        names = dict.fromkeys(name for each in found for name in each.counters)
        counters = {name: sum(each.counters.get(name, 0.0) for each in found) for name in names}
        return replace(found[0], counters=counters)

    async def close(self) -> None:
        await asyncio.gather(*(rank.close() for rank in self._ranks), return_exceptions=True)


def _in_order(dealt: list[list[int]], found: list[list[Array]], count: int) -> list[Array]:
    """The arrays of all ranks in the order of the samples that they belong to."""
    by_index = dict[int, Array]()
    for indices, arrays in zip(dealt, found, strict=True):
        by_index |= zip(indices, arrays, strict=True)
    return [by_index[n] for n in range(count)]
