"""Changes that a server's ranks receive: what the plug-in rebuilds, and what the engine makes of a missing base."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tidemill.core.errors import BaseMissing, PolicyMismatch, TransferFailed
from tidemill.core.types import Version
from tidemill.core.weight_update import WeightPart, WeightUpdate
from tidemill.engine.vllm.vllm_updates import VllmUpdater
from tidemill.models.fingerprint import fingerprint
from tidemill.models.weight_slices import Slice
from tidemill.weight_sync.sync_settings import SyncSettings
from tidemill.weight_sync.transport import make_receiver, make_sender

PLUGIN = Path(__file__).parents[3] / "vllm_plugin"


def test_the_plug_in_rebuilds_tensors_and_names_a_missing_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))
    from tidemill_vllm.received_weights import ReceivedUpdate

    sender, receiver = make_sender(SyncSettings(full_every=9), tmp_path), make_receiver("shared_memory")
    tensor, updates, weights = torch.randn(50, 80).bfloat16(), [], []
    for step in range(4):
        tensor = tensor.clone()
        tensor[step, ::7] *= 1.5
        pieces = [Slice.whole("a", tensor)]
        weights.append(tensor)
        updates.append(sender.send(Version(step, fingerprint=fingerprint(pieces)), pieces))  # type: ignore[union-attr]
        if step != 2:  # that one is lost
            got = ReceivedUpdate(updates[-1], receiver)
            got.wait()
            if step < 2:
                assert not got.error and torch.equal(got.tensors["a"], tensor)
    assert [each.kind for each in updates] == ["full", "delta", "delta", "delta"]
    assert got.no_base and not got.lost and not got.tensors and "BaseMissing" in got.error
    whole = ReceivedUpdate(sender.send_whole(Version(3)), receiver)  # type: ignore[union-attr]
    whole.wait()
    assert not whole.error and torch.equal(whole.tensors["a"], weights[3])
    sender.close()
    receiver.close()


LOST, NO_BASE = {"state": "refused", "lost": True, "error": "cut"}, {"state": "refused", "no_base": True, "error": "no base"}
OTHER, STAGED = {"state": "refused", "error": "another fingerprint"}, {"state": "staged", "sums": {}}


@pytest.mark.parametrize(
    ("ranks", "raised"),
    [
        ([NO_BASE, NO_BASE], BaseMissing),
        ([LOST, NO_BASE], BaseMissing),  # one rank waited in vain for the other
        ([STAGED, NO_BASE], BaseMissing),
        ([LOST, STAGED], TransferFailed),
        ([NO_BASE, OTHER], PolicyMismatch),
        ([OTHER, LOST], PolicyMismatch),
    ],
)
async def test_a_base_that_a_rank_lacks_is_told_from_other_refusals(ranks: list[Any], raised: type[Exception]) -> None:
    class Routes:
        async def stage(self, update: str) -> list[Any]:
            return ranks

        async def drop(self) -> None:
            pass

    engine: Any = SimpleNamespace(name="engine-0", version=Version(0), takes=None, span=None)
    updater = VllmUpdater(engine, Routes(), 0)  # type: ignore[arg-type]
    update = WeightUpdate(Version(1, fingerprint="f"), (WeightPart("shared_memory", "x"),))
    with pytest.raises(PolicyMismatch if raised is not TransferFailed else TransferFailed) as refused:
        await updater._stage(update)
    assert type(refused.value) is raised
