"""Masks of dropout: their shares and independence, what they depend on, and PEFT's numbers under the same masks."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from model_zoo import logits, random_decoder
from test_lora import SHAPES, TOKENS, of_peft
from torch import Tensor, nn

from tidemill.models import adapter_dropout
from tidemill.models.adapter_config import AdapterConfig
from tidemill.models.adapter_dropout import Dropout, DroppedRows, Dropping, Mask, dropped_product, prefix_hashes
from tidemill.models.adapter_files import load_adapter
from tidemill.models.attention import packed_attention, packed_positions
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import load_folder
from tidemill.models.lora import adapter_blocks, adapters, attach, without

ROWS, COLUMNS = 600, 401
SHARES = [0.003, 0.1, 0.5, 0.9]


def rows_of(tokens: Tensor, seed: int = 1, update: int = 0, wanted: Tensor | None = None) -> DroppedRows:
    return Dropout(seed, update).of(prefix_hashes(tokens.numpy()), wanted)


def kept(share: float, module: str = "model.layers.0.mlp.up_proj", seed: int = 1, update: int = 0) -> Tensor:
    """[ROWS, COLUMNS] float64: 1 where a number is kept."""
    tokens = torch.randint(50, (ROWS,), generator=torch.Generator().manual_seed(0))
    mask = rows_of(tokens, seed, update).mask(module, share, last=False)
    return (mask.drop(torch.ones(ROWS, COLUMNS)) != 0).double()


def adapted(dropout: float, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = random_decoder("qwen3", dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    attach(decoder, AdapterConfig(rank=4, dropout=dropout), generator)
    with torch.no_grad():
        for _, adapter in adapters(decoder):
            for b in adapter.b:
                b.normal_(0.0, 0.2, generator=generator)
    return decoder


def gradient(decoder: Decoder, dropped: DroppedRows | None, **how: object) -> Tensor:
    """All numbers of the gradient of some loss under this dropout."""
    decoder.zero_grad()
    with Dropping(dropped):
        attend = packed_attention([len(TOKENS)], decoder.arch.windows)
        hidden = decoder(TOKENS, packed_positions([len(TOKENS)]), attend, **how)  # type: ignore[arg-type]
    decoder.logits(hidden).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in decoder.parameters() if p.grad is not None])


def mixed(number: int) -> int:
    """SplitMix64's mixing as its authors write it, of 64 bits without a sign."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) % 2**64
    return number ^ (number >> 31)


