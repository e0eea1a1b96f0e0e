"""Folders that transformers wrote, or that lie about as folders do: read as transformers reads them, or refused by name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import BASE, CONFIGS, LLAMA3, folder_of, logits, transformers_logits, transformers_model
from safetensors.torch import load_file, save_file

from tidemill.core.errors import UnsupportedModel
from tidemill.models.architecture import Architecture
from tidemill.models.attention import packed_attention
from tidemill.models.hf_weights import check_folder, load_folder, load_scored, save_folder
from tidemill.models.tokenizer import character_tokenizer, generation_config, load_tokenizer, stop_ids
from tidemill.models.value_model import ValueModel, last_tokens, load_value_model, padding_id

TOKENS = torch.randint(2, 48, (40,), generator=torch.Generator().manual_seed(3))
LLAMA = BASE | {"model_type": "llama"}
OLD_LLAMA3 = {"type": "llama3", **{key: value for key, value in LLAMA3.items() if key not in ("rope_type", "rope_theta")}}


def edited(folder: Path, change: dict[str, Any]) -> None:
    """config.json with other keys, which transformers reads again; a None takes a key away."""
    raw = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not Ellipsis}))


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what the model is made of, and what config.json then says
    "old rope, theta outside": (LLAMA, {"rope_parameters": ..., "rope_theta": 321.0}),
    "old rope scaling": (LLAMA, {"rope_parameters": ..., "rope_theta": 100.0, "rope_scaling": OLD_LLAMA3}),
    "old linear": (LLAMA, {"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 4.0}}),
    "both ropes": (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_scaling": OLD_LLAMA3}),
    "rope_scaling null": (LLAMA, {"rope_scaling": None}),
    "no theta": (LLAMA, {"rope_parameters": ...}),
    "no head_dim": (LLAMA, {"head_dim": ...}),
    "head_dim null": (LLAMA, {"head_dim": None}),
    "no kv heads": (LLAMA | {"num_key_value_heads": 4}, {"num_key_value_heads": ...}),
    "no architectures": (LLAMA, {"architectures": ...}),
    "no ties": (LLAMA, {"tie_word_embeddings": ...}),
    "tied": (LLAMA | {"tie_word_embeddings": True}, {}),
    "biases": (LLAMA | {"attention_bias": True, "mlp_bias": True}, {}),
    "dtype": (LLAMA, {"dtype": ..., "torch_dtype": "bfloat16"}),
    "labels": (LLAMA, {"num_labels": 5, "id2label": {"0": "a"}}),
    "window that llama has not": (LLAMA, {"sliding_window": 4, "use_sliding_window": True}),
    "mistral without a window": (BASE | {"model_type": "mistral", "sliding_window": None}, {}),
    "mistral with a window": (BASE | {"model_type": "mistral", "sliding_window": 4}, {"head_dim": ...}),
    "qwen2 window not in use": (BASE | {"model_type": "qwen2"}, {"sliding_window": 4, "layer_types": ...}),
    "qwen2 window in use": (
        BASE | {"model_type": "qwen2"},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "layer_types": ...},
    ),
    "qwen3 kinds of layers": (
        CONFIGS["qwen3"],
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3 bias": (CONFIGS["qwen3"] | {"attention_bias": True}, {}),
}


def equal_in_both(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        ours, theirs = logits(load_folder(folder), TOKENS, [len(TOKENS)]), transformers_logits(reference, TOKENS)
    assert theirs.std() > 0.1 and (ours - theirs).abs().max() <= 1e-4


@pytest.mark.parametrize("case", VARIANTS)
def test_logits_are_those_of_transformers_whatever_config_json_says(case: str, tmp_path: Path) -> None:
    config, change = VARIANTS[case]
    folder = folder_of(transformers_model(config), tmp_path / "m")
    edited(folder, change)
    equal_in_both(folder)
    check_folder(folder)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other weights": ({"transformers_weights": "other.safetensors"}, "transformers_weights"),
    "a context outside": (
        {"rope_scaling": OLD_LLAMA3, "original_max_position_embeddings": 64},
        "original_max_position_embeddings outside of rope_scaling",
    ),
    "compressed": ({"compression_config": {"format": "x"}}, "quantised"),
    "a head that is not there": ({"tie_word_embeddings": False, "vocab_size": 48}, "missing lm_head"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_read_otherwise_is_refused_by_name(case: str, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    folder = folder_of(transformers_model(LLAMA | {"tie_word_embeddings": True}), tmp_path / "m")
    edited(folder, change)
    for read in (load_folder, check_folder):
        with pytest.raises(UnsupportedModel, match=message):
            read(folder)


def test_an_old_index_beside_one_file_is_passed_over_as_in_transformers(tmp_path: Path) -> None:
    old = folder_of(transformers_model(LLAMA, seed=1), tmp_path / "old", max_shard_size="8KB")
    new = folder_of(transformers_model(LLAMA, seed=2), tmp_path / "new")
    for file in old.glob("model*"):
        shutil.copy(file, new / file.name)
    assert (new / "model.safetensors").is_file() and (new / "model.safetensors.index.json").is_file()
    equal_in_both(new)
    for file in old.glob("model-*"):
        (new / file.name).unlink()  # what the index names is gone
    equal_in_both(new)
    (old / "pytorch_model.bin").write_bytes(b"nothing that is read")
    equal_in_both(old)
    next(old.glob("model-00002*")).unlink()
    for read in (load_folder, check_folder):
        with pytest.raises(UnsupportedModel, match=r"model-00002-of-\d+\.safetensors does not exist, but .*index"):
            read(old)


def test_stop_ids_are_those_of_all_files(tmp_path: Path) -> None:
    folder = folder_of(transformers_model(LLAMA | {"eos_token_id": [1, 7]}), tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert stop_ids(None, Architecture.from_folder(folder), generation_config(folder)) == (1, 7, 9)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_no_numbers_are_refused_with_their_name(bad: float, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = folder_of(transformers_model(LLAMA).to(dtype), tmp_path / "m")
    load_folder(folder)
    tensors = {key: value.clone() for key, value in load_file(folder / "model.safetensors").items()}
    tensors["model.layers.1.mlp.down_proj.weight"].view(-1)[77] = bad
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    for read in (load_folder, load_scored):
        with pytest.raises(UnsupportedModel, match=r"model\.layers\.1\.mlp\.down_proj\.weight holds NaN or infinity"):
            read(folder)
    check_folder(folder)  # which reads no weight


def pipe(path: Path) -> None:
    os.mkfifo(path)


IN_PLACE: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (pipe, "is a pipe or device"),
    "folder": (lambda path: path.mkdir(), "is a folder"),
    "dangling link": (lambda path: path.symlink_to("gone"), "is a link to what is not there"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a pipe or device"),
}
NAMES = ("model.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json", "chat_template.jinja")
NAMES += ("model-00001-of-00002.safetensors",)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", IN_PLACE)
def test_what_is_no_file_is_refused_and_not_waited_for(name: str, case: str, tmp_path: Path) -> None:
    make, message = IN_PLACE[case]
    character_tokenizer("abc").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    for read in (load_folder, check_folder, load_value_model, load_tokenizer, Architecture.from_folder):
        with pytest.raises(UnsupportedModel, match=f"{name} {message}"):
            read(tmp_path)


def test_an_adapter_beside_a_model_is_refused(tmp_path: Path) -> None:
    folder = folder_of(transformers_model(LLAMA), tmp_path / "m")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match=r"adapter_config\.json"):
        load_folder(folder)


def test_headers_are_checked_as_weights_are(tmp_path: Path) -> None:
    folder = folder_of(transformers_model(LLAMA), tmp_path / "m")
    whole = {key: value.clone() for key, value in load_file(folder / "model.safetensors").items()}
    name = "model.layers.2.mlp.up_proj.weight"
    for change, message in (
        ({name: None}, f"missing {name}"),
        ({name: torch.zeros(5, 5)}, r"up_proj.weight: shape \[5, 5\] where \[56, 32\]"),
        ({"extra": torch.zeros(1)}, "unexpected tensor 'extra'"),
        ({name: torch.zeros(56, 32, dtype=torch.int8)}, "quantised weights are not supported"),
    ):
        (folder / "model.safetensors").unlink()
        tensors = {key: value for key, value in (whole | change).items() if value is not None}
        save_file(tensors, folder / "model.safetensors")
        for read in (load_folder, check_folder):
            with pytest.raises(UnsupportedModel, match=message):
                read(folder)
    (folder / "model.safetensors").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(UnsupportedModel):
        check_folder(folder)


def scores_of(folder: Path, row: list[int]) -> tuple[float, float]:
    """(ours, that of transformers)"""
    from transformers import AutoModelForSequenceClassification

    twin = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    own = load_value_model(folder)
    (place,) = last_tokens([row], own.decoder.arch)
    attend = packed_attention([len(row)], own.decoder.arch.windows)
    with torch.no_grad():
        ours = own.values(own.decoder(torch.tensor(row), torch.arange(len(row)), attend))[place]
        return float(ours), float(twin(input_ids=torch.tensor([row]), use_cache=False).logits[0, 0])


@pytest.mark.parametrize("pad", [None, 0, 1], ids=["none", "its own", "the end token"])
def test_scores_of_a_folder_that_transformers_saved(pad: int | None, tmp_path: Path) -> None:
    """Pooled at the last token that is no padding, even where that passes over the end."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = {key: value for key, value in LLAMA.items() if key != "model_type"} | {"pad_token_id": pad}
    torch.manual_seed(0)
    twin = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("llama", **config, num_labels=1))
    twin.save_pretrained(tmp_path / "theirs")
    for row in ([5, 6, 7, 1], [5, 6, 7], [5, 1, 1, 1], [5, 0, 6, 0], [1]):
        ours, theirs = scores_of(tmp_path / "theirs", row)
        assert ours == pytest.approx(theirs, abs=1e-5), row


