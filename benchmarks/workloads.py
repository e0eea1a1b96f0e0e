"""Models and prompts that the benchmarks share: Qwen3-shaped, random weights, written as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tidemill.models.architecture import Architecture
from tidemill.models.decoder import Decoder
from tidemill.models.weights import save_folder

SIZES = {
    "S": {"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "head_dim": 32, "intermediate": 768, "vocab": 512},
    "M": {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "head_dim": 64, "intermediate": 1536, "vocab": 512},
    "L": {"hidden": 1024, "layers": 16, "heads": 16, "kv_heads": 8, "head_dim": 64, "intermediate": 2816, "vocab": 8192},
}


def architecture(size: str, context: int = 2048) -> Architecture:
    sizes = SIZES[size]
    return Architecture.from_dict(
        {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": sizes["vocab"],
            "hidden_size": sizes["hidden"],
            "intermediate_size": sizes["intermediate"],
            "num_hidden_layers": sizes["layers"],
            "num_attention_heads": sizes["heads"],
            "num_key_value_heads": sizes["kv_heads"],
            "head_dim": sizes["head_dim"],
            "hidden_act": "silu",
            "max_position_embeddings": context,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
    )


def decoder(size: str, context: int = 2048) -> Decoder:
    model = Decoder(architecture(size, context))
    model.initialise(torch.Generator().manual_seed(0))
    return model


def write_model(folder: Path, size: str, dtype: torch.dtype, context: int = 2048) -> int:
    """A folder without a tokenizer: systems get tokens. Returns the number of parameters."""
    model = decoder(size, context)
    save_folder(model, folder, tokenizer_from=None, dtype=dtype)
    return sum(p.numel() for p in model.parameters())


def prompts(size: str, count: int, length: int, seed: int) -> list[list[int]]:
    """New ones for every seed, so that nothing is found in a cache of an earlier repetition."""
    return np.random.default_rng(seed).integers(0, SIZES[size]["vocab"], (count, length)).tolist()
