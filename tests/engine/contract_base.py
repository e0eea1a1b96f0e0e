"""Base of the engine contract: tiny models, what `transformers` says of them, versions sent by a real trainer, fixtures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tidemill.core.interfaces import Capabilities, Engine
from tidemill.core.types import SamplingParams, Version
from tidemill.core.weight_update import WeightUpdate
from tidemill.models.fingerprint import fingerprint
from tidemill.models.hf_weights import load_folder, serving_slices
from tidemill.models.weight_slices import Slice
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings
from tidemill.weight_sync.shared_memory_transport import SharedMemorySender
from tidemill.weight_sync.sync_settings import SyncSettings
from tidemill.weight_sync.transport import make_sender

VOCAB, CONTEXT, EOS = 61, 96, 2
TOLERANCE = 1e-4  # nats
PROMPT = np.array([5, 17, 3, 42, 8, 23], np.int32)
FREE = SamplingParams(max_tokens=20, ignore_eos=True, seed=7)
LONG = SamplingParams(max_tokens=CONTEXT, ignore_eos=True, seed=7)


def prompt(seed: int, length: int = 9) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0)


async def refused(call: Awaitable[object], *names: str) -> None:
    """`call` raises a ValueError of one sentence, which names these words."""
    with pytest.raises(ValueError) as error:
        await call
    message = str(error.value)
    assert message and "\n" not in message and ". " not in message, message
    assert all(name in message for name in names), message


def warm(able: Capabilities, temperature: float) -> float:
    """This temperature, or the only one at which the engine's logprobs are those that it sampled by."""
    return temperature if able.samples_at is None else able.samples_at


def steady(able: Capabilities, params: SamplingParams) -> SamplingParams:
    """These parameters, or greedy ones where a seed does not repeat its tokens."""
    return params if able.seeds else replace(params, temperature=0.0)


async def expect_updates(engine: Engine, able: Capabilities, published: WeightUpdate) -> None:
    """Skip the test for an engine that declares no full updates, once it has refused this one."""
    if "full" not in able.updates.kinds:
        await refused(engine.update(published), "full", "no kind")
        assert (await engine.stats()).version.step == 0
        pytest.skip("updates: not declared, and refused")


def log_softmax(row: np.ndarray) -> np.ndarray:
    shifted = row - row.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@dataclass(frozen=True, slots=True)
class Reference:
    """A model folder, and the same weights in `transformers`."""

    folder: Path
    model: LlamaForCausalLM

    @classmethod
    def make(cls, folder: Path, seed: int, head_dim: int = 8, tied: bool = False) -> Reference:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=head_dim,
            tie_word_embeddings=tied,
            max_position_embeddings=CONTEXT,
            initializer_range=0.3,  # far from uniform, so that errors show
            bos_token_id=1,
            eos_token_id=EOS,
            pad_token_id=None,
        )
        model = LlamaForCausalLM(config).eval()
        model.save_pretrained(folder)
        return cls(folder, model)

    def rows(self, prompt: np.ndarray, reply: np.ndarray) -> np.ndarray:
        """[n, V] float64 logits, of which row t is what token t of the reply was sampled from."""
        whole = torch.from_numpy(np.concatenate([prompt, reply]).astype(np.int64))
        with torch.no_grad():
            logits = self.model(whole[None]).logits[0].double().numpy()
        return logits[len(prompt) - 1 : -1]

    def logprobs(self, prompt: np.ndarray, reply: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        rows = log_softmax(self.rows(prompt, reply) / temperature)
        return rows[np.arange(len(reply)), reply]


@asynccontextmanager
async def new_version(model: Path, scratch: Path, step: int) -> AsyncIterator[WeightUpdate]:
    """The weights of a model folder, published as a run's trainer does, until the context is left."""
    settings = TrainerSettings(device="cpu")
    trainer = NativeTrainer(load_folder(model), settings, steps=1, sender=make_sender(SyncSettings(), scratch))
    try:
        yield await trainer.publish(Version(step))
    finally:
        await trainer.close()


@contextmanager
def mislabelled(model: Path, scratch: Path, version: Version) -> Iterator[WeightUpdate]:
    """The weights of a model folder, sent as `version`: only what an engine sums up itself can tell that they are not."""
    sender = make_sender(SyncSettings(), scratch)
    try:
        yield sender.send(version, serving_slices(load_folder(model), torch.float32))
    finally:
        sender.close()


@contextmanager
def in_parts(model: Path, scratch: Path, step: int, parts: int) -> Iterator[WeightUpdate]:
    """The weights of a model folder as an update of several parts: each tensor's rows are dealt out to `parts` senders."""
    held: list[list[Slice]] = [[] for _ in range(parts)]
    for piece in serving_slices(load_folder(model), torch.float32):
        for part, rows in zip(held, torch.arange(piece.shape[0]).tensor_split(parts), strict=True):
            at = (int(rows[0]), *piece.offset[1:])
            part.append(Slice(piece.name, piece.shape, at, piece.tensor[rows]))
    version = Version(step, fingerprint=fingerprint(piece for part in held for piece in part))
    senders = [SharedMemorySender(scratch, partial=True) for _ in held]
    try:
        sent = [sender.send(version, part) for sender, part in zip(senders, held, strict=True)]
        yield replace(sent[0], parts=tuple(part for update in sent for part in update.parts))
    finally:
        for sender in senders:
            sender.close()


class ContractBase:
    """Fixtures of the contract's tests, made of `make`."""

    head_dim = 8  # of the models; for engines that take only larger ones

    def make(self, folder: Path) -> Engine:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    def models(self, tmp_path_factory: pytest.TempPathFactory) -> list[Reference]:
        """The model that is served, and another one, which is published as version 1."""
        return [Reference.make(tmp_path_factory.mktemp(f"model-{seed}"), seed, self.head_dim) for seed in (0, 1)]

    @pytest.fixture
    async def engine(self, models: list[Reference]) -> AsyncIterator[Engine]:
        made = self.make(models[0].folder)
        yield made
        await made.close()

    @pytest.fixture
    async def able(self, engine: Engine) -> Capabilities:
        return await engine.capabilities()

    @pytest.fixture
    async def published(self, models: list[Reference], tmp_path: Path) -> AsyncIterator[WeightUpdate]:
        """Version 1, sent and ready to be staged."""
        async with new_version(models[1].folder, tmp_path, 1) as version:
            yield version
