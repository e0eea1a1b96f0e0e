"""An engine that does not know the unmodified model's logprobs: its episodes are recorded and trained on all the same."""

from __future__ import annotations

import numpy as np
import torch

from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.prepare_step import ConfiguredAlgorithm
from tidemill.controller.engine_pool import EnginePool, Member
from tidemill.controller.rollout import EpisodeSetup, Rollout
from tidemill.core.interfaces import Capabilities
from tidemill.core.serialization import decode, encode
from tidemill.core.types import Completion, Finish, GenerateRequest, Group, SamplingParams, Score, Task, Version
from tidemill.models.architecture import Architecture
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import hf_views
from tidemill.models.tokenizer import character_tokenizer
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings

TOKENIZER = character_tokenizer("ab\n")
LOGPROB = -0.7


class Scripted:
    """Replies `a` to the first attempt and `b` to the second, as an engine in another process would."""

    async def generate(self, request: GenerateRequest) -> Completion:
        token = TOKENIZER.encode("ab"[int(request.key.split("/")[1])])[-1]
        one = np.ones(1, np.int32)
        said = Completion(token * one, LOGPROB * np.ones(1, np.float32), 0 * one, (Version(0),), Finish.LENGTH)
        return decode(encode(said), Completion)

    async def abort(self, key: str) -> None:
        raise AssertionError(f"{key} was aborted")


class Letters:
    name = "letters"

    async def run(self, task, chat) -> Score:
        return Score(float(await chat.reply(task.prompt) == "a"))


def model() -> Decoder:
    sizes = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 24}
    made = Decoder(Architecture(family="llama", vocab=len(TOKENIZER), context=16, windows=(None,), **sizes))
    made.initialise(torch.Generator().manual_seed(0))
    return made


async def test_an_episode_and_a_step_without_model_logprobs():
    episodes = EpisodeSetup(Letters(), TOKENIZER, SamplingParams(max_tokens=1), context=16, limit_s=60)
    group = await Rollout(EnginePool([Member("engine-0", Scripted(), Capabilities(16))]), episodes, 2, 0).rollout(
        0, Task("t", "ab")
    )
    group = decode(encode(group), Group)  # as the ledger keeps it
    assert [t.reward for t in group.trajectories] == [1.0, 0.0]
    assert not any("model" in figure for t in group.trajectories for figure in t.info), "a figure was made up"

    algorithm = ConfiguredAlgorithm(AlgorithmSettings.preset("grpo"), max_tokens=1)
    rows = algorithm.rows([group], 0)
    assert [row.logprobs[row.mask].tolist() for row in rows] == [[np.float32(LOGPROB)]] * 2
    prepared = algorithm.prepare([group], 0, rows, {})
    trainer = NativeTrainer(model(), TrainerSettings(device="cpu", lr=0.01), steps=1)
    before = {name: view.clone() for name, view in hf_views(trainer.decoder)}
    await trainer.forward_backward(prepared.samples, prepared.losses)
    metrics = await trainer.apply(prepared.updates[0].scale)
    await trainer.close()
    assert metrics["grad_norm"] > 0 and not any("model_logprob" in name for name in {**metrics, **prepared.metrics})
    assert any(not torch.equal(before[name], view) for name, view in hf_views(trainer.decoder))
