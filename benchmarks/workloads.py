"""Models and prompts that the benchmarks share: Qwen3-shaped, random weights, written as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tidemill.models.attention import packed_attention, packed_positions
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import save_folder
from tidemill.models.new_model import ModelSize, architecture, head_dim

SIZES: dict[str, ModelSize] = {
    "S": {"layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4, "intermediate": 768},
    "M": {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 4, "intermediate": 1536},
    "L": {"layers": 16, "hidden": 1024, "heads": 16, "kv_heads": 8, "intermediate": 2816},
    # Qwen3's own, for a GPU:
    "0.6B": {"layers": 28, "hidden": 1024, "heads": 16, "kv_heads": 8, "intermediate": 3072, "head_dim": 128},
    "1.7B": {"layers": 28, "hidden": 2048, "heads": 16, "kv_heads": 8, "intermediate": 6144, "head_dim": 128},
}
VOCAB = {"S": 512, "M": 512, "L": 8192, "0.6B": 151_936, "1.7B": 151_936}
NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def kv_mb(size: str, dtype: str, tokens: int) -> int:
    """MiB that the keys and values of so many tokens take."""
    shape = SIZES[size]
    each = shape["layers"] * shape["kv_heads"] * 2 * head_dim(shape) * getattr(torch, dtype).itemsize
    return -(-tokens * each >> 20)


def decoder(size: str, context: int = 2048) -> Decoder:
    model = Decoder(architecture(SIZES[size], vocab=VOCAB[size], context=context, ends=NO_ENDS))
    model.initialise(torch.Generator().manual_seed(0))
    return model


def write_model(folder: Path, size: str, dtype: torch.dtype, context: int = 2048) -> int:
    """A folder without a tokenizer: systems get tokens. Returns the number of parameters."""
    model = decoder(size, context)
    save_folder(model, folder, tokenizer_from=None, dtype=dtype)
    return sum(p.numel() for p in model.parameters())


def write_habitual_model(folder: Path, size: str, dtype: torch.dtype, strength: float, context: int = 2048) -> float:
    """A model that mostly continues loops of 16 tokens. Returns the mean probability of its likeliest next token.

    strength: about how much more likely, in 16ths of a nat, the next token of a loop is than any other one.
    """
    shape = architecture(SIZES[size], vocab=VOCAB[size], context=context, ends=NO_ENDS | {"tie_word_embeddings": False})
    model, generator = Decoder(shape), torch.Generator().manual_seed(0)
    model.initialise(generator)
    before = torch.arange(shape.vocab)
    before = before // 16 * 16 + (before - 1) % 16
    with torch.no_grad():
        model.embed.weight.copy_(torch.randn(shape.vocab, shape.hidden, generator=generator))
        assert model.head is not None
        unit = model.embed.weight / model.embed.weight.norm(dim=-1, keepdim=True)
        model.head.weight.copy_(strength * 16 / shape.hidden**0.5 * unit[before])
        row = torch.from_numpy(np.random.default_rng(0).integers(0, shape.vocab, 256))
        hidden = model(row, packed_positions([len(row)]), packed_attention([len(row)], shape.windows))
        likeliest = model.logits(hidden).softmax(-1).amax(-1).mean().item()
    save_folder(model, folder, tokenizer_from=None, dtype=dtype)
    return likeliest


def prompts(size: str, count: int, length: int, seed: int) -> list[list[int]]:
    """New ones for every seed, so that nothing is found in a cache of an earlier repetition."""
    return np.random.default_rng(seed).integers(0, VOCAB[size], (count, length)).tolist()
