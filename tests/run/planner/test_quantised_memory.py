"""The memory of a trainer whose base is in few bits: what is said is what its tensors take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_memory import FAMILIES, SHAPE, kept_by, of, recipe, size

from tidemill.models.architecture import Architecture, matrices
from tidemill.models.hf_weights import empty_decoder
from tidemill.models.lora import attach
from tidemill.models.quantised_base import bases, quantise_base
from tidemill.run.planner import trainer_memory
from tidemill.trainer.trainer_kinds import TrainerSettings

WIDE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
ARCH = Architecture.from_dict(SHAPE | WIDE | FAMILIES["qwen3"])


def decoder_of(settings: TrainerSettings, layers: int = 4):
    assert settings.lora is not None
    decoder = empty_decoder(replace(ARCH, layers=layers, windows=ARCH.windows[:layers]))
    decoder.initialise(torch.Generator())
    quantise_base(decoder, settings.lora.base_dtype)
    attach(decoder, settings.lora.config)
    return decoder


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_weights_are_counted(base: str):
    config = recipe("trainer.lora.rank=4", f"trainer.lora.base_dtype={base}", "trainer.device=cpu")
    assert isinstance(config.trainer, TrainerSettings)
    said, decoder = of(trainer_memory.trainer_memory(config, ARCH, None)), decoder_of(config.trainer)
    assert said["weights"] == size(decoder.parameters())
    held = size(buffer for each in bases(decoder) for buffer in each.buffers())
    assert said["quantised weights"] == pytest.approx(held, rel=0.005)
    assert said["gradients"] == size(p for p in decoder.parameters() if p.requires_grad)


def test_each_rank_holds_the_whole_base_and_its_share_of_the_rest():
    given = ["trainer.lora.rank=4", "trainer.lora.base_dtype=nf4", "trainer.device=cpu"]
    one, two = (
        of(trainer_memory.trainer_memory(recipe(*given, *more), ARCH, None))
        for more in ([], ["trainer.ranks=2", "trainer.shard=zero2"])
    )
    assert two["quantised weights"] == one["quantised weights"] and two["weights"] == one["weights"] // 2
    matrix = sum(n * k for n, k in matrices(ARCH)[:-1])
    assert two["all weights while gathered"] == 4 * (trainer_memory.parameters(ARCH) - matrix)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.runs)])
def test_activations_and_one_matrix_are_bounded(dtype: str, checkpointing: bool):
    lora = {"rank": 8, "base_dtype": "nf4"}
    given = {"dtype": dtype, "checkpointing": checkpointing, "device": "cpu", "lora": lora}
    settings, lengths = TrainerSettings.model_validate(given), [100, 60, 33, 20, 90, 90]
    alive = sum(kept_by(decoder_of(settings), settings, lengths))
    if checkpointing:
        plain = settings.model_copy(update={"checkpointing": False})
        alive += sum(kept_by(decoder_of(plain, 2), plain, lengths)) - sum(kept_by(decoder_of(plain, 1), plain, lengths))
    one = trainer_memory.DEQUANTISED * max(n * k for n, k in matrices(ARCH)[:-1])
    said = trainer_memory.activations(ARCH, settings, sum(lengths))
    assert alive + one <= said <= 1.6 * alive + one, (alive, one, said)
