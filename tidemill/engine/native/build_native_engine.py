"""Builder of the native engine: a model folder and settings in, a running engine out."""

from __future__ import annotations

import torch

from tidemill.engine.engine_kinds import EngineSetup
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.models.hf_weights import load_folder
from tidemill.models.tokenizer import generation_config, stop_ids


def build(settings: EngineSettings, setup: EngineSetup) -> NativeEngine:
    """Load the folder's weights and start the engine."""
    decoder = load_folder(setup.model, dtype=getattr(torch, settings.dtype))
    return NativeEngine(
        decoder,
        settings,
        receiver=setup.receiver,
        version=setup.version,
        name=setup.name,
        eos_ids=stop_ids(None, decoder.arch, generation_config(setup.model)),
        cores=setup.cores,
        cached_versions=setup.cached_versions,
    )
