"""Random token extras reach the loss with the token that they belong to: several turns, the ledger, packed micro-batches."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_cases import VOCAB, decoder, sample

from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.losses import LOSSES, Loss, LossInput
from tidemill.algorithms.prepare_step import ConfiguredAlgorithm
from tidemill.controller.engine_pool import EnginePool, Member
from tidemill.controller.rollout import EpisodeSetup, Rollout
from tidemill.core.attempt_checks import check_row
from tidemill.core.interfaces import Capabilities
from tidemill.core.serialization import DTYPES, decode, encode
from tidemill.core.token_extras import TokenExtra, TokenExtras
from tidemill.core.types import (
    Completion,
    Finish,
    GenerateRequest,
    Group,
    LossSpec,
    Sample,
    SamplingParams,
    Score,
    Task,
    Version,
)
from tidemill.ledger.ledger import SqliteLedger
from tidemill.models.tokenizer import character_tokenizer
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings

LETTERS = "abcdefghijklmnop\n"
TOKENIZER = character_tokenizer(LETTERS)
assert len(TOKENIZER) <= VOCAB

shapes = st.lists(st.integers(1, 3), max_size=2).map(tuple)
kinds = st.tuples(st.sampled_from(DTYPES), shapes, st.integers(0, 1))
declared = st.lists(kinds, min_size=1, max_size=3).map(lambda ks: [TokenExtra(f"x{i}", *k) for i, k in enumerate(ks)])


class Engine:
    """Replies with one of two letters a token, so that rows share sampled prefixes; a logprob names its token."""

    def __init__(self, extras: list[TokenExtra], seed: int) -> None:
        self._extras, self._rng = extras, np.random.default_rng(seed)
        self.returned: dict[float, dict[str, np.ndarray]] = {}  # logprob -> what was returned with the token

    async def generate(self, request: GenerateRequest) -> Completion:
        assert request.extras == tuple(extra.name for extra in self._extras)
        n = int(self._rng.integers(1, 5))
        logprobs = -(np.arange(n, dtype=np.float32) + len(self.returned) + 1) / 512
        extras = {e.name: self._rng.integers(0, 2, (n, *e.shape)).astype(e.dtype) for e in self._extras}
        for t, logprob in enumerate(logprobs.tolist()):
            self.returned[logprob] = {name: entries[t] for name, entries in extras.items()}
        tokens = np.array(TOKENIZER.encode("ab"), np.int32)[self._rng.integers(0, 2, n)]
        extras["unasked"] = np.zeros(n, np.int8)
        versions = np.zeros(n, np.int32)
        done = Completion(tokens, logprobs, versions, (Version(0),), Finish.LENGTH, extras=extras)
        return decode(encode(done), Completion)  # as from another process

    async def abort(self, key: str) -> None:
        raise AssertionError(f"{key} was aborted")


class Talk:
    """An environment of several turns, with messages of all lengths."""

    name = "talk"

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    async def run(self, task: Task, chat: Any) -> Score:
        await chat.reply(task.prompt)
        for _ in range(self._rng.integers(0, 3)):
            await chat.reply("".join(self._rng.choice([*"cdef"], self._rng.integers(1, 6))))
        return Score(float(self._rng.random()))


def played(engine: Engine, extras: list[TokenExtra], seed: int, folder: Path) -> list[Group]:
    """Two groups, as the ledger gives them back."""
    params = SamplingParams(max_tokens=8)
    episodes = EpisodeSetup(Talk(seed), TOKENIZER, params, context=100, limit_s=60, extras=tuple(extras))
    roller = Rollout(EnginePool([Member("engine-0", engine, Capabilities(100, extras=tuple(extras)))]), episodes, 3, 0)
    with SqliteLedger(folder, durability="process") as ledger:
        for number, prompt in enumerate(("gh", "ghij")):
            task = Task(str(number), prompt)
            ledger.admit(number, task)
            ledger.finish(asyncio.run(roller.rollout(number, task)))
        return [ledger.load(number) for number in range(2)]


def seen_by(losses: list[str], samples: list[Sample], budget: int) -> list[tuple[str, float, TokenExtras]]:
    """(loss, logprob, extras) of each token that a loss of the trainer's saw."""
    seen = []

    def watching(name: str) -> Any:
        def loss(x: LossInput) -> Loss:
            for t, logprob in enumerate(x.behaviour.float().tolist()):
                seen.append((name, logprob, {key: x.extra(key)[t].numpy() for key in x.extras}))
            return Loss(x.logprobs)

        return loss

    with pytest.MonkeyPatch.context() as patch:
        for name in losses:
            patch.setitem(LOSSES, name, watching(name))
        trainer = NativeTrainer(decoder(), TrainerSettings(device="cpu", micro_batch_tokens=budget), steps=1)
        asyncio.run(trainer.forward_backward(samples, {name: LossSpec(name) for name in losses}))
    return seen


