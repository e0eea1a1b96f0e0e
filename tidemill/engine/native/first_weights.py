"""The weights that an engine starts with, and what stages the next ones: of one policy, or of several side by side."""

from __future__ import annotations

import torch

from tidemill.core.types import Version
from tidemill.engine.native.adapter_staging import AdapterStaging, SidePolicies
from tidemill.engine.native.batch_invariant import expect_cpu
from tidemill.engine.native.cache_size import device_of
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.served_versions import ServedVersions
from tidemill.engine.native.staged_weights import Staging, VersionStaging, Weights, serve
from tidemill.models.decoder import Decoder
from tidemill.models.weight_slices import Receiver


def placed(decoder: Decoder, settings: EngineSettings) -> tuple[Decoder, str]:
    """The decoder on the device and in the dtype of an engine's settings, and this device.

    Raises ConfigError for `batch_invariant` on another device than a CPU.
    """
    device = device_of(settings.device)
    if settings.batch_invariant:
        expect_cpu(device)
    return decoder.to(torch.device(device), getattr(torch, settings.dtype)).requires_grad_(False), device


def first_weights(
    decoder: Decoder,
    version: Version | SidePolicies,
    receiver: Receiver | None,
    name: str,
    *,
    pack: bool,
    spare: bool,
    adapted: bool,
    cached_versions: int,
) -> tuple[Weights, VersionStaging | None, ServedVersions]:
    """Prepare a decoder for serving `version`; the staging is None without a receiver. See `NativeEngine`."""
    if isinstance(version, SidePolicies):
        frozen = {each.policy for each in version.frozen}
        weights, served = version.serve(decoder, pack), ServedVersions(version.versions, cached_versions, frozen)
        return weights, None if receiver is None else AdapterStaging(receiver, weights, served.numbers, name), served
    weights, served = serve(decoder, version, pack), ServedVersions([version], cached_versions)
    return weights, None if receiver is None else Staging(receiver, weights, pack, spare, name, adapted), served
