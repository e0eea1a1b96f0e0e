"""Adapters of several policies on one decoder: each row has its own one's logits, and what is placed is what came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from model_zoo import CONFIGS, random_decoder
from torch import Tensor

from tidemill.core.errors import PolicyMismatch
from tidemill.core.types import Version
from tidemill.models.adapter_config import AdapterConfig
from tidemill.models.adapter_update import ReceivedAdapter
from tidemill.models.attention import packed_attention, packed_positions
from tidemill.models.decoder import Decoder
from tidemill.models.grouped_adapters import PlacedAdapter, SideAdapters, attach_grouped, placing
from tidemill.models.lora import Adapter, adapter_blocks, adapters, attach, merge
from tidemill.models.piecewise import at_once
from tidemill.models.served_linear import Linear
from tidemill.models.served_weights import Contents

LORA = [
    AdapterConfig(rank=4, alpha=12),
    AdapterConfig(rank=7, alpha=5, rslora=True, targets=("q_proj", "v_proj", "down_proj"), rank_pattern={"v_proj": 2}),
    AdapterConfig(rank=3, alpha=9, targets=("o_proj", "up_proj"), layers=(0, 2)),
]
BASE_ALONE = len(LORA)  # the number of a policy without an adapter
LENGTHS = [5, 1, 9, 3, 7, 4, 6, 2]
POLICIES = [0, 3, 2, 0, 1, 2, 1, 3]  # of these sequences
TOKENS = torch.randint(48, (sum(LENGTHS),), generator=torch.Generator().manual_seed(5))
OF_ROWS = np.repeat(POLICIES, LENGTHS)


def with_adapter(name: str, number: int, dtype: torch.dtype = torch.float32) -> Decoder:
    """The model as a trainer has it; without an adapter for `BASE_ALONE`."""
    decoder, generator = random_decoder(name), torch.Generator().manual_seed(number)
    if number < BASE_ALONE:
        attach(decoder, LORA[number], generator)
        with torch.no_grad():
            for _, adapter in adapters(decoder):
                for b in adapter.b:
                    b.normal_(0.0, 0.15, generator=generator)
    return decoder.to(dtype)


def received(decoder: Decoder, number: int) -> ReceivedAdapter:
    return ReceivedAdapter(LORA[number], {block.name: block.tensor.detach().clone() for block in adapter_blocks(decoder)})


def grouped(name: str, dtype: torch.dtype = torch.float32) -> tuple[Decoder, SideAdapters]:
    """One decoder with all adapters."""
    decoder = random_decoder(name, dtype=dtype)
    side = attach_grouped(decoder, BASE_ALONE + 1)
    for number in range(BASE_ALONE):
        given = received(with_adapter(name, number), number)
        side = side.having(number, at_once(placing(decoder, given, Version(1, policy=str(number)))))
    return decoder, side


@torch.no_grad()
def hidden(decoder: Decoder, wanted: np.ndarray | None = None) -> Tensor:
    attend = packed_attention(LENGTHS, decoder.arch.windows)
    rows = None if wanted is None else torch.from_numpy(wanted)
    return decoder(TOKENS, packed_positions(LENGTHS), attend, rows)


def logits_of(decoder: Decoder, wanted: np.ndarray | None = None) -> Tensor:
    with torch.no_grad():
        return decoder.logits(hidden(decoder, wanted))


@pytest.mark.parametrize("late", [False, True], ids=["all rows", "some rows"])
@pytest.mark.parametrize("name", CONFIGS)
def test_each_row_has_the_logits_of_its_own_policy(name: str, late: bool) -> None:
    """late: the end of the last layer sees some rows only, one of them twice and not in order."""
    decoder, side = grouped(name)
    wanted = np.array([36, 4, 5, 20, 20, 11, 0, 30, 23]) if late else None
    side.begin(OF_ROWS, wanted, torch.from_numpy)
    found = logits_of(decoder, wanted)
    of_rows = OF_ROWS if wanted is None else OF_ROWS[wanted]
    everyone = list[Tensor]()
    for number in range(BASE_ALONE + 1):
        alone = with_adapter(name, number)
        everyone.append(logits_of(alone, wanted))
        rows = torch.from_numpy(of_rows == number)
        assert rows.any()
        torch.testing.assert_close(found[rows], everyone[-1][rows], atol=2e-5, rtol=1e-5)
        if number < BASE_ALONE:
            merge(alone)
            torch.testing.assert_close(found[rows], logits_of(alone, wanted)[rows], atol=1e-4, rtol=1e-5)
    gaps = [(a - b).abs().max() for i, a in enumerate(everyone) for b in everyone[:i]]
    assert min(gaps) > 0.05, "they differ by more than the tolerance"


@pytest.mark.parametrize("number", range(BASE_ALONE + 1))
def test_a_policy_alone_in_a_step_has_the_trainers_bits(number: int) -> None:
    decoder, side = grouped("qwen3")
    side.begin(np.full(len(TOKENS), number), None, torch.from_numpy)
    assert torch.equal(logits_of(decoder), logits_of(with_adapter("qwen3", number)))


def test_no_row_that_is_wanted_is_no_fault() -> None:
    decoder, side = grouped("llama")
    nothing = np.zeros(0, np.int64)
    side.begin(OF_ROWS, nothing, torch.from_numpy)
    assert logits_of(decoder, nothing).shape == (0, decoder.arch.vocab)


def test_rows_of_another_step_are_noticed() -> None:
    decoder, side = grouped("llama")
    side.begin(OF_ROWS[:-1], None, torch.from_numpy)
    with pytest.raises(AssertionError, match="37 rows came to a matrix, and the step has 36"):
        logits_of(decoder)


def test_another_adapter_of_one_policy_leaves_those_in_use_alone() -> None:
    decoder, side = grouped("llama")
    side.begin(OF_ROWS, None, torch.from_numpy)
    before = logits_of(decoder)
    next_one = at_once(placing(decoder, received(with_adapter("llama", 0), 0), Version(2, policy="0")))
    with torch.no_grad():
        for adapter in filter(None, next_one.matrices):
            for b in adapter.b:
                b.mul_(2)
    changed = side.having(0, next_one)
    assert torch.equal(logits_of(decoder), before), "nothing is computed with it before the next step begins"
    changed.begin(OF_ROWS, None, torch.from_numpy)
    after, own = logits_of(decoder), torch.from_numpy(OF_ROWS == 0)
    assert (after[own] - before[own]).abs().max() > 0.05
    assert torch.equal(after[~own], before[~own])
    assert [a is b for a, b in zip(side.by_policy, changed.by_policy, strict=True)] == [False, True, True, True]


def test_the_base_is_what_it_was() -> None:
    """Adapters are no weights of the decoder: its contents, and what a transport would send of it, stay the same."""
    decoder, _ = grouped("qwen2")
    assert Contents.of(decoder, torch.float32) == Contents.of(random_decoder("qwen2"), torch.float32)
    assert not list(adapter_blocks(decoder))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_placed_is_what_was_received_in_the_served_dtype(dtype: torch.dtype) -> None:
    decoder, trainer = random_decoder("llama", dtype=dtype), with_adapter("llama", 1)
    given = received(trainer, 1)
    placed = at_once(placing(decoder, given, Version(1)))
    at_once(placed.verifying())
    assert (placed.fingerprint == given.fingerprint) == (dtype == torch.float32)
    own = [tensor for adapter in filter(None, placed.matrices) for tensor in (*adapter.a, *adapter.b)]
    theirs = [tensor.to(dtype) for _, adapter in adapters(trainer) for tensor in (*adapter.a, *adapter.b)]
    assert len(own) == len(theirs) and all(torch.equal(a, b) for a, b in zip(own, theirs, strict=True))
    assert all(tensor.dtype == dtype and not tensor.requires_grad for tensor in own)


def changed_number(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.view(-1)[3] += 1e-3


def swapped_numbers(tensor: Tensor) -> None:
    with torch.no_grad():
        first = tensor[0].clone()
        tensor[0], tensor[1] = tensor[1], first


@pytest.mark.parametrize("change", [changed_number, swapped_numbers])
@pytest.mark.parametrize("factor", ["a", "b"])
def test_a_number_that_changed_in_memory_is_noticed(factor: str, change: Callable[[Tensor], None]) -> None:
    placed = at_once(placing(random_decoder("llama"), received(with_adapter("llama", 0), 0), Version(4)))
    adapter = placed.matrices[2]
    assert isinstance(adapter, Adapter)
    change(getattr(adapter, factor)[1])
    with pytest.raises(PolicyMismatch, match=r"policy@v4 was staged and committed, but another adapter is served"):
        at_once(placed.verifying())


def test_another_scale_is_noticed() -> None:
    placed = at_once(placing(random_decoder("llama"), received(with_adapter("llama", 0), 0), Version(4)))
    adapter = placed.matrices[0]
    assert isinstance(adapter, Adapter)
    adapter.factors = (*adapter.factors[:2], replace(adapter.factors[2], scale=1.5))
    with pytest.raises(PolicyMismatch, match=r"layers\.0\.self_attn\.v_proj has another rank or scale"):
        at_once(placed.verifying())


WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "NaN": (lambda given: given["model.layers.1.mlp.up_proj.lora_B.weight"][3, 1:2].fill_(torch.nan), "not finite"),
    "infinite": (lambda given: given["model.layers.0.mlp.up_proj.lora_A.weight"][0, 1:2].fill_(-torch.inf), "not finite"),
    "less": (lambda given: given.pop("model.layers.1.mlp.up_proj.lora_B.weight"), "is missing"),
    "more": (lambda given: given.update({"model.layers.7.mlp.up_proj.lora_B.weight": torch.ones(2, 2)}), "belongs to no"),
    "transposed": (
        lambda given: given.update({n: t.T for n, t in given.items() if n.endswith("0.mlp.down_proj.lora_A.weight")}),
        "expected",
    ),
}


@pytest.mark.parametrize("why", WRONG)
def test_what_is_no_adapter_of_this_model_is_refused(why: str) -> None:
    given, (damage, says) = received(with_adapter("llama", 0), 0), WRONG[why]
    damage(given.tensors)
    with pytest.raises(PolicyMismatch, match=says):
        at_once(placing(random_decoder("llama"), given, Version(1)))


def test_a_matrix_that_adds_something_else_is_known() -> None:
    decoder, side = grouped("llama")
    assert side.added_to(decoder)
    down = decoder.layers[1].down
    assert isinstance(down, Linear)
    own, down.adapter = down.adapter, None
    assert not side.added_to(decoder)
    down.adapter = own
    assert side.added_to(decoder)
    other = attach_grouped(random_decoder("llama"), 2)
    assert not other.added_to(decoder)
    attach(decoder, LORA[0])
    assert not side.added_to(decoder)


def test_an_adapter_of_no_matrix_is_none() -> None:
    placed = at_once(placing(random_decoder("llama"), received(with_adapter("llama", 2), 2), Version(1)))
    assert isinstance(placed, PlacedAdapter)
    named = [adapter is not None for adapter in placed.matrices]  # q|k|v, o, gate|up, down of each layer
    assert named == [False, True, True, False, False, False, False, False, False, True, True, False]