def test_a_reward_model_whose_padding_was_its_end_token_is_saved_with_another(tmp_path: Path) -> None:
    character_tokenizer("abcdef").save_pretrained(tmp_path / "tokenizer")  # <pad> is 0, <eos> is 1
    for pad, tokenizer, kept in (
        (1, tmp_path / "tokenizer", 0),
        (1, None, None),
        (0, None, 0),
        (5, tmp_path / "tokenizer", 5),
        (None, tmp_path / "tokenizer", 0),
    ):
        arch = Architecture.from_dict(LLAMA | {"pad_token_id": pad})
        assert padding_id(arch, tokenizer) == kept
    folder = folder_of(transformers_model(LLAMA | {"pad_token_id": 1}), tmp_path / "m")
    model = ValueModel(load_folder(folder))
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(1))
    row = [5, 6, 7, 1]
    with torch.no_grad():
        trained = model.values(model.decoder(torch.tensor(row), torch.arange(4), packed_attention([4], (None,) * 3)))[-1]
    model.save(tmp_path / "scored", tokenizer_from=tmp_path / "tokenizer", dtype=torch.float32)
    assert scores_of(tmp_path / "scored", row) == pytest.approx((float(trained),) * 2, abs=1e-5)
    save_folder(model.decoder, tmp_path / "policy", tokenizer_from=None, dtype=torch.float32)
    assert json.loads((tmp_path / "policy" / "config.json").read_text())["pad_token_id"] == 1  # a policy keeps its own
