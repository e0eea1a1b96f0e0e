"""The native engine and the one over `transformers` keep the contract of adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapter_contract import AdapterContract
from contract_base import EOS

from tidemill.core.interfaces import Engine
from tidemill.core.types import Version
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.engine.transformers import transformers_engine
from tidemill.engine.transformers.transformers_settings import TransformersSettings
from tidemill.models.adapter_config import BaseDtype
from tidemill.models.quantised_base import load_served
from tidemill.runtime.cpu_sharing import Cores
from tidemill.weight_sync.transport import make_receiver


class TestNativeEngine(AdapterContract):
    def make(self, folder: Path, transport: str, base_dtype: BaseDtype) -> Engine:
        settings = EngineSettings(device="cpu", max_sequences=8, page_size=4)
        return NativeEngine(
            load_served(folder, base_dtype),
            settings,
            receiver=make_receiver(transport),
            version=Version(0),
            name="engine-0",
            eos_ids=(EOS,),
            adapted=True,
        )


@pytest.mark.engines
class TestTransformersEngine(AdapterContract):
    def make(self, folder: Path, transport: str, base_dtype: BaseDtype) -> Engine:
        spec = EngineSpec(
            model=folder,
            engine=TransformersSettings(device="cpu"),
            transport=transport,
            adapter_rank=9,
            base_dtype=base_dtype,
        )
        engine = transformers_engine.build(spec, make_receiver(transport), Cores())
        engine._version = Version(0)
        return engine
