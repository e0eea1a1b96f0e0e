"""The weights that an engine starts with, and what stages the next ones: of one policy, or of several side by side."""

from __future__ import annotations

from tidemill.core.types import Version
from tidemill.engine.native.adapter_staging import AdapterStaging, SidePolicies
from tidemill.engine.native.served_versions import ServedVersions
from tidemill.engine.native.staged_weights import Staging, VersionStaging, Weights, serve
from tidemill.models.decoder import Decoder
from tidemill.models.weight_slices import Receiver


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
