"""New models: Qwen3-style folders with random weights and a character tokenizer.

They are small enough to learn a task in seconds on a laptop, and are folders like any other for all that reads models.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import NotRequired, TypedDict, Unpack

from tidemill.core.seeding import derive_seed
from tidemill.models.architecture import Architecture
from tidemill.models.tokenizer import character_tokenizer


class ModelSize(TypedDict):
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    head_dim: NotRequired[int]  # else hidden / heads


SIZES: dict[str, ModelSize] = {  # parameters with an alphabet of 61 characters (64 tokens)
    "0.1m": {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "intermediate": 192},  # 102,848
    "2m": {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "intermediate": 512},  # 2,378,496
    "25m": {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 4, "intermediate": 1536},  # 25,208,320
}


def fresh_model(
    folder: str | Path,
    *,
    alphabet: str,
    context: int = 512,
    seed: int = 0,
    lowercase: bool = False,
    **sizes: Unpack[ModelSize],
) -> Architecture:
    """Write the folder and return its architecture.

    Example: `fresh_model(folder, alphabet=letters, **SIZES["2m"])`. The head is tied to the embedding, and the weights
    are a function of `seed`. Raises ValueError if the sizes do not divide, the alphabet repeats a character, or `folder`
    holds something else.
    """
    import torch  # imported here, because the controller reads the sizes

    from tidemill.models.hf_weights import empty_decoder, save_folder

    hidden, heads, given = sizes["hidden"], sizes["heads"], sizes.get("head_dim")
    if heads % sizes["kv_heads"] or head_dim(sizes) % 2 or (given is None and hidden % heads):
        raise ValueError(
            f"hidden={hidden}, heads={heads}, kv_heads={sizes['kv_heads']}, head_dim={given}: expected hidden = heads * an "
            "even number, or an even head_dim, and heads a multiple of kv_heads"
        )
    tokenizer = character_tokenizer(alphabet, lowercase=lowercase)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    arch = architecture(sizes, vocab=len(tokenizer), context=context, ends=ends)
    decoder = empty_decoder(arch)
    decoder.initialise(torch.Generator().manual_seed(derive_seed(seed, "fresh model")))
    with tempfile.TemporaryDirectory() as companions:
        tokenizer.save_pretrained(companions)
        settings = Path(companions) / "tokenizer_config.json"  # by the name that every version of transformers knows
        known = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        settings.write_text(json.dumps(known, indent=2) + "\n")
        (Path(companions) / "generation_config.json").write_text(json.dumps(ends | {"do_sample": True}) + "\n")
        save_folder(decoder, folder, tokenizer_from=companions, dtype=torch.float32)
    return arch


def head_dim(sizes: ModelSize) -> int:
    return sizes.get("head_dim", sizes["hidden"] // sizes["heads"])


def architecture(sizes: ModelSize, *, vocab: int, context: int, ends: dict[str, int | None]) -> Architecture:
    """The architecture of a Qwen3-style model with tied head and embedding.

    ends: the ids of the tokens that begin, end and pad, by their keys in config.json.
    """
    return Architecture.from_dict(
        {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": vocab,
            "hidden_size": sizes["hidden"],
            "intermediate_size": sizes["intermediate"],
            "num_hidden_layers": sizes["layers"],
            "num_attention_heads": sizes["heads"],
            "num_key_value_heads": sizes["kv_heads"],
            "head_dim": head_dim(sizes),
            "hidden_act": "silu",
            "max_position_embeddings": context,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            **ends,
        }
    )
