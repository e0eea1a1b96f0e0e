"""Adapters beside PEFT: the same logits, gradients and files; merged and unmerged; off; refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import CONFIGS, folder_of, logits, random_decoder, transformers_logits, transformers_model
from safetensors.torch import load_file, save_file

from tidemill.core.errors import UnsupportedModel
from tidemill.models.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterConfig
from tidemill.models.adapter_files import load_adapter, save_adapter
from tidemill.models.hf_weights import load_folder
from tidemill.models.lora import adapter_blocks, attach, merge, without

TOKENS = torch.randint(48, (23,), generator=torch.Generator().manual_seed(7))
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {  # model, PEFT's settings
    "q and v": ("llama", {"r": 4, "target_modules": ["q_proj", "v_proj"]}),
    "all linear": ("qwen3", {"r": 8, "lora_alpha": 32, "target_modules": "all-linear"}),
    "tied, k alone": ("qwen3-tied-bias", {"r": 2, "target_modules": ["k_proj"]}),
    "biases, rslora": ("llama3-biases", {"r": 9, "target_modules": EVERY, "use_rslora": True}),
    "ranks by pattern": (
        "qwen2",
        {"r": 4, "target_modules": EVERY, "rank_pattern": {"q_proj": 7, r"layers\.1\..*\.up_proj": 1, "1.mlp.gate_proj": 6}},
    ),
    "alphas by pattern": (
        "mistral-window",
        {"r": 4, "target_modules": EVERY, "alpha_pattern": {"down_proj": 40, "k_proj": 1}},
    ),
    "some layers": ("qwen2-upper-window", {"r": 4, "target_modules": ATTENTION, "layers_to_transform": [0, 2]}),
    "an expression, but": (
        "llama-linear",
        {"r": 4, "target_modules": r".*\.(q_proj|up_proj)", "exclude_modules": ["0.mlp.up_proj"]},
    ),
}


def of_peft(name: str, folder: Path, seed: int = 1, **more: Any) -> Any:
    """PEFT's model on its random base, with every A and B random; both are saved in `folder`."""
    from peft import LoraConfig, get_peft_model

    config, settings = CONFIGS[SHAPES[name][0]], SHAPES[name][1] | more
    base = transformers_model(config)
    folder_of(base, folder / "base")
    adapted = get_peft_model(base, LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_" in key:
                parameter.normal_(0.0, 0.15, generator=generator)
    adapted.save_pretrained(folder / "adapter")
    return adapted.eval()


@pytest.mark.parametrize("name", SHAPES)
def test_logits_gradients_and_files_are_those_of_peft(name: str, tmp_path: Path) -> None:
    adapted = of_peft(name, tmp_path)
    decoder = load_folder(tmp_path / "base")
    config = load_adapter(decoder, tmp_path / "adapter")
    theirs, ours = transformers_logits(adapted, TOKENS), logits(decoder, TOKENS, [23])
    assert (ours - theirs).abs().max() <= 1e-4
    with without(decoder):
        assert (logits(decoder, TOKENS, [23]) - theirs).abs().max() > 0.1, "the adapter changes something"

    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(3))
    (ours * weights).sum().backward()
    (adapted(input_ids=TOKENS[None], use_cache=False).logits[0] * weights).sum().backward()
    found = {key: each.grad for key, each in adapted.named_parameters() if each.grad is not None}
    expected = {key.removeprefix("base_model.model.").replace(".default", ""): grad for key, grad in found.items()}
    blocks = {block.name: block.tensor for block in adapter_blocks(decoder)}
    assert set(blocks) == set(expected)
    own = {p.data_ptr(): p.grad for p in decoder.parameters() if p.requires_grad}
    for key, tensor in blocks.items():
        assert (own[tensor.data_ptr()] - expected[key]).abs().max() <= 3e-5 * max(1.0, expected[key].abs().max())
    assert all(p.grad is None for p in decoder.parameters() if not p.requires_grad)

    save_adapter(blocks, replace(config, base="base"), tmp_path / "adapter")
    again = load_folder(tmp_path / "base")
    assert load_adapter(again, tmp_path / "adapter").base == "base"
    assert all(torch.equal(tensor, blocks[block.name]) for block in adapter_blocks(again) for tensor in [block.tensor])
    unmerged = logits(again, TOKENS, [23])
    merge(again)
    merged = logits(again, TOKENS, [23])
    assert (merged - theirs).abs().max() <= 1e-4 and (merged - unmerged).abs().max() <= 1e-5 * merged.abs().max()
    assert not list(adapter_blocks(again))


