"""Decoders with a base in few bits: the same logits and gradients as on its dequantised numbers, loaded and named alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_zoo import CONFIGS, folder_of, random_decoder, transformers_model
from torch import Tensor

from tidemill.core.errors import UnsupportedModel
from tidemill.models import quantised_linear
from tidemill.models.adapter_config import QUANTISED_BASE, AdapterConfig
from tidemill.models.adapter_files import load_merged, save_adapter
from tidemill.models.attention import packed_attention, packed_positions
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import hf_blocks, hf_views, load_folder, load_slices
from tidemill.models.lora import adapter_blocks, adapters, attach, merge
from tidemill.models.quantised_base import bases, load_quantised, load_served, quantise_base
from tidemill.models.quantised_weights import dequantise, of_base, quantise
from tidemill.models.served_linear import gathering
from tidemill.models.weight_slices import Slice

TOKENS = torch.randint(48, (23,), generator=torch.Generator().manual_seed(7))
SHAPES = ["llama3-biases", "qwen3", "qwen2-upper-window", "mistral-window"]
TARGETS = {"all-linear": "all-linear", "some": ("k_proj", "up_proj")}  # matrices without an adapter are quantised, too


def adapted(decoder: Decoder, targets: str | tuple[str, ...]) -> Decoder:
    attach(decoder, AdapterConfig(rank=3, targets=targets), torch.Generator().manual_seed(2))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, adapter in adapters(decoder):
            for b in adapter.b:
                b.normal_(0.0, 0.2, generator=generator)
    return decoder


def both(shape: str, targets: str, kind: str) -> tuple[Decoder, Decoder]:
    """A decoder that holds its base in few bits, and one with its numbers in float32."""
    narrow, wide = random_decoder(shape), random_decoder(shape)
    quantise_base(narrow, kind)
    load_slices(wide, (Slice.whole(name, view.clone()) for name, view in hf_views(narrow)))
    return adapted(narrow, TARGETS[targets]), adapted(wide, TARGETS[targets])


def passed(decoder: Decoder, checkpointing: float, narrow: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states, and the gradient of their sum of squares by the embedded tokens and by every A and B."""
    inputs: list[Tensor] = []

    def embed(module: torch.nn.Module, given: object, out: Tensor) -> Tensor:
        inputs.append(out.detach().requires_grad_())
        return inputs[0]

    hook = decoder.embed.register_forward_hook(embed)
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        attend, positions = packed_attention([14, 9], decoder.arch.windows), packed_positions([14, 9])
        hidden = decoder(TOKENS, positions, attend, checkpointing=checkpointing)
    hidden.float().square().mean().backward()
    hook.remove()
    grads = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    assert inputs[0].grad is not None
    return hidden.detach(), grads | {"inputs": inputs[0].grad}


