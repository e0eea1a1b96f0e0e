"""The contract of engines, kept by a real vLLM server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_contract import EngineContract
from vllm_server import HEAD_DIM, engine_at

from tidemill.core.interfaces import Engine


@pytest.mark.vllm
class TestVllmEngine(EngineContract):
    head_dim = HEAD_DIM
    url = ""

    @pytest.fixture(autouse=True)
    def _server(self, server: str) -> Iterator[None]:
        self.url = server
        yield

    def make(self, folder: Path) -> Engine:
        return engine_at(self.url, folder)
