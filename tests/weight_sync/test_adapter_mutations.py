"""Adapters sent alone and broken on purpose: none is served, and no gradient step follows it (I1).

Trainer, engine, pool and transport are real; the mutation sets in with version `SICK`. Beside adapters that are zero, stale,
foreign or swapped, the base is another one, or the engine adds up something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mutation_cases import SICK, STEPS, TRANSPORTS, Steps, assert_nothing_after

from tidemill.core.errors import PolicyMismatch
from tidemill.models import adapted_base
from tidemill.models.adapted_base import AdaptedBase
from tidemill.models.adapter_config import ADAPTER_CONFIG, AdapterConfig
from tidemill.models.adapter_update import config_block
from tidemill.models.decoder import Decoder
from tidemill.models.lora import Factors
from tidemill.models.weight_slices import Slice
from tidemill.trainer import publication

LORA = AdapterConfig(rank=3, alpha=6, targets=("q_proj", "down_proj"))
A0, A1, B0 = (f"model.layers.{i}.self_attn.q_proj.lora_{name}.weight" for i, name in ((0, "A"), (1, "A"), (0, "B")))

Change = Callable[[list[Slice], list[Slice]], list[Slice]]  # (the slices, those of version 0)


def each(names: Iterable[str], change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda now, _: [replace(s, tensor=change(s.tensor.clone())) if s.name in names else s for s in now]


def exchanged(now: list[Slice], _: list[Slice]) -> list[Slice]:
    found = {s.name: s for s in now}
    others = {A0: found[A1].tensor, A1: found[A0].tensor}
    return [replace(s, tensor=others.get(s.name, s.tensor)) for s in now]


CHANGES: dict[str, tuple[Change, str]] = {
    "zero": (lambda now, _: [replace(s, tensor=s.tensor * 0) if "lora_B" in s.name else s for s in now], "fingerprint"),
    "stale": (lambda now, old: old, "fingerprint"),
    "swapped": (exchanged, "fingerprint"),
    "one element": (each((B0,), lambda t: t.index_fill(0, torch.tensor([1]), 0.5)), "fingerprint"),
    "dropped": (lambda now, _: [s for s in now if s.name != B0], "not (all|those).*q_proj.lora_"),
    "another scale": (
        lambda now, _: [
            replace(s, tensor=config_block(replace(LORA, alpha=8)).tensor) if s.name == ADAPTER_CONFIG else s for s in now
        ],
        "fingerprint",
    ),
    "another rank": (each((A0,), lambda t: t[:2]), "not the trainer's: .*q_proj.lora_A"),
}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(tmp_path, monkeypatch)


def across(names: Iterable[str]) -> list[Any]:
    """Every pair with a transport, of which each name's first is in the fast suite."""
    return [
        pytest.param(name, other, marks=[] if (i + j) % len(TRANSPORTS) == 0 else pytest.mark.slow)
        for i, name in enumerate(names)
        for j, other in enumerate(TRANSPORTS)
    ]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_without_a_mutation_all_steps_are_taken(tiny: Steps, transport: str) -> None:
    assert tiny.until(transport, lora=LORA) == STEPS
    assert tiny.served == [0, 1, 2, 3]


@pytest.mark.parametrize(("name", "transport"), across(CHANGES))
def test_an_adapter_that_is_another_one(tiny: Steps, name: str, transport: str) -> None:
    checked, kept = publication.checked, list[Slice]()
    change, told = CHANGES[name]

    def mutated(stream: Iterator[Slice], *own: Any) -> Iterator[Slice]:
        now = list(stream)
        if not kept:
            kept.extend(replace(s, tensor=s.tensor.clone()) for s in now)
        return checked(iter(change(now, kept) if tiny.sick else now), *own)

    tiny.monkeypatch.setattr(publication, "checked", mutated)
    with pytest.raises(PolicyMismatch, match=told):
        tiny.until(transport, lora=LORA)
    assert_nothing_after(tiny)


def test_another_base(tiny: Steps) -> None:
    def other(model: Decoder) -> None:
        model.norm.weight.data[3] += 1

    tiny.engines_model = other
    with pytest.raises(PolicyMismatch, match=r"adapter of a base with fingerprint .*same model folder"):
        tiny.until("shared_memory", lora=LORA)
    assert tiny.applied == 0 and tiny.served == []


def test_a_base_that_changes_in_memory(tiny: Steps) -> None:
    rows = AdaptedBase._rows

    def changed(base: AdaptedBase) -> Iterator[Slice]:
        if tiny.sick:
            base._tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
        return rows(base)

    tiny.monkeypatch.setattr(AdaptedBase, "_rows", changed)
    with pytest.raises(PolicyMismatch, match=r"up_proj.weight of the frozen base has changed"):
        tiny.until("shared_memory", lora=LORA)
    assert_nothing_after(tiny)


SUMS: dict[str, Callable[[Factors, Factors], Factors]] = {
    "nothing": lambda now, old: {},
    "the first adapter": lambda now, old: old,
    "twice": lambda now, old: {name: (a, b, 2 * scale) for name, (a, b, scale) in now.items()},
    "another order": lambda now, old: {name: (a, b.flip(0), scale) for name, (a, b, scale) in now.items()},
}


@pytest.mark.parametrize("name", SUMS)
def test_an_engine_that_adds_something_else(tiny: Steps, name: str) -> None:
    merged_slices, kept = adapted_base.merged_slices, list[Factors]()

    def mutated(slices: Iterable[Slice], factors: Factors) -> Iterator[Slice]:
        if not kept:
            kept.append({each: (a.clone(), b.clone(), scale) for each, (a, b, scale) in factors.items()})
        return merged_slices(slices, SUMS[name](factors, kept[0]) if tiny.sick else factors)

    tiny.monkeypatch.setattr(adapted_base, "merged_slices", mutated)
    with pytest.raises(PolicyMismatch, match="is not the base's matrix and its adapter's product together"):
        tiny.until("shared_memory", lora=LORA)
    assert_nothing_after(tiny)


def test_a_sum_that_is_not_what_was_staged(tiny: Steps) -> None:
    loading = adapted_base.loading

    def mutated(spare: Decoder, slices: Iterator[Slice], *more: Any) -> Any:
        yield from loading(spare, slices, *more)
        if tiny.sick:
            spare.layers[0].o.weight.data[0, 0] += 1  # type: ignore[union-attr,operator,index]

    tiny.monkeypatch.setattr(adapted_base, "loading", mutated)
    with pytest.raises(PolicyMismatch, match=r"o_proj.weight was staged with other numbers"):
        tiny.until("shared_memory", lora=LORA)
    assert_nothing_after(tiny)


def test_the_mutations_set_in_where_they_should() -> None:
    assert 0 < SICK < STEPS