@pytest.mark.parametrize("checkpointing", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "targets", "kind"), [(s, t, k) for s in SHAPES for t in TARGETS for k in ("nf4", "int8")])
@pytest.mark.runs
def test_gradients_are_those_of_the_dequantised_base(
    shape: str, targets: str, kind: str, narrow: bool, checkpointing: float
) -> None:
    quantised, plain = both(shape, targets, kind)
    ours, theirs = (passed(each, checkpointing, narrow) for each in (quantised, plain))
    assert (ours[0] - theirs[0]).abs().max() <= 1e-6 * theirs[0].abs().max()
    assert set(ours[1]) == set(theirs[1]) and all(".adapter." in name for name in ours[1] if name != "inputs")
    for name, grad in theirs[1].items():
        assert (ours[1][name] - grad).abs().max() <= 1e-6 * grad.abs().max(), name
    with gathering(quantised):  # as a trainer computes
        again = passed(quantised, checkpointing, narrow)
    assert torch.equal(again[0], ours[0]) and torch.equal(again[1]["inputs"], ours[1]["inputs"])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_matrix_is_made_for_its_own_products_and_let_go(monkeypatch: pytest.MonkeyPatch, checkpointing: bool) -> None:
    decoder, _ = both("qwen3", "all-linear", "nf4")
    made: list[str] = []
    kept: list[tuple[int, ...]] = []
    monkeypatch.setattr(quantised_linear, "dequantise", lambda given: made.append(given.kind) or dequantise(given))

    def note(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        passed(decoder, float(checkpointing), narrow=False)
    assert len(made) == 7 * 3 * (3 if checkpointing else 2), "forward, backward, and forward again where it is recomputed"
    wide = {(base.rows, base.inputs) for base in bases(decoder)}
    assert not wide & set(kept), "no float32 matrix waits for the backward pass"


def test_a_base_is_no_parameter_and_has_the_names_and_shapes_of_the_model() -> None:
    plain, decoder = random_decoder("llama3-biases"), random_decoder("llama3-biases")
    quantise_base(decoder, "nf4")
    names = {name for name, _ in decoder.named_parameters()}
    assert not any(name.endswith((".qkv.weight", ".o.weight", ".gate_up.weight", ".down.weight")) for name in names)
    for expected, view, block in zip(hf_views(plain), hf_views(decoder), hf_blocks(decoder), strict=True):
        name, tensor = expected
        held = dequantise(quantise(tensor, "nf4")) if of_base(name) else tensor
        assert view[0] == block.name == name and block.shape == tuple(tensor.shape) and not any(block.offset)
        assert torch.equal(view[1], held) and torch.equal(block.tensor, held)
    bits = 8 * sum(buffer.nbytes for base in bases(decoder) for buffer in base.buffers())
    assert bits < 4.4 * sum(base.rows * base.inputs for base in bases(decoder))
    before = dict(hf_views(decoder))
    assert all(torch.equal(view, before[name]) for name, view in hf_views(decoder.to("cpu")))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_folder_is_read_into_few_bits(shape: str, kind: str, tmp_path: Path) -> None:
    folder_of(transformers_model(CONFIGS[shape]), tmp_path)
    decoder, expected = load_quantised(tmp_path, kind), load_folder(tmp_path)
    quantise_base(expected, kind)
    served = dict(hf_views(load_served(tmp_path, kind)))
    for (name, ours), (_, theirs) in zip(hf_views(decoder), hf_views(expected), strict=True):
        assert torch.equal(ours, theirs) and torch.equal(ours, served[name]), name
    assert len(list(bases(decoder))) == 12 and not list(bases(load_quantised(tmp_path, "float32")))


def test_the_adapters_folder_says_how_its_base_was_held(tmp_path: Path) -> None:
    folder_of(transformers_model(CONFIGS["qwen3"]), tmp_path / "base")
    config = AdapterConfig(rank=3, base=str(tmp_path / "base"), base_dtype="nf4")
    decoder = adapted(load_quantised(tmp_path / "base", "nf4"), "all-linear")
    (tmp_path / "adapter").mkdir()
    save_adapter({block.name: block.tensor for block in adapter_blocks(decoder)}, config, tmp_path / "adapter")
    assert AdapterConfig.from_folder(tmp_path / "adapter").base_dtype == "nf4"
    expected = adapted(load_served(tmp_path / "base", "nf4"), "all-linear")
    merge(expected)
    for (name, ours), (_, theirs) in zip(hf_views(load_merged(tmp_path / "adapter")), hf_views(expected), strict=True):
        assert torch.equal(ours, theirs), name
    (tmp_path / "adapter" / QUANTISED_BASE).write_text('{"base_dtype": "nf3"}')
    with pytest.raises(UnsupportedModel, match="base_dtype = 'nf3', expected one of float32, nf4, int8"):
        load_merged(tmp_path / "adapter")


def test_peft_reads_that_folder_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    from peft import LoraConfig

    AdapterConfig(rank=3, base="x", base_dtype="nf4").write(tmp_path)
    assert LoraConfig.from_pretrained(str(tmp_path)).to_dict()["r"] == 3
    assert not [each for each in recwarn if "keyword" in str(each.message)]
