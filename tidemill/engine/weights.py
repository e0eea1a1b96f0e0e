"""The weights an engine serves, and the staging of the next ones beside them.

    receive -> copy into the spare decoder -> fingerprint what would be served -> compare     (the commit is the engine's)

The fingerprint is taken of the staged decoder, not of what the carrier delivered: it covers the copy as well. Two decoders
take turns, so staging allocates nothing and generation goes on meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tidemill.models.decoder import Decoder
from tidemill.models.fingerprint import fingerprint
from tidemill.models.slices import Receiver, Slice
from tidemill.models.weights import empty_decoder, hf_views, load_slices
from tidemill.protocols import PolicyMismatch
from tidemill.types import Published, Version


@dataclass(slots=True)
class Weights:
    decoder: Decoder
    head: Tensor  # [V, D] float32: a view of the decoder's, or a copy when that is of lower precision
    version: Version


def serve(decoder: Decoder, version: Version) -> Weights:
    return Weights(decoder, decoder.head_weight.detach().float(), version)


def fingerprint_of(decoder: Decoder) -> str:
    return fingerprint(Slice.whole(name, view) for name, view in hf_views(decoder))


class Staging:
    """The spare decoder. One stage at a time; what it returns is served until `retire` gives the old decoder back."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._spare: Decoder | None = None

    def stage(self, published: Published, serving: Weights) -> Weights:
        """Blocking; runs in a thread. Raises PolicyMismatch when the result is not the version that was announced."""
        version = published.version
        if not version.fingerprint:
            raise PolicyMismatch(f"{version} was published without a fingerprint, so it cannot be verified")
        if self._spare is None:
            weight = serving.decoder.embed.weight
            self._spare = empty_decoder(serving.decoder.arch, weight.dtype, weight.device).requires_grad_(False)
        try:
            load_slices(self._spare, self._receiver.receive(published))
        except ValueError as error:
            raise PolicyMismatch(f"{version}: what was received is not this model's weights: {error}") from error
        found = fingerprint_of(self._spare)
        if found != version.fingerprint:
            raise PolicyMismatch(
                f"{version}: announced with fingerprint {version.fingerprint}, received {found}; "
                f"still serving {serving.version}"
            )
        return serve(self._spare, version)

    def retire(self, weights: Weights) -> None:
        """These are served no more: their decoder receives the next version."""
        self._spare = weights.decoder

    def close(self) -> None:
        self._receiver.close()
