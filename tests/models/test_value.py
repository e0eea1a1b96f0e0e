"""A decoder with a score in the place of a vocabulary, and transformers' folder for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_zoo import CONFIGS, random_decoder, transformers_model

from tidemill.core.errors import UnsupportedModel
from tidemill.models.attention import packed_attention
from tidemill.models.hf_weights import load_folder, save_folder
from tidemill.models.value_model import ValueModel, load_value_model

TOKENS = torch.tensor([3, 7, 7, 1, 30, 12, 2])


def values(model: ValueModel) -> torch.Tensor:
    attend = packed_attention([len(TOKENS)], model.decoder.arch.windows)
    with torch.no_grad():
        return model.values(model.decoder(TOKENS, torch.arange(len(TOKENS)), attend))


def scored(name: str) -> ValueModel:
    model = ValueModel(random_decoder(name))
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(1))
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_its_folder_is_one_for_sequence_classification(name, tmp_path: Path):
    from transformers import AutoModelForSequenceClassification

    own = scored(name)
    own.save(tmp_path / "scored", tokenizer_from=None, dtype=torch.float32)
    twin = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "scored", attn_implementation="eager", dtype=torch.float32
    )
    assert type(twin).__name__.endswith("ForSequenceClassification") and twin.config.num_labels == 1
    expected = values(own)
    with torch.no_grad():
        for length in (1, 4, len(TOKENS)):  # it tells the value after the last token
            found = twin(input_ids=TOKENS[None, :length], use_cache=False).logits[0, 0]
            torch.testing.assert_close(found, expected[length - 1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(values(load_value_model(tmp_path / "scored")), expected, rtol=0, atol=0)


def test_what_transformers_saved_is_read(tmp_path: Path):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = {key: value for key, value in CONFIGS["qwen3"].items() if key != "model_type"}
    torch.manual_seed(0)
    twin = AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model("qwen3", **config, num_labels=1), attn_implementation="eager"
    ).eval()
    twin.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        expected = twin(input_ids=TOKENS[None], use_cache=False).logits[0, 0]
    torch.testing.assert_close(values(load_value_model(tmp_path / "theirs"))[-1], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied-bias"])
def test_a_language_model_is_worth_nothing_at_first(name, tmp_path: Path):
    decoder = random_decoder(name)
    save_folder(decoder, tmp_path / "model", tokenizer_from=None, dtype=torch.float32)
    model = load_value_model(tmp_path / "model")
    assert values(model).tolist() == [0.0] * len(TOKENS)
    assert model.decoder.head is None and torch.equal(model.decoder.layers[0].qkv.weight, decoder.layers[0].qkv.weight)
    assert sorted(n for n, _ in ValueModel(decoder, shared=True).trained.named_parameters()) == ["head.weight"]


def test_several_labels_and_a_score_for_a_policy_are_refused(tmp_path: Path):
    model = transformers_model(CONFIGS["qwen3"])
    model.config.num_labels = 3
    from transformers import AutoModelForSequenceClassification

    AutoModelForSequenceClassification.from_config(model.config).save_pretrained(tmp_path / "three")
    with pytest.raises(UnsupportedModel, match=r"score\.weight is \[3, 32\], expected \[1, 32\], of one label"):
        load_value_model(tmp_path / "three")
    scored("qwen3").save(tmp_path / "scored", tokenizer_from=None, dtype=torch.float32)
    with pytest.raises(UnsupportedModel, match=r"score\.weight"):
        load_folder(tmp_path / "scored")
