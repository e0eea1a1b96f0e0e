"""Several ranks as one trainer: who gets which rows, how answers come together, and what one rank's error does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tidemill.controller import trainer_group
from tidemill.controller.trainer_group import TrainerGroup, deal
from tidemill.core.errors import PeerDied, PeerLost, PolicyMismatch, TrainingDiverged
from tidemill.core.types import Sample, Telemetry, TrainResult, Version
from tidemill.core.weight_update import WeightPart, WeightUpdate


def row(tokens: int, group: int = -1, attempt: int = 0, number: int = 0) -> Sample:
    none = np.zeros(tokens, np.float32)
    body = np.full(tokens, number, np.int32)
    return Sample(body, none > 0, none, body, none, none, group=group, attempt=attempt)


def rows(seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    found = []
    for group in range(int(rng.integers(0, 9))):
        for attempt in range(int(rng.integers(1, 6))):
            parts = int(rng.integers(1, 4))
            found += [row(int(rng.integers(1, 400)), group if rng.random() < 0.9 else -1, attempt) for _ in range(parts)]
    return [found[i] for i in rng.permutation(len(found))]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_dealt_once_and_no_attempt_is_parted(seed: int, ranks: int) -> None:
    samples = rows(seed)
    dealt = deal(samples, ranks)
    assert sorted(i for each in dealt for i in each) == list(range(len(samples))) and len(dealt) == ranks
    assert all(each == sorted(each) for each in dealt)
    owners = dict[Any, set[int]]()
    for rank, each in enumerate(dealt):
        for i in each:
            if samples[i].group >= 0:
                owners.setdefault((samples[i].group, samples[i].attempt), set()).add(rank)
    assert all(len(ranks_of) == 1 for ranks_of in owners.values())
    loads = [sum(len(samples[i].tokens) for i in each) for each in dealt]
    units = dict[Any, int]()
    for i, sample in enumerate(samples):
        key = (sample.group, sample.attempt) if sample.group >= 0 else (-1, i)
        units[key] = units.get(key, 0) + len(sample.tokens)
    if samples:  # Graham's bound for the longest first, or what was accepted without parting groups
        assert max(loads) <= max(trainer_group.UNEVEN * sum(loads) / ranks, sum(loads) / ranks + max(units.values())) + 1


def test_a_group_is_parted_only_if_ranks_would_be_uneven() -> None:
    even = [row(10, group, attempt) for group in range(4) for attempt in range(3)]
    assert all(len({even[i].group for i in each}) == 2 for each in deal(even, 2))
    lone = [row(10, 0, attempt) for attempt in range(8)]
    assert [len(each) for each in deal(lone, 2)] == [4, 4]


@dataclass
class Rank:
    """A rank that answers from its rows, raises, or does not answer."""

    number: int
    fails: BaseException | None = None
    hangs: bool = False
    asked: list[Any] = field(default_factory=list)
    announced: str = "same"
    base: Version | None = None
    dropping: tuple[int, ...] = ()

    async def _answer(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        if self.fails:
            raise self.fails

    async def forward(self, samples: list[Sample], policy: str = "policy") -> list[Any]:
        await self._answer()
        self.asked.append(len(samples))
        return [sample.tokens.astype(np.float32) for sample in samples]

    async def forward_backward(self, samples: list[Sample], losses: Any) -> TrainResult:
        metrics = {"tokens": float(len(samples)), f"own/{self.number}": 1.0}
        return TrainResult(metrics, await self.forward(samples), drops=self.number in self.dropping)

    async def publish(self, version: Version, full: bool = False) -> WeightUpdate:
        await self._answer()
        named, part = Version(version.step, fingerprint=self.announced), WeightPart("memory", str(self.number), 5)
        return WeightUpdate(named, (part,), "delta" if self.base else "full", self.base, note="n")

    async def telemetry(self) -> Telemetry:
        return Telemetry("trainer", 1, [], {"trained_tokens": 3.0, f"only/{self.number}": 1.0})


def group(*ranks: Rank) -> tuple[TrainerGroup, list[str]]:
    ended: list[str] = []
    return TrainerGroup(ranks, ended.append), ended  # type: ignore[arg-type]


async def test_answers_come_in_the_order_of_the_rows_and_metrics_are_added() -> None:
    together, ended = group(Rank(0), Rank(1), Rank(2))
    samples = [row(5 + i, number=i) for i in range(7)]
    for found in (
        await together.forward(samples),
        (result := await together.forward_backward(samples, {})).logprobs,
    ):
        assert [int(array[0]) for array in found] == list(range(7))
    assert result.metrics == {"tokens": 7.0, "own/0": 1.0, "own/1": 1.0, "own/2": 1.0} and not ended
    assert (await together.telemetry()).counters == {"trained_tokens": 9.0, "only/0": 1, "only/1": 1, "only/2": 1}


@pytest.mark.parametrize("dropping", [(), (0,), (1,), (0, 1)])
async def test_a_rank_that_dropped_inputs_is_told_of(dropping: tuple[int, ...]) -> None:
    together, _ = group(Rank(0, dropping=dropping), Rank(1, dropping=dropping))
    assert (await together.forward_backward([row(4), row(5)], {})).drops is bool(dropping)


async def test_every_rank_is_asked_even_without_rows() -> None:
    ranks = [Rank(0), Rank(1)]
    await group(*ranks)[0].forward([row(3)])
    assert [each.asked for each in ranks] == [[1], [0]]


async def test_parts_of_all_ranks_are_one_update() -> None:
    update = await group(Rank(0), Rank(1))[0].publish(Version(3))
    assert [part.location for part in update.parts] == ["0", "1"] and update.bytes == 10 and update.note == "n"
    with pytest.raises(PolicyMismatch, match="ranks of the trainer announce"):
        await group(Rank(0), Rank(1, announced="other"))[0].publish(Version(3))
    assert (await group(Rank(0, base=Version(2)), Rank(1, base=Version(2)))[0].publish(Version(3))).base == Version(2)
    for base, other in ((Version(2), Version(1)), (Version(2), None)):
        with pytest.raises(PolicyMismatch, match="ranks of the trainer announce changes"):
            await group(Rank(0, base=base), Rank(1, base=other))[0].publish(Version(3))


async def test_an_error_that_all_ranks_meet_is_raised_and_they_go_on() -> None:
    together, ended = group(*(Rank(i, TrainingDiverged(f"nan on {i}")) for i in range(3)))
    with pytest.raises(TrainingDiverged, match="nan on 0"):
        await together.forward([row(2)])
    assert not ended


@pytest.mark.parametrize("other", [Rank(1), Rank(1, hangs=True)], ids=["answers", "waits for the first"])
async def test_an_error_of_one_rank_ends_all(monkeypatch: pytest.MonkeyPatch, other: Rank) -> None:
    monkeypatch.setattr(trainer_group, "AGREE_S", 0.05)
    together, ended = group(Rank(0, OSError("disk full")), other)
    with pytest.raises(OSError, match="disk full"):
        await together.forward([row(2)])
    (why,) = ended
    assert "another rank failed: disk full" in why


async def test_a_lost_rank_is_the_cause_even_if_others_fail_before_it_is_known() -> None:
    """The others' collective operation breaks when a rank dies, which they tell first."""

    class Late(Rank):
        async def _answer(self) -> None:
            await asyncio.sleep(0.01)
            raise PeerDied("trainer-1", "died: killed by SIGKILL")

    together, ended = group(Rank(0, RuntimeError("connection closed by peer")), Late(1))
    with pytest.raises(PeerLost, match="trainer-1 died"):
        await together.forward([row(2)])
    assert len(ended) == 1
