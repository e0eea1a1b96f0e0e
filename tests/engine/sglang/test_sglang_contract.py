"""The contract of engines, kept by the engine of the kind `sglang` over a faithful fake of its server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from contract_base import Reference
from engine.sglang.fake_sglang import FakeSglang, running
from engine_contract import EngineContract

from tidemill.core.interfaces import Engine
from tidemill.core.types import Version
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.sglang.build_sglang_engine import build
from tidemill.engine.sglang.sglang_engine import SglangEngine
from tidemill.engine.sglang.sglang_settings import SglangSettings
from tidemill.models.adapter_config import BaseDtype
from tidemill.runtime.cpu_sharing import Cores
from tidemill.weight_sync.transport import make_receiver


def engine_at(
    url: str,
    folder: Path,
    transport: str = "shared_memory",
    adapter_rank: int = 0,
    base_dtype: BaseDtype = "float32",
    **settings: object,
) -> SglangEngine:
    """An engine of the server at `url`, which serves the folder's weights as version 0."""
    chosen = SglangSettings.model_validate({"url": url, "max_sequences": 8, **settings})
    spec = EngineSpec(model=folder, engine=chosen, transport=transport, adapter_rank=adapter_rank, base_dtype=base_dtype)
    engine = build(spec, make_receiver(transport), Cores())
    engine._updates.version = Version(0)
    return engine


@pytest.mark.engines
class TestSglangEngine(EngineContract):
    incremental, load = True, "disk"
    url, fake = "", FakeSglang.__new__(FakeSglang)

    @pytest.fixture(autouse=True)
    async def _server(self, models: list[Reference]) -> AsyncIterator[None]:
        async with running(models[0].folder, incremental=self.incremental) as (self.url, self.fake):
            yield

    def make(self, folder: Path) -> Engine:
        return engine_at(self.url, folder, load=self.load)


@pytest.mark.engines
class TestByBroadcast(TestSglangEngine):
    """Weights by a process group, and a server that streams whole replies."""

    incremental, load = False, "collective"
