"""Adapters as engines of servers receive them, and as the plug-in of vLLM's ranks does, without a server: sum or refusal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapter_contract import DAMAGE, FOREIGN, PLAIN, SCALED, STORED, Sent, decoder_with, pieces_of, published
from contract_base import Reference
from torch import Tensor

from tidemill.core.errors import PolicyMismatch
from tidemill.core.types import Version
from tidemill.core.weight_update import UpdateSupport, WeightUpdate
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.verified_weights import received_weights
from tidemill.models.adapted_base import AdaptedBase
from tidemill.models.adapter_config import AdapterConfig, BaseDtype
from tidemill.models.adapter_update import base_version
from tidemill.models.fingerprint import Fingerprint, fingerprint
from tidemill.models.hf_weights import hf_views
from tidemill.models.lora import gathered_factors, merged_slices
from tidemill.models.quantised_base import load_served
from tidemill.models.served_weights import Contents
from tidemill.models.weight_slices import Slice
from tidemill.weight_sync.transport import make_receiver

PLUGIN = Path(__file__).parents[2] / "vllm_plugin"
NARROW = replace(PLAIN, base_dtype="int8")
Receive = Callable[[str, AdaptedBase | None, WeightUpdate], dict[str, Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Reference.make(tmp_path_factory.mktemp("base"), 0).folder


def by_engine(transport: str, base: AdaptedBase | None, update: WeightUpdate) -> dict[str, Tensor]:
    receiver = make_receiver(transport)
    try:
        found = received_weights(receiver, update, "engine-0", base)
    finally:
        receiver.close()
    assert found.fingerprint == fingerprint(Slice.whole(name, tensor) for name, tensor in found.tensors.items())
    return found.tensors


def by_plug_in(transport: str, base: AdaptedBase | None, update: WeightUpdate) -> dict[str, Tensor]:
    from tidemill_vllm.received_weights import ReceivedUpdate

    receiver = make_receiver(transport)
    try:
        received = ReceivedUpdate(update, receiver, None if base is None else lambda: base)
        received.wait()
    finally:
        receiver.close()
    if received.error:
        assert not (received.lost or received.no_base or received.tensors), "it would be sent again"
        raise PolicyMismatch(received.error)
    total = Fingerprint()
    for name, tensor in received.tensors.items():
        total.add(Slice.whole(name, tensor))
    assert received.sums == total.sums(), "what is read back is compared with these"
    return received.tensors


@pytest.fixture(params=[by_engine, by_plug_in])
def receive(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Receive:
    monkeypatch.syspath_prepend(str(PLUGIN))
    return request.param


def base_of(folder: Path, base_dtype: BaseDtype = "float32") -> Version:
    return base_version(Contents.of(load_served(folder, base_dtype), torch.float32).fingerprint)


@pytest.mark.parametrize("config", [PLAIN, SCALED, NARROW], ids=["lora", "rslora", "int8"])
@pytest.mark.runs
def test_the_sum_is_that_of_a_merged_model_to_the_bit(
    receive: Receive, folder: Path, tmp_path: Path, config: AdapterConfig
) -> None:
    held, base = AdaptedBase.of_folder(folder, config.base_dtype, torch.float32), base_of(folder, config.base_dtype)
    for step in (1, 2):  # the second one is added to the base, not to the first
        decoder = decoder_with(folder, config, step)
        pieces = pieces_of(decoder, config)
        sent, version = Sent([], [], [], tmp_path), Version(step, fingerprint=fingerprint(pieces))
        with published(sent, version, pieces, base, "shared_memory") as update:
            found = receive("shared_memory", held, update)
        served = (Slice.whole(*view) for view in hf_views(load_served(folder, config.base_dtype)))
        expected = {piece.name: piece.tensor for piece in merged_slices(served, gathered_factors(decoder))}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("transport", STORED)
def test_every_wrong_adapter_is_refused(receive: Receive, folder: Path, tmp_path: Path, transport: str) -> None:
    wide, held, base = replace(PLAIN, rank=6), AdaptedBase.of_folder(folder, "float32", torch.float32), base_of(folder)
    now, before = (pieces_of(decoder_with(folder, PLAIN, seed), PLAIN) for seed in (2, 1))
    sent = Sent(now, before, pieces_of(decoder_with(folder, wide, 2), wide), tmp_path)
    true = Version(2, fingerprint=fingerprint(now))
    wrong = [(why, true, damage(sent), base) for why, damage in DAMAGE.items()]
    for why, foreign in FOREIGN.items():
        pieces = foreign(sent)
        wrong.append((why, Version(2, fingerprint=fingerprint(pieces)), pieces, base))
    wrong += [("another base", true, now, base_of(folder, "nf4")), ("no fingerprint", Version(2), now, base)]
    for why, version, pieces, of in wrong:
        with published(sent, version, pieces, of, transport) as update, pytest.raises(PolicyMismatch):
            receive(transport, held, update)
            pytest.fail(f"{why}: it was taken")
    with published(sent, true, now, base, transport) as update:
        assert receive(transport, held, update)


def test_an_adapter_with_nan_is_refused(receive: Receive, folder: Path, tmp_path: Path) -> None:
    """Its fingerprint is right, as the trainer published it; comparisons with NaN are all false."""
    decoder = decoder_with(folder, PLAIN, 2)
    held, pieces = AdaptedBase.of_folder(folder, "float32", torch.float32), pieces_of(decoder, PLAIN)
    next(piece for piece in pieces if piece.tensor.dtype == torch.float32).tensor.data.view(-1)[0] = float("nan")
    sent, version = Sent(pieces, [], [], tmp_path), Version(2, fingerprint=fingerprint(pieces))
    with (
        published(sent, version, pieces, base_of(folder), "shared_memory") as update,
        pytest.raises(PolicyMismatch, match="not the base's matrix and its adapter's product"),
    ):
        receive("shared_memory", held, update)


def test_a_rank_of_whole_weights_takes_no_adapter(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))
    now = pieces_of(decoder_with(folder, PLAIN, 2), PLAIN)
    sent, version = Sent(now, [], [], tmp_path), Version(2, fingerprint=fingerprint(now))
    with (
        published(sent, version, now, base_of(folder), "shared_memory") as update,
        pytest.raises(PolicyMismatch, match="takes whole weights, not"),
    ):
        by_plug_in("shared_memory", None, update)


def test_an_engine_takes_adapters_or_whole_weights_never_both() -> None:
    carried = UpdateSupport(("full", "delta", "adapter"), several_parts=True)
    spec = EngineSpec(model=Path("x"), engine=EngineSettings())
    assert spec.takes(carried).kinds == ("full", "delta") and not spec.takes(None).kinds
    assert spec.model_copy(update={"adapter_rank": 4}).takes(carried).kinds == ("adapter",)