@pytest.mark.parametrize("name", ["all linear", "biases, rslora", "ranks by pattern", "some layers"])
def test_peft_reads_what_is_written(name: str, tmp_path: Path) -> None:
    """Loaded by PEFT and saved again, the tensors have the same bits; its merged weights are ours."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    of_peft(name, tmp_path)
    decoder = load_folder(tmp_path / "base")
    config = load_adapter(decoder, tmp_path / "adapter")
    ours = tmp_path / "ours"
    ours.mkdir()
    save_adapter(
        {block.name: block.tensor for block in adapter_blocks(decoder)}, replace(config, base=str(tmp_path / "base")), ours
    )
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), str(ours))
    theirs.save_pretrained(tmp_path / "again")
    first, second = (load_file(folder / ADAPTER_WEIGHTS) for folder in (ours, tmp_path / "again"))
    assert set(first) == set(second) and all(torch.equal(first[key], second[key]) for key in first)
    merged = theirs.merge_and_unload()
    merge(decoder)
    torch.testing.assert_close(logits(decoder, TOKENS, [23]), transformers_logits(merged, TOKENS), atol=1e-4, rtol=1e-5)


def test_a_new_adapter_changes_nothing_and_trains_alone() -> None:
    decoder = random_decoder("qwen3")
    before = logits(decoder, TOKENS, [23])
    attach(decoder, AdapterConfig(rank=4), torch.Generator().manual_seed(0))
    assert torch.equal(logits(decoder, TOKENS, [23]), before)
    logits(decoder, TOKENS, [23]).square().sum().backward()
    trained = {name for name, p in decoder.named_parameters() if p.grad is not None}
    assert trained and all(".adapter." in name for name in trained)
    assert sum(p.numel() for n, p in decoder.named_parameters() if n in trained) < 0.5 * sum(
        p.numel() for p in decoder.parameters()
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"use_dora": True}, "use_dora = True is not computed here"),
        ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS' is a reward model's adapter"),
        ({"lora_bias": True}, "lora_bias = True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"r": 0}, "r = 0, expected a whole number above 0, 1,000,000 at most"),
        ({"r": 2.5}, "r = 2.5"),
        ({"r": 10**9}, "r = 1000000000, expected a whole number"),
        ({"lora_dropout": "a lot"}, "lora_dropout = 'a lot', expected a number from 0"),
        ({"lora_dropout": 1.0}, "lora_dropout = 1, expected a number from 0, below 1"),
        ({"target_modules": []}, "target_modules is []"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target 'lm_head' is no matrix"),
        ({"target_modules": ["embed_tokens"]}, "name no matrix of this model's layers"),
        ({"target_modules": "("}, "is no regular expression"),
        ({"rank_pattern": {"q_proj": -1}}, "q_proj = -1"),
        ({"layers_to_transform": "two"}, "layers_to_transform"),
        ({"rank_pattern": {"q_proj": 3}}, "q_proj.lora_A.weight is [4, 32], expected [3, 32]"),
        ({"target_modules": ["q_proj"]}, "v_proj.lora_A.weight belongs to no adapter"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "o_proj.lora_A.weight and 5 more is missing"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    of_peft("q and v", tmp_path)
    path = tmp_path / "adapter" / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UnsupportedModel) as refused:
        load_adapter(load_folder(tmp_path / "base"), tmp_path / "adapter")
    assert sentence in str(refused.value)


def test_damaged_tensors_are_refused(tmp_path: Path) -> None:
    of_peft("q and v", tmp_path)
    path = tmp_path / "adapter" / ADAPTER_WEIGHTS
    tensors = load_file(path)
    key = min(tensors)
    for damaged, sentence in (
        (tensors | {key: tensors[key] * float("nan")}, "NaN or infinity"),
        (tensors | {key: tensors[key].to(torch.int8)}, "int8"),
    ):
        save_file(damaged, path)
        with pytest.raises(UnsupportedModel, match=sentence):
            load_adapter(load_folder(tmp_path / "base"), tmp_path / "adapter")
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(UnsupportedModel):
        load_adapter(load_folder(tmp_path / "base"), tmp_path / "adapter")
    path.unlink()
    with pytest.raises(UnsupportedModel, match=r"no adapter_model\.safetensors there"):
        load_adapter(load_folder(tmp_path / "base"), tmp_path / "adapter")
