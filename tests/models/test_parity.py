"""The decoder computes what `transformers` computes, for every family, and folders travel both ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model_zoo import CONFIGS, folder_of, logits, random_decoder, transformers_logits, transformers_model

from tidemill.core.errors import UnsupportedModel
from tidemill.models.architecture import Architecture
from tidemill.models.hf_weights import load_folder, save_folder

LENGTHS = [23, 1, 9]


def tokens_of(vocab: int = 48) -> torch.Tensor:
    return torch.randint(vocab, (sum(LENGTHS),), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = transformers_model(CONFIGS[name])
    decoder = load_folder(folder_of(reference, tmp_path / "m"))
    tokens = tokens_of()
    with torch.no_grad():
        ours = logits(decoder, tokens, LENGTHS)
    theirs = torch.cat([transformers_logits(reference, part) for part in tokens.split(LENGTHS)])
    assert theirs.std() > 0.5  # else agreement means little
    assert (ours - theirs).abs().max() <= 1e-4
    assert (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-upper-window"])
def test_the_window_matters(name: str) -> None:
    """The parity above would not notice a window that both sides ignore."""
    decoder, tokens = random_decoder(name), tokens_of()[:23]
    wide = Architecture.from_dict(CONFIGS[name] | {"sliding_window": 64})
    with torch.no_grad():
        windowed = logits(decoder, tokens, [23])
        decoder.arch = wide
        full = logits(decoder, tokens, [23])
    assert torch.equal(windowed[:4], full[:4])
    assert (windowed[8:] - full[8:]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["llama3-biases", "mistral-window", "qwen2-upper-window", "qwen3"])
@pytest.mark.parametrize("shard", [4 << 30, 8_000])
def test_a_saved_folder_loads_in_transformers(name: str, shard: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    decoder, tokens = random_decoder(name), tokens_of()[:23]
    save_folder(decoder, tmp_path / "out", tokenizer_from=None, dtype=torch.float32, max_shard_bytes=shard)
    reference, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert reference.dtype == torch.float32
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > (1 if shard == 8_000 else 0)
    with torch.no_grad():
        ours = logits(decoder, tokens, [23])
    assert (ours - transformers_logits(reference, tokens)).abs().max() <= 1e-5 * max(1.0, ours.abs().max())
    again = load_folder(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), again.parameters(), strict=True))


def test_a_sharded_transformers_folder_loads(tmp_path: Path) -> None:
    reference = transformers_model(CONFIGS["qwen3-tied-bias"])
    folder = folder_of(reference, tmp_path / "m", max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    tokens = tokens_of()[:23]
    with torch.no_grad():
        ours = logits(load_folder(folder), tokens, [23])
    assert (ours - transformers_logits(reference, tokens)).abs().max() <= 1e-4


def test_bfloat16_round_trip_keeps_configuration(tmp_path: Path) -> None:
    decoder = random_decoder("qwen3", dtype=torch.bfloat16)
    decoder.arch.raw["torch_dtype"] = "float32"
    decoder.arch.raw["a_key_nobody_knows"] = [1, {"b": None}]
    try:
        save_folder(decoder, tmp_path / "m", tokenizer_from=None, dtype=torch.bfloat16)
    finally:
        del decoder.arch.raw["torch_dtype"], decoder.arch.raw["a_key_nobody_knows"]
    saved = json.loads((tmp_path / "m" / "config.json").read_text())
    assert saved["torch_dtype"] == "bfloat16" and saved["a_key_nobody_knows"] == [1, {"b": None}]
    assert saved["architectures"] == ["Qwen3ForCausalLM"]
    again = load_folder(tmp_path / "m", dtype=torch.bfloat16)
    assert again.arch == decoder.arch
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), again.parameters(), strict=True))


def test_casting_keeps_the_rotary_frequencies() -> None:
    decoder = random_decoder("llama3-biases")
    before = decoder.inverse_frequencies.clone()
    decoder.to(torch.bfloat16)
    assert decoder.inverse_frequencies.dtype == torch.float32 and torch.equal(decoder.inverse_frequencies, before)


REFUSED = {
    "gpt2": ({"model_type": "gpt2"}, "gpt2"),
    "no type": ({"model_type": None}, "None"),
    "moe type": ({"model_type": "qwen3_moe"}, "qwen3_moe"),
    "experts": ({"num_experts": 8}, "experts"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    "dynamic": ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
    "llama3 incomplete": ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
    "rope per layer": ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "activation": ({"hidden_act": "gelu"}, "gelu"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout"),
    "layer types": (
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["chunked_attention"] * 3},
        "chunked_attention",
    ),
    "missing": ({"hidden_size": None}, "hidden_size"),
    "heads": ({"num_key_value_heads": 3}, "num_key_value_heads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_is_refused_by_name(case: str) -> None:
    change, word = REFUSED[case]
    with pytest.raises(UnsupportedModel, match=word):
        Architecture.from_dict(CONFIGS["qwen3"] | change)


def test_silence_in_config_json_means_what_transformers_assumes() -> None:
    from transformers import AutoConfig

    for family in ("llama", "mistral", "qwen2", "qwen3"):
        sparse = {
            "model_type": family,
            "vocab_size": 32,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "intermediate_size": 64,
        }
        theirs = AutoConfig.for_model(**sparse)
        ours = Architecture.from_dict(sparse)
        window = theirs.sliding_window if family == "mistral" else None
        head_dim = theirs.head_dim if hasattr(theirs, "head_dim") else 2
        assert (ours.kv_heads, ours.head_dim, ours.context) == (
            theirs.num_key_value_heads,
            head_dim,
            theirs.max_position_embeddings,
        ), family
        assert (
            ours.windows == (window,) * 2
            and ours.tied == theirs.tie_word_embeddings
            and ours.norm_eps == theirs.rms_norm_eps
        )
