"""Tiny randomly initialised models of every family, as `config.json` dictionaries, and their `transformers` twins."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from tidemill.models.architecture import Architecture
from tidemill.models.attention import packed_attention, packed_positions
from tidemill.models.decoder import Decoder

logging.getLogger("transformers").setLevel(logging.ERROR)

BASE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": BASE | {"model_type": "llama"},
    "llama3-biases": BASE
    | {"model_type": "llama", "rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True, "head_dim": 12},
    "llama-linear": BASE
    | {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    },
    "mistral-window": BASE | {"model_type": "mistral", "sliding_window": 5, "attention_bias": True},
    "qwen2-upper-window": BASE
    | {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen2": BASE | {"model_type": "qwen2", "num_key_value_heads": 4},
    "qwen3": BASE | {"model_type": "qwen3", "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen3-tied-bias": BASE
    | {
        "model_type": "qwen3",
        "head_dim": 8,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
}


def transformers_model(config: dict[str, Any], seed: int = 0) -> Any:
    """Its `transformers` twin in float32, with every weight random: norms and biases too, else errors there hide."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kwargs = {key: value for key, value in config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config["model_type"], **kwargs), attn_implementation="eager", dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    return model.eval()


def transformers_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """[N, V] of one sequence [N]."""
    with torch.no_grad():
        return model(input_ids=tokens[None], use_cache=False).logits[0]


def logits(decoder: Decoder, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    attend = packed_attention(lengths, decoder.arch.windows)
    return decoder.logits(decoder(tokens, packed_positions(lengths), attend))


def random_decoder(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = Decoder(Architecture.from_dict(CONFIGS[name])).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in decoder.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.3, generator=generator)
    return decoder


def folder_of(model: Any, path: Path, **kwargs: Any) -> Path:
    model.save_pretrained(path, **kwargs)
    return path
