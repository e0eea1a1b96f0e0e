"""Builder of the native engine: a spec in, a running engine out."""

from __future__ import annotations

import torch

from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.models.quantised_base import load_served
from tidemill.models.tokenizer import generation_config, stop_ids
from tidemill.models.weight_slices import Receiver
from tidemill.runtime.cpu_sharing import Cores


def build(spec: EngineSpec, receiver: Receiver | None, cores: Cores) -> NativeEngine:
    """Load the folder's weights and start the engine."""
    settings = spec.engine
    assert isinstance(settings, EngineSettings)
    decoder = load_served(spec.model, spec.base_dtype, getattr(torch, settings.dtype))
    return NativeEngine(
        decoder,
        settings,
        receiver=receiver,
        version=spec.version,
        name=spec.name,
        eos_ids=stop_ids(None, decoder.arch, generation_config(spec.model)),
        cores=cores,
        cached_versions=spec.cached_versions,
        spare=not spec.sleeps,
        adapted=spec.adapter_rank > 0,
    )
