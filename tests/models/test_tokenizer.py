"""Character tokenizers, loading, end ids, and models that start from nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_zoo import CONFIGS, logits, transformers_logits

from tidemill.models.architecture import Architecture
from tidemill.models.fingerprint import fingerprint
from tidemill.models.hf_weights import load_folder, serving_slices
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.models.tokenizer import (
    EOS,
    byte_tokenizer,
    character_tokenizer,
    class_name,
    generation_config,
    load_tokenizer,
    stop_ids,
)

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGH0123456789 \n.,:?!'-+=*/()é€"
TINY = SIZES["0.1m"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fresh") / "m"
    fresh_model(path, alphabet=ALPHABET, **TINY, context=64, seed=3)
    return path


@settings(max_examples=80)
@given(text=st.text(alphabet=ALPHABET, max_size=40))
def test_characters_round_trip(folder: Path, text: str) -> None:
    global _LOADED
    _LOADED = _LOADED or load_tokenizer(folder)
    for tokenizer in (character_tokenizer(ALPHABET), _LOADED):
        ids = tokenizer(text).input_ids
        assert ids == [3 + ALPHABET.index(c) for c in text]
        assert tokenizer.decode(ids) == text == tokenizer.decode(ids, skip_special_tokens=True)


_LOADED = None


def test_special_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert len(tokenizer) == 3 + len(ALPHABET)
    assert tokenizer("a~~b<eos>").input_ids == [3, 2, 2, 4, 1]
    assert tokenizer.decode([3, 1], skip_special_tokens=True) == "a"


def test_an_older_transformers_knows_the_class_too(folder: Path) -> None:
    assert json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.parametrize("alphabet", ["", "abca"])
def test_a_bad_alphabet_is_refused(alphabet: str) -> None:
    with pytest.raises(ValueError, match="each character once"):
        character_tokenizer(alphabet)


def test_loading_says_what_is_missing(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tokenizer there"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match="no tokenizer there"):
        load_tokenizer(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    with pytest.raises(ValueError, match="no eos_token"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "mod')
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


@settings(max_examples=80)
@given(text=st.text(max_size=40) | st.sampled_from([f"a{EOS}b", EOS, f" {EOS} ", "  a\n\n b ", "naïve\r\n€\0"]))
def test_bytes_round_trip(text: str) -> None:
    global _BYTES
    _BYTES = _BYTES or byte_tokenizer(EOS, literal=True)
    ids = _BYTES.encode(text)
    assert len(ids) == len(text.encode()) and _BYTES.eos_token_id not in ids
    assert _BYTES.decode(ids, skip_special_tokens=True) == text
    assert [text[b:e] for b, e in _BYTES(text, return_offsets_mapping=True)["offset_mapping"]] == [
        character for character in text for _ in character.encode()
    ]


_BYTES: Any = None


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer.json of the kind that most models have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(
        models.BPE({each: i for i, each in enumerate(("<pad>", "<eos>", "<unk>", *letters, "ab"))}, [("a", "b")])
    )
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return core.to_str()


CLASSES = ["PreTrainedTokenizerFast", "Qwen2Tokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "UnheardOf", None]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "unheard_of", None, "no config.json"])
@pytest.mark.parametrize("named", CLASSES)
@pytest.mark.parametrize("kind", ["characters", "bytes"])
def test_it_is_the_tokenizer_that_transformers_would_choose(
    folder: Path, bytewise: str, tmp_path: Path, kind: str, named: str | None, family: str | None
):
    from transformers import AutoTokenizer

    for file, key, value in (("tokenizer_config.json", "tokenizer_class", named), ("config.json", "model_type", family)):
        tree = json.loads((folder / file).read_text()) | {key: value}
        if value != f"no {file}":
            (tmp_path / file).write_text(json.dumps({name: each for name, each in tree.items() if each is not None}))
    (tmp_path / "tokenizer.json").write_text(bytewise if kind == "bytes" else (folder / "tokenizer.json").read_text())
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")

    def known(tokenizer: Any) -> list[Any]:
        its = [type(tokenizer), tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map, tokenizer.name_or_path]
        return [*its, tokenizer.chat_template, tokenizer.init_kwargs, len(tokenizer), tokenizer("ab <eos> c").input_ids]

    chosen = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    assert class_name(chosen) is not None and chosen.chat_template is not None
    assert known(load_tokenizer(tmp_path, class_name(chosen))) == known(load_tokenizer(tmp_path)) == known(chosen)


def test_a_class_that_transformers_does_not_have_has_no_name(folder: Path):
    chosen = load_tokenizer(folder)
    for name in ("Strange", type(chosen).__name__):  # not even where it has one of that name
        chosen.__class__ = type(name, (type(chosen),), {})
        assert class_name(chosen) is None


def test_a_tokenizer_of_a_named_class_is_loaded_and_used_without_torch(folder: Path, tmp_path: Path):
    copied = shutil.copytree(folder, tmp_path / "m")
    (copied / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    command = [sys.executable, "-c", ALONE, str(copied), class_name(load_tokenizer(copied)) or ""]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[3, 4], "ab", "ab", [3, 4], False]


ALONE = """
import json, sys
from tidemill.models.tokenizer import import_tokenizers, load_tokenizer
import_tokenizers()
tokenizer = load_tokenizer(sys.argv[1], sys.argv[2])
said = [{"role": "user", "content": "ab"}]
used = [tokenizer.encode("ab"), tokenizer.decode([3, 4])]
used += [tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)]
used += [tokenizer.apply_chat_template(said, tokenize=True, return_dict=False), "torch" in sys.modules]
print(json.dumps(used))
"""


def test_stop_ids_are_all_of_them(folder: Path, tmp_path: Path) -> None:
    arch = Architecture.from_dict(CONFIGS["qwen3"] | {"eos_token_id": [7, 5]})
    tokenizer = load_tokenizer(folder)
    assert stop_ids(tokenizer, arch, {"eos_token_id": [9, 5]}) == (1, 5, 7, 9)
    assert stop_ids(None, arch, {"eos_token_id": 2}) == (2, 5, 7)
    assert stop_ids(tokenizer, Architecture.from_dict(CONFIGS["qwen3"] | {"eos_token_id": None})) == (1,)
    assert generation_config(tmp_path) == {}
    assert generation_config(folder)["eos_token_id"] == 1
    (tmp_path / "generation_config.json").write_text("[1")
    with pytest.raises(ValueError, match="not JSON"):
        generation_config(tmp_path)


def test_a_fresh_model_is_a_hugging_face_folder(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    decoder = load_folder(folder)
    assert decoder.arch.tied and decoder.arch.qk_norm and decoder.arch.context == 64 and decoder.arch.eos_ids == (1,)
    tokens = torch.arange(20)
    reference = AutoModelForCausalLM.from_pretrained(folder)
    assert reference.generation_config.eos_token_id == 1
    with torch.no_grad():
        assert (logits(decoder, tokens, [20]) - transformers_logits(reference, tokens)).abs().max() < 1e-5


def test_the_seed_decides_the_weights(folder: Path, tmp_path: Path) -> None:
    prints = []
    for i, seed in enumerate((3, 3, 4)):
        fresh_model(tmp_path / str(i), alphabet=ALPHABET, **TINY, context=64, seed=seed)
        prints.append(fingerprint(serving_slices(load_folder(tmp_path / str(i)), torch.float32)))
    assert prints[0] == prints[1] == fingerprint(serving_slices(load_folder(folder), torch.float32)) != prints[2]


def test_sizes_have_the_parameters_they_are_named_for() -> None:
    for name, size in SIZES.items():
        q, kv = size["hidden"], size["hidden"] // size["heads"] * size["kv_heads"]
        norms = 2 * size["hidden"] + 2 * size["hidden"] // size["heads"]
        layer = size["hidden"] * (2 * q + 2 * kv + 3 * size["intermediate"]) + norms
        total = size["layers"] * layer + size["hidden"] * (64 + 1)
        assert 0.8 < total / (float(name.removesuffix("m")) * 1e6) < 1.2, (name, total)


def test_bad_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hidden=60, heads=8"):
        fresh_model(tmp_path / "m", alphabet="ab", layers=1, hidden=60, heads=8, kv_heads=2, intermediate=8)
    assert not (tmp_path / "m").exists()


def test_a_lower_case_tokenizer_reads_capitals_and_survives_saving(tmp_path):
    tokenizer = character_tokenizer("abc .", lowercase=True)
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, load_tokenizer(tmp_path)):
        assert each.encode("A Cab.", add_special_tokens=False) == each.encode("a cab.", add_special_tokens=False)
        assert each.decode(each.encode("A Cab.", add_special_tokens=False)) == "a cab."
