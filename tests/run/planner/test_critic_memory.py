"""The memory of a critic beside an adapter: what is said is what its tensors take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_memory import FAMILIES, SHAPE, of, recipe, size

from tidemill.models.architecture import Architecture, parameters
from tidemill.models.hf_weights import empty_decoder
from tidemill.models.lora import attach
from tidemill.models.quantised_base import bases, quantise_base
from tidemill.models.value_model import ValueModel
from tidemill.run.planner import trainer_memory
from tidemill.trainer.companions import Critic
from tidemill.trainer.optimizer import Optimizer
from tidemill.trainer.trainer_checkpoint import Snapshot
from tidemill.trainer.trainer_kinds import TrainerSettings

WIDE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
PPO = ["algorithm=ppo", "algorithm.critic.model=initial", "trainer.lora.rank=4", "trainer.device=cpu"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("base", ["float32", "nf4"])
def test_an_adapted_critic_holds_what_was_said(base: str, tied: bool):
    arch = Architecture.from_dict(SHAPE | WIDE | FAMILIES["qwen3"] | {"tie_word_embeddings": tied})
    config = recipe(*PPO, f"trainer.lora.base_dtype={base}")
    assert isinstance(config.trainer, TrainerSettings) and config.trainer.lora is not None
    said, policy, own = (
        of(trainer_memory.trainer_memory(config, arch, None, arch)),
        empty_decoder(arch),
        replace(arch, tied=True),
    )
    decoder = empty_decoder(own)
    for each in (policy, decoder):
        each.initialise(torch.Generator())
        if base != "float32":
            quantise_base(each, base)
        attach(each, config.trainer.lora.config)
    critic, head = Critic(ValueModel(decoder), config.trainer, 1), 4 * arch.hidden
    trained = size(p for p in decoder.parameters() if p.requires_grad)
    critic.apply(1.0)
    assert said["critic"] == size(decoder.parameters())
    held = size(buffer for each in bases(decoder) for buffer in each.buffers())
    assert said.get("quantised weights of the critic", 0) == pytest.approx(held, rel=0.005)
    assert said["gradients of the critic"] == trained
    moments = size(block.tensor for block in critic.state()) - trained - head  # beside the weights
    assert said["two moments of the critic"] == moments - 2 * head == 2 * trained
    optimizer = Optimizer(policy, config.trainer, updates=1)
    optimizer.apply(1.0)
    taken = Snapshot.take(policy, optimizer, [critic])
    copied = size(block.tensor for block in [*taken.weights, *taken.optimizer])
    assert said["copy while a checkpoint is written"] == copied - 3 * head


def test_ranks_gather_the_weights_of_both_without_gradients():
    arch = Architecture.from_dict(SHAPE | WIDE | FAMILIES["qwen3"] | {"tie_word_embeddings": True})
    two = [*PPO, "trainer.ranks=2", "trainer.shard=zero2"]
    wide, narrow = (
        of(trainer_memory.trainer_memory(recipe(*two, f"trainer.lora.base_dtype={base}"), arch, None, arch))
        for base in ("float32", "nf4")
    )
    assert wide["all weights while gathered"] == 2 * 4 * parameters(arch)
    one = of(trainer_memory.trainer_memory(recipe(*PPO, "trainer.lora.base_dtype=nf4"), arch, None, arch))
    assert narrow["all weights while gathered"] < 0.1 * wide["all weights while gathered"]
    for what in ("quantised weights", "quantised weights of the critic"):
        assert narrow[what] == one[what], "every rank holds the whole base"
    assert narrow["critic"] == one["critic"] // 2