def test_masks_are_those_of_the_definition() -> None:
    tokens, salt, share, step = [5, 0, 49, 5], 0x0123456789ABCDEF, 0.3, 0x9E3779B97F4A7C15
    total, hashes = 0, list[int]()
    for place, token in enumerate(tokens, 1):
        total = (total + mixed((token + place * step) % 2**64)) % 2**64
        hashes.append(mixed(total))
    found = prefix_hashes(np.array(tokens, np.int32))
    assert [each % 2**64 for each in found.tolist()] == hashes
    x = torch.randn(4, 9)
    expected = torch.zeros(4, 9)
    for row, each in enumerate(hashes):
        for column in range(9):
            number = mixed((mixed(each ^ salt) + column // 2 * step) % 2**64) >> 32 * (column % 2) & 0xFFFFFFFF
            signed = number - 2**32 if number >= 2**31 else number
            if signed >= round(share * 2**32) - 2**31:
                expected[row, column] = x[row, column] / (1 - share)
    torch.testing.assert_close(Mask(found, salt, share).drop(x), expected)
    assert 0 < (expected == 0).sum() < 36


def test_masks_do_not_depend_on_how_many_rows_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = kept(0.4)
    monkeypatch.setattr(adapter_dropout, "PIECE", 7 * COLUMNS)
    assert torch.equal(kept(0.4), whole)


@pytest.mark.parametrize("share", SHARES)
def test_the_share_is_dropped_everywhere(share: float) -> None:
    """In all, and in each row and column as often as by chance: 5 standard deviations are one in 1.7 million."""
    found, spread = kept(share), (share * (1 - share)) ** 0.5
    assert abs(float(found.mean()) - (1 - share)) <= 5 * spread / found.numel() ** 0.5
    for axis, count in ((0, ROWS), (1, COLUMNS)):
        off = (found.mean(axis) - (1 - share)) * count**0.5 / spread
        assert off.abs().max() <= (5 if share > 0.01 else 8), "a row or column is dropped too often, or too seldom"
        assert 0.75 <= off.square().mean() <= 1.3, "rows or columns are too uneven, or too even"


@pytest.mark.parametrize("share", SHARES)
def test_masks_are_independent(share: float) -> None:
    """Of neighbours in a row or column, of both numbers of a hash, of modules, updates and seeds."""
    first = kept(share)
    others = {
        "module": kept(share, "model.layers.0.mlp.gate_proj"),
        "layer": kept(share, "model.layers.1.mlp.up_proj"),
        "update": kept(share, update=1),
        "seed": kept(share, seed=2),
    }
    pairs = {name: (first, other) for name, other in others.items()}
    for step in (1, 2, 3, 64):
        pairs |= {f"column {step}": (first[:, :-step], first[:, step:]), f"row {step}": (first[:-step], first[step:])}
    for name, (one, other) in pairs.items():
        products = (one - (1 - share)) * (other - (1 - share))
        correlation = float(products.mean()) / (share * (1 - share))
        assert abs(correlation) <= 5 / products.numel() ** 0.5, name


def test_a_row_is_known_by_its_tokens_up_to_it() -> None:
    rng = np.random.default_rng(0)
    one = rng.integers(0, 9, 30).astype(np.int32)
    other = one.copy()
    other[12] += 1
    same = prefix_hashes(one) == prefix_hashes(other)
    assert same[:12].all() and not same[12:].any(), "and by nothing after it"
    swapped = one.copy()
    swapped[[3, 4]] = 7, 8
    turned = one.copy()
    turned[[3, 4]] = 8, 7
    assert not (prefix_hashes(swapped) == prefix_hashes(turned))[3:].any()
    prefixes = dict[tuple[int, ...], int]()
    for row in rng.integers(0, 2, (300, 24)):
        for length, each in enumerate(prefix_hashes(row).tolist(), 1):
            assert prefixes.setdefault(tuple(row[:length].tolist()), each) == each
    assert len(set(prefixes.values())) == len(prefixes) > 4000
    assert len({*prefix_hashes(np.zeros(1000, np.int32)).tolist()}) == 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_has_the_gradients_of_its_formula(dtype: torch.dtype) -> None:
    x, a = (torch.randn(size, dtype=dtype, requires_grad=True) for size in ((23, 15), (4, 15)))
    mask = rows_of(TOKENS).mask("a module", 0.4, last=False)
    factors = mask.drop(torch.ones(23, 15, dtype=dtype))
    d = torch.randn(23, 4, dtype=dtype)
    expected = ((x * factors) @ a.T * d).sum()
    found = dropped_product(x, a, mask)
    torch.testing.assert_close((found * d).sum(), expected)
    for own, other in zip(*(torch.autograd.grad(each, (x, a)) for each in ((found * d).sum(), expected)), strict=True):
        torch.testing.assert_close(own, other)
    assert dropped_product(x.detach(), a, mask).requires_grad


def test_autocast_multiplies_in_bfloat16_and_gives_gradients_of_the_operands_dtypes() -> None:
    x, a = torch.randn(23, 64, requires_grad=True), torch.randn(4, 64, requires_grad=True)
    mask = rows_of(TOKENS).mask("a module", 0.4, last=False)
    exact = dropped_product(x, a, mask)
    expected = torch.autograd.grad(exact.square().sum(), (x, a))
    with torch.autocast("cpu", torch.bfloat16):
        found = dropped_product(x, a, mask)
    assert found.dtype == torch.bfloat16 and not torch.equal(found.float(), exact)
    for own, other in zip(torch.autograd.grad(found.float().square().sum(), (x, a)), expected, strict=True):
        assert own.dtype == torch.float32 and (own - other).norm() <= 0.02 * other.norm()


class SameMask(nn.Module):
    """In place of PEFT's `nn.Dropout`: the mask that a module has here."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask.drop(torch.ones_like(x[0]))[None]


@pytest.mark.parametrize("checkpointing", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.runs
def test_logits_and_gradients_are_those_of_peft_under_the_same_masks(
    name: str, checkpointing: float, tmp_path: Path
) -> None:
    """`lora_dropout` of PEFT's folder is the share, and every projection has a mask of its own."""
    theirs = of_peft(name, tmp_path, lora_dropout=0.3)
    decoder = load_folder(tmp_path / "base")
    assert load_adapter(decoder, tmp_path / "adapter").dropout == 0.3
    dropped, replaced = rows_of(TOKENS, update=4), 0
    for key, module in theirs.named_modules():
        if isinstance(getattr(module, "lora_dropout", None), nn.ModuleDict):
            assert isinstance(module.lora_dropout["default"], nn.Dropout)
            mask = dropped.mask(key.removeprefix("base_model.model."), 0.3, last=False)
            module.lora_dropout["default"] = SameMask(mask)
            replaced += 1
    assert replaced == len(list(adapter_blocks(decoder))) // 2

    plain = logits(decoder, TOKENS, [23])
    with Dropping(dropped):
        attend = packed_attention([23], decoder.arch.windows)
        ours = decoder.logits(decoder(TOKENS, packed_positions([23]), attend, checkpointing=checkpointing))
    expected = theirs(input_ids=TOKENS[None], use_cache=False).logits[0]
    assert (ours - expected).abs().max() <= 1e-4 < (ours - plain).abs().max()
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(3))
    (ours * weights).sum().backward()
    (expected * weights).sum().backward()
    found = {key: each.grad for key, each in theirs.named_parameters() if each.grad is not None}
    wanted = {key.removeprefix("base_model.model.").replace(".default", ""): grad for key, grad in found.items()}
    own = {p.data_ptr(): p.grad for p in decoder.parameters() if p.requires_grad}
    for block in adapter_blocks(decoder):
        grad = own[block.tensor.data_ptr()]
        assert (grad - wanted[block.name]).abs().max() <= 1e-4 * max(1.0, wanted[block.name].abs().max()), block.name


@pytest.mark.parametrize("checkpointing", [0.0, 1.0])
def test_rows_that_nothing_is_wanted_of_have_their_masks_all_the_same(checkpointing: float) -> None:
    """The last layer's end computes some rows only, in another order, and one of them twice."""
    decoder, wanted = adapted(0.3, torch.float64), torch.tensor([4, 2, 19, 2, 22])
    attend, places = packed_attention([23], decoder.arch.windows), packed_positions([23])
    with Dropping(rows_of(TOKENS)):
        whole = decoder(TOKENS, places, attend)
    with Dropping(rows_of(TOKENS, wanted=wanted)):
        some = decoder(TOKENS, places, attend, wanted, checkpointing=checkpointing)
    torch.testing.assert_close(some, whole.index_select(0, wanted), rtol=0, atol=1e-12)
    trained = [p for p in decoder.parameters() if p.requires_grad]
    both = (torch.autograd.grad(each.square().sum(), trained) for each in (some, whole.index_select(0, wanted)))
    for own, other in zip(*both, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


def test_recomputed_layers_drop_what_they_dropped() -> None:
    decoder, dropped = adapted(0.3, torch.float64), rows_of(TOKENS)
    expected = gradient(decoder, dropped)
    for checkpointing in (0.5, 1.0):
        torch.testing.assert_close(gradient(decoder, dropped, checkpointing=checkpointing), expected, rtol=1e-9, atol=1e-12)
    assert (gradient(decoder, None, checkpointing=1.0) - expected).norm() > 0.1 * expected.norm()


def test_a_layer_is_recomputed_with_its_masks_in_a_thread_of_autograds() -> None:
    """As on a GPU, whose backward pass has threads of its own."""
    dropped, seen = rows_of(TOKENS), list[DroppedRows | None]()

    def work() -> None:
        seen.append(adapter_dropout.dropped_rows())
        with again:
            seen.append(adapter_dropout.dropped_rows())
        seen.append(adapter_dropout.dropped_rows())

    with Dropping(dropped):
        _, again = adapter_dropout.recomputing()
        assert adapter_dropout.dropped_rows() is dropped
        with Dropping(None):
            assert adapter_dropout.dropped_rows() is None
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert seen == [None, dropped, None] and adapter_dropout.dropped_rows() is None


def test_updates_seeds_and_modules_have_masks_of_their_own() -> None:
    decoder = adapted(0.3, torch.float64)
    found = [gradient(decoder, rows_of(TOKENS, seed, update)) for seed, update in ((1, 0), (1, 1), (2, 0), (1, 0))]
    assert torch.equal(found[0], found[3])
    for one, other in pairwise(found):
        assert (one - other).norm() > 0.1 * one.norm()


def test_nothing_is_dropped_outside_of_a_training_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor by an adapter without dropout, to the bit; its masks are not even asked for."""
    dropping, plain, dropped = adapted(0.3), adapted(0.0), rows_of(TOKENS)
    expected = gradient(plain, None)
    assert not torch.equal(gradient(dropping, dropped), expected)
    with without(dropping), Dropping(dropped), without(plain):
        assert torch.equal(logits(dropping, TOKENS, [23]), logits(plain, TOKENS, [23]))
    monkeypatch.setattr(DroppedRows, "mask", None)
    assert torch.equal(gradient(dropping, None), expected) and torch.equal(gradient(plain, dropped), expected)


@pytest.mark.parametrize("checkpointing", [0.0, 1.0])
@pytest.mark.parametrize("narrow", [False, True])
def test_no_memory_is_kept_for_masks(checkpointing: float, narrow: bool) -> None:
    def kept_by(dropped: DroppedRows | None) -> int:
        decoder, alive = adapted(0.3), dict[int, int]()
        weights = {p.untyped_storage().data_ptr() for p in decoder.parameters()}

        def note(tensor: Tensor) -> Tensor:
            if (place := tensor.untyped_storage().data_ptr()) not in weights:
                alive[place] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), Dropping(dropped):
            attend = packed_attention([23], decoder.arch.windows)
            with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                hidden = decoder(TOKENS, packed_positions([23]), attend, checkpointing=checkpointing)
        return sum(alive.values()) if hidden.requires_grad else 0

    assert 0 < kept_by(rows_of(TOKENS)) <= kept_by(None)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [0.0, 1.0])
def test_a_gpu_drops_what_a_cpu_drops(checkpointing: float) -> None:
    """Where layers are recomputed, autograd's thread for the device does that."""
    x, mask = torch.randn(23, 401), rows_of(TOKENS).mask("a module", 0.4, last=False)
    there = Dropout(1, 0).of(prefix_hashes(TOKENS.numpy()).cuda(), None)
    assert torch.equal(there.mask("a module", 0.4, last=False).drop(x.cuda()).cpu(), mask.drop(x))
    model = adapted(0.3, torch.float64)
    expected = gradient(model, rows_of(TOKENS))
    model = model.cuda()
    with Dropping(there):
        attend = packed_attention([len(TOKENS)], model.arch.windows, "cuda")
        places = packed_positions([len(TOKENS)]).cuda()
        hidden = model(TOKENS.cuda(), places, attend, checkpointing=checkpointing)
    model.zero_grad()
    model.logits(hidden).square().sum().backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