@settings(max_examples=15)
@given(extras=declared, seed=st.integers(0, 2**20), budget=st.integers(8, 120))
@pytest.mark.runs
def test_every_token_keeps_its_own_from_the_engine_to_the_loss(extras: list[TokenExtra], seed: int, budget: int) -> None:
    engine, rng = Engine(extras, seed), np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        groups = played(engine, extras, seed, Path(folder))
    trajectories = [t for group in groups for t in group.trajectories]
    for t in trajectories:
        check_row(t)
        assert t.extras.keys() == {extra.name for extra in extras}, "and not what nobody asked for"
        for extra in extras:
            entries = t.extras[extra.name]
            assert entries.dtype == extra.dtype and entries.shape == (len(t.tokens), *extra.shape)
            assert (entries[~t.mask] == extra.fill).all()

    algorithm = ConfiguredAlgorithm(AlgorithmSettings.preset("grpo"), max_tokens=8)
    rows = decode(encode(algorithm.rows(groups, 0)), list[Sample])
    samples = algorithm.prepare(groups, 0, rows, {}).samples
    for row in samples:  # of two losses, and not every token has a weight
        row.loss = ("one", "two")[rng.integers(2)]
        row.weights = row.weights * (rng.random(len(row.tokens)) < 0.7)
    trained = {(row.loss, float(p)) for row in samples for p in row.logprobs[row.weights != 0]}
    seen = seen_by(["one", "two"], samples, budget)
    assert len(seen) == len(trained) and {(loss, logprob) for loss, logprob, _ in seen} == trained
    for _, logprob, found in seen:
        expected = engine.returned[logprob]
        assert found.keys() == expected.keys()
        for name, entry in found.items():
            assert entry.dtype == expected[name].dtype
            np.testing.assert_array_equal(entry, expected[name])


def test_extras_that_are_not_aligned_or_not_in_all_samples_are_refused() -> None:
    row = sample(np.random.default_rng(0), np.arange(4), 3, group=7)
    short = replace(row, extras={"entropy": np.zeros(6, np.float32)})
    with pytest.raises(ValueError, match=r"'entropy' of a sample of group 7 has shape \(6,\): expected 7 entries"):
        seen_by(["policy"], [short], 64)
    whole = replace(row, extras={"entropy": np.zeros(7, np.float32)}, group=8)
    with pytest.raises(ValueError, match=r"groups 8 and 7 have the token extras \['entropy'\] and \[\]: .*another run_dir"):
        seen_by(["policy"], [whole, row], 64)


def test_a_loss_that_reads_what_it_does_not_declare_is_told_how() -> None:
    x = LossInput(*torch.zeros(4, 2), torch.zeros(2, dtype=torch.int64), 1)
    with pytest.raises(
        ValueError, match=r"no token extra 'entropy' .*put @reads\(TokenExtra\('entropy', DTYPE\)\) on the loss"
    ):
        x.extra("entropy")
