"""Builder of the native engine: a spec in, a running engine out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from tidemill.api_formats.vocabulary import Vocabulary
from tidemill.core.errors import UnsupportedModel
from tidemill.core.types import Version
from tidemill.engine.engine_kinds import UNPUBLISHED, EngineSpec
from tidemill.engine.native.adapter_staging import SidePolicies
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.models.adapter_update import ReceivedAdapter, adapter_of_folder
from tidemill.models.decoder import Decoder
from tidemill.models.quantised_base import load_served
from tidemill.models.served_weights import Contents
from tidemill.models.tokenizer import generation_config, load_tokenizer, stop_ids
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
        version=_side_by_side(spec) if spec.side_by_side else _of_one(spec, decoder),
        name=spec.name,
        eos_ids=stop_ids(None, decoder.arch, generation_config(spec.model)),
        cores=cores,
        cached_versions=spec.cached_versions,
        spare=not spec.sleeps,
        adapted=spec.adapters,
        spelling=lambda: Vocabulary(load_tokenizer(spec.model)).spelling(decoder.arch.vocab),
    )


def _of_one(spec: EngineSpec, decoder: Decoder) -> Version:
    """The first version of an engine that serves one policy."""
    if not spec.proves:
        return spec.version
    own = Contents.of(decoder, getattr(torch, spec.engine.dtype)).fingerprint
    return replace(spec.version, fingerprint=own)


def _side_by_side(spec: EngineSpec) -> SidePolicies:
    """The policies of an engine that serves several. Raises UnsupportedModel for a frozen one that cannot be served."""
    trained = tuple(replace(UNPUBLISHED, policy=name) for name in spec.policies)
    return SidePolicies(trained, dict(_frozen(name, folder, spec) for name, folder in spec.frozen.items()))


def _frozen(name: str, folder: Path, spec: EngineSpec) -> tuple[Version, ReceivedAdapter]:
    adapter = adapter_of_folder(folder)
    if adapter.config.base_dtype not in ("float32", spec.base_dtype):  # PEFT writes no such thing
        raise UnsupportedModel(
            f"{folder}: its base had matrices in {adapter.config.base_dtype}, and those of this run are in "
            f"{spec.base_dtype}: set trainer.lora.base_dtype to that, or give another adapter as policy {name!r}"
        )
    return Version(0, policy=name, fingerprint=adapter.fingerprint), adapter
