"""Views, slices and folders: every element exactly once, and no half-written folder under a final name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_zoo import CONFIGS, random_decoder, transformers_model
from safetensors.torch import load_file, save_file

from tidemill.core.errors import UnsupportedModel
from tidemill.models import hf_weights
from tidemill.models.architecture import Architecture
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import hf_views, load_folder, load_slices, save_folder, serving_slices
from tidemill.models.tokenizer import character_tokenizer
from tidemill.models.weight_slices import Slice


@pytest.mark.parametrize("name", CONFIGS)
def test_views_have_the_names_and_shapes_of_transformers(name: str) -> None:
    theirs = {key: tuple(value.shape) for key, value in transformers_model(CONFIGS[name]).state_dict().items()}
    if CONFIGS[name]["tie_word_embeddings"]:
        del theirs["lm_head.weight"]
    assert {key: tuple(view.shape) for key, view in hf_views(random_decoder(name))} == theirs


def test_views_share_storage_and_cover_every_parameter_once() -> None:
    decoder = random_decoder("llama3-biases")
    for _, view in hf_views(decoder):
        view.add_(1000.0)
    assert all(bool(((p > 900) & (p < 1100)).all()) for p in decoder.parameters())
    assert sum(view.numel() for _, view in hf_views(decoder)) == sum(p.numel() for p in decoder.parameters())
    with torch.no_grad():
        decoder.layers[1].qkv.weight.fill_(3.0)
    assert bool((dict(hf_views(decoder))["model.layers.1.self_attn.v_proj.weight"] == 3.0).all())


def cut(slices: list[Slice]) -> list[Slice]:
    """Each matrix in four blocks, each vector in two, in reverse."""
    pieces = []
    for whole in slices:
        blocks = [((0,) * len(whole.shape), whole.tensor)]
        for dim, size in enumerate(whole.shape):
            half = size // 3
            blocks = [
                (tuple(o + (at if d == dim else 0) for d, o in enumerate(offset)), part)
                for offset, block in blocks
                for at, part in ((0, block.narrow(dim, 0, half)), (half, block.narrow(dim, half, size - half)))
            ]
        pieces += [Slice(whole.name, whole.shape, offset, block) for offset, block in blocks]
    return pieces[::-1]


@pytest.mark.parametrize("name", ["llama3-biases", "qwen3-tied-bias"])
def test_slices_of_any_cut_load(name: str) -> None:
    source = random_decoder(name, seed=1)
    for make in (list, lambda slices: cut(list(slices))):
        target = random_decoder(name, seed=2)
        load_slices(target, make(serving_slices(source, torch.float32)))
        assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))


def test_serving_slices_are_cast() -> None:
    decoder = random_decoder("qwen2")
    for piece, (name, view) in zip(serving_slices(decoder, torch.bfloat16), hf_views(decoder), strict=True):
        assert piece.name == name and piece.tensor.dtype == torch.bfloat16 and torch.equal(piece.tensor, view.bfloat16())


def without(name: str) -> Callable[[list[Slice]], list[Slice]]:
    return lambda slices: [s for s in slices if s.name != name]


EMBED = "model.embed_tokens.weight"
BROKEN: dict[str, tuple[Callable[[list[Slice]], list[Slice]], str]] = {
    "missing": (without("model.norm.weight"), "missing model.norm.weight"),
    "unexpected": (lambda s: [*s, Slice.whole("model.extra", torch.ones(2))], "unexpected tensor 'model.extra'"),
    "shape": (
        lambda s: [*without("model.norm.weight")(s), Slice.whole("model.norm.weight", torch.ones(31))],
        r"model.norm.weight: shape \[31\] where \[32\]",
    ),
    "twice": (lambda s: [*s, s[0]], f"{EMBED}: elements at .* twice"),
    "overlap": (
        lambda s: [Slice(EMBED, (48, 32), (1, 0), torch.ones(47, 32)), Slice(EMBED, (48, 32), (0, 0), torch.ones(2, 32))],
        "twice",
    ),
    "gap": (lambda s: [Slice(EMBED, (48, 32), (0, 0), torch.ones(47, 32)), *s[1:]], "1504 of its 1536 elements"),
    "outside": (lambda s: [Slice(EMBED, (48, 32), (2, 0), torch.ones(47, 32)), *s[1:]], "outside"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_incomplete_or_contradicting_slices_are_named(case: str) -> None:
    change, message = BROKEN[case]
    decoder = random_decoder("qwen3")
    slices = [Slice.whole(s.name, s.tensor.clone()) for s in serving_slices(decoder, torch.float32)]
    with pytest.raises(ValueError, match=message):
        load_slices(decoder, change(slices))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_folder(random_decoder("qwen3-tied-bias"), tmp_path / "m", tokenizer_from=None, dtype=torch.float32)
    return tmp_path / "m"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = folder / "model.safetensors"
    tensors = {key: value.clone() for key, value in load_file(file).items()}
    file.unlink()
    save_file(change(tensors), file, metadata={"format": "pt"})


def test_a_tied_checkpoint_may_carry_its_head(saved: Path) -> None:
    before = load_folder(saved)
    rewrite(saved, lambda t: t | {"lm_head.weight": t[EMBED].clone(), "model.rotary_emb.inv_freq": torch.ones(4)})
    assert torch.equal(load_folder(saved).embed.weight, before.embed.weight)
    rewrite(saved, lambda t: t | {"lm_head.weight": t[EMBED] + 1})
    with pytest.raises(UnsupportedModel, match="tie_word_embeddings"):
        load_folder(saved)


def test_loading_says_what_is_wrong(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        load_folder(tmp_path / "nowhere")
    rewrite(saved, lambda t: {key: value for key, value in t.items() if "layers.2.mlp.up" not in key})
    with pytest.raises(UnsupportedModel, match=r"missing model\.layers\.2\.mlp\.up_proj\.weight"):
        load_folder(saved)
    rewrite(saved, lambda t: t | {"model.layers.2.mlp.up_proj.weight": torch.ones(56, 32, dtype=torch.int8)})
    with pytest.raises(UnsupportedModel, match=r"up_proj\.weight is torch\.int8"):
        load_folder(saved)
    whole = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnsupportedModel, match="not a readable safetensors file"):
        load_folder(saved)
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="convert"):
        load_folder(saved)
    (saved / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(UnsupportedModel, match=r"gone\.safetensors does not exist"):
        load_folder(saved)


def test_a_loaded_decoder_does_not_depend_on_its_file(saved: Path) -> None:
    decoder = load_folder(saved)
    before = decoder.embed.weight.detach().clone()
    file = saved / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    shutil.rmtree(saved)
    assert torch.equal(decoder.embed.weight, before)


def test_companions_travel(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    character_tokenizer("abc \n").save_pretrained(source)
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "README.md").write_text("stays behind")
    save_folder(random_decoder("qwen2"), out, tokenizer_from=source, dtype=torch.float16)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert not (out / "README.md").exists()
    save_folder(random_decoder("qwen2", seed=5), out, tokenizer_from=out, dtype=torch.float16)  # in place
    assert (out / "chat_template.jinja").exists()
    assert torch.equal(load_folder(out).embed.weight, random_decoder("qwen2", seed=5).embed.weight.half().float())
    with pytest.raises(ValueError, match="no tokenizer files"):
        save_folder(random_decoder("qwen2"), tmp_path / "x", tokenizer_from=tmp_path, dtype=torch.float32)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_nothing_appears_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up in the second shard: the old folder stays whole and nothing is left beside it."""
    out = tmp_path / "m"
    save_folder(random_decoder("llama"), out, tokenizer_from=None, dtype=torch.float32)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    real, calls = hf_weights.save_file, []

    def full_disk(*args: object, **kwargs: object) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(hf_weights, "save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_folder(random_decoder("llama", 1), out, tokenizer_from=None, dtype=torch.float32, max_shard_bytes=8000)
    assert len(calls) == 2
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_the_folder_is_complete_when_its_name_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    real = hf_weights.save_file
    monkeypatch.setattr(hf_weights, "save_file", lambda *a, **k: (seen.append((tmp_path / "m").exists()), real(*a, **k)))
    save_folder(random_decoder("llama"), tmp_path / "m", tokenizer_from=None, dtype=torch.float32, max_shard_bytes=8000)
    assert len(seen) > 2 and not any(seen)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {name for name, _ in hf_views(random_decoder("llama"))}
    for file in set(index["weight_map"].values()):
        assert (tmp_path / "m" / file).stat().st_size < 8000 + 4000


def test_other_peoples_files_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        save_folder(random_decoder("llama"), tmp_path / "home", tokenizer_from=None, dtype=torch.float32)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file"):
        save_folder(random_decoder("llama"), tmp_path / "file", tokenizer_from=None, dtype=torch.float32)
    (tmp_path / "empty").mkdir()
    save_folder(random_decoder("llama"), tmp_path / "empty", tokenizer_from=None, dtype=torch.float32)
    assert load_folder(tmp_path / "empty").arch.family == "llama"


def test_initialise_is_a_function_of_its_seed() -> None:
    arch = Architecture.from_dict(CONFIGS["llama3-biases"])

    def make(seed: int) -> Decoder:
        decoder = hf_weights.empty_decoder(arch)
        decoder.initialise(torch.Generator().manual_seed(seed))
        return decoder

    a, b, c = make(1), make(1), make(2)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.embed.weight, c.embed.weight)
    assert bool((a.layers[0].qkv.bias == 0).all()) and bool((a.norm.weight == 1).all())
