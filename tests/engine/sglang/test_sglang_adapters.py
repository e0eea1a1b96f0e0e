"""The contract of adapters, kept by the engine of the kind `sglang` over a faithful fake of its server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from adapter_contract import AdapterContract
from contract_base import Reference
from engine.sglang.fake_sglang import running
from engine.sglang.test_sglang_contract import engine_at

from tidemill.core.interfaces import Engine
from tidemill.models.adapter_config import BaseDtype


@pytest.mark.engines
class TestSglangAdapters(AdapterContract):
    url, load = "", "disk"

    @pytest.fixture(autouse=True)
    async def _server(self, model: Reference) -> AsyncIterator[None]:
        async with running(model.folder) as (self.url, _):
            yield

    def make(self, folder: Path, transport: str, base_dtype: BaseDtype) -> Engine:
        return engine_at(self.url, folder, transport, adapter_rank=9, base_dtype=base_dtype, load=self.load)


@pytest.mark.engines
class TestByBroadcast(TestSglangAdapters):
    load = "collective"
