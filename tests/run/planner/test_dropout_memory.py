"""The memory that dropout takes while a pass is computed is what is said; nothing is kept for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_memory import FAMILIES, SHAPE, Alive

from tidemill.models import adapter_dropout
from tidemill.models.adapter_dropout import Dropout, Dropping
from tidemill.models.architecture import Architecture
from tidemill.models.attention import packed_attention, packed_positions
from tidemill.models.hf_weights import empty_decoder
from tidemill.models.lora import attach
from tidemill.run.planner import trainer_memory
from tidemill.trainer.trainer_kinds import TrainerSettings

ARCH = Architecture.from_dict(
    SHAPE | {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2} | FAMILIES["qwen3"]
)
TOKENS = 300


def most_alive(settings: TrainerSettings) -> int:
    """The most bytes alive in a pass forward and backward, made in it."""
    assert settings.lora is not None
    decoder = empty_decoder(replace(ARCH, windows=ARCH.windows[:2]))
    decoder.initialise(torch.Generator())
    attach(decoder, settings.lora.config)
    tokens, places = torch.zeros(TOKENS, dtype=torch.long), packed_positions([TOKENS])
    attend, rows = packed_attention([TOKENS], ARCH.windows), Dropout(0, 0).of(torch.arange(TOKENS), None)
    with Alive() as alive, Dropping(rows):
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.dtype == "bfloat16"):
            hidden = decoder(tokens, places, attend, checkpointing=settings.checkpointing)
        hidden.sum().backward()
    return alive.most


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.runs)])
@pytest.mark.parametrize("piece", [1 << 13, 1 << 30])
def test_what_dropout_takes_is_bounded(piece: int, dtype: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_dropout, "PIECE", piece)
    monkeypatch.setattr(trainer_memory, "PIECE_OF_MASKS", piece)
    plain, dropping = (
        TrainerSettings.model_validate(
            {"dtype": dtype, "checkpointing": checkpointing, "device": "cpu", "lora": {"rank": 8, "dropout": share}}
        )
        for share in (0.0, 0.3)
    )
    taken = most_alive(dropping) - most_alive(plain)
    said = trainer_memory.activations(ARCH, dropping, TOKENS) - trainer_memory.activations(ARCH, plain, TOKENS)
    assert taken <= said, (taken, said)
