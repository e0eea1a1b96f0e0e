"""The contract of adapters, kept by a real vLLM server; and one of two ranks, which receive what is sent live."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from adapter_contract import SCALED, AdapterContract, by_peft, decoder_with, through_a_pool, trainer_of
from contract_base import FREE, PROMPT, TOLERANCE, Reference
from vllm_server import HEAD_DIM, engine_at

from tidemill.core.interfaces import Engine
from tidemill.core.types import GenerateRequest
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.vllm.build_vllm_engine import build
from tidemill.engine.vllm.vllm_settings import VllmSettings
from tidemill.models.adapter_config import BaseDtype
from tidemill.runtime.cpu_sharing import Cores
from tidemill.weight_sync.transport import make_receiver

pytestmark = pytest.mark.vllm


class TestVllmAdapters(AdapterContract):
    head_dim = HEAD_DIM
    url = ""

    @pytest.fixture(autouse=True)
    def _server(self, server: str) -> Iterator[None]:
        self.url = server
        yield

    def make(self, folder: Path, transport: str, base_dtype: BaseDtype) -> Engine:
        return engine_at(self.url, folder, transport, adapter_rank=9, base_dtype=base_dtype)


async def test_two_ranks_receive_adapters_and_load_their_parts_of_the_sum(tmp_path: Path) -> None:
    model = Reference.make(tmp_path / "base", 0, HEAD_DIM, tied=True)
    settings = VllmSettings(kv_memory_mb=32, tensor_parallel=2)
    spec = EngineSpec(model=model.folder, engine=settings, transport="collective", adapter_rank=9, logs=tmp_path)
    engine = build(spec, make_receiver("collective"), Cores())
    try:
        for step in (1, 2):
            decoder = decoder_with(model.folder, SCALED, step)
            expected = by_peft(model, decoder, SCALED, tmp_path / f"adapter-{step}")
            trainer = trainer_of(decoder, SCALED, "collective", tmp_path / f"weights-{step}")
            await through_a_pool(trainer, engine, step)
            await trainer.close()
            done = await engine.generate(GenerateRequest(PROMPT, FREE))
            assert [v.step for v in done.sources] == [step]
            np.testing.assert_allclose(done.logprobs, expected.logprobs(PROMPT, done.tokens), atol=TOLERANCE)
            blocks = await engine._routes.served()
            assert {b.shape for b in blocks} != {b.size for b in blocks}, "no rank holds everything"
    finally:
        await engine.close()
