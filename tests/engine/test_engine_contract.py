"""The native engine keeps the contract of engines."""

from __future__ import annotations

from pathlib import Path

from contract_base import EOS
from engine_contract import EngineContract

from tidemill.core.interfaces import Engine
from tidemill.core.types import Version
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.models.hf_weights import load_folder
from tidemill.weight_sync.transport import make_receiver


class TestNativeEngine(EngineContract):
    def make(self, folder: Path) -> Engine:
        return NativeEngine(
            load_folder(folder),
            EngineSettings(device="cpu", max_sequences=8, page_size=4),
            receiver=make_receiver("shared_memory"),
            version=Version(0),
            name="engine-0",
            eos_ids=(EOS,),
        )
