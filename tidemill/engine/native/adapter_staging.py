"""Staging of the adapters that an engine serves side by side, unmerged, on one frozen base.

    receive -> fingerprint -> the base's fingerprint -> A and B beside those in use     (the commit is the engine's)
    after the commit: the adapters in use are those that were received, and the base is what it was

All of it is done in pieces, between which steps are taken. The base is served as it was loaded, and has neither a spare nor
a copy on the host: a stage takes the memory of one adapter, and the commit gives that of the one before back.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tidemill.core.errors import PolicyMismatch, UnsupportedModel
from tidemill.core.types import Version
from tidemill.core.weight_update import WeightUpdate
from tidemill.engine.native.staged_weights import VersionStaging, Weights, beside, expect_committed, expect_words, serve
from tidemill.models.adapter_update import ReceivedAdapter
from tidemill.models.decoder import Decoder
from tidemill.models.grouped_adapters import PlacedAdapter, attach_grouped, placing
from tidemill.models.piecewise import Work, at_once
from tidemill.models.served_weights import Contents, words_by_matrix
from tidemill.models.weight_slices import LiveReceiver, Receiver


@dataclass(frozen=True, slots=True)
class SidePolicies:
    """Policies that one engine serves side by side, as it starts."""

    trained: tuple[Version, ...]  # of each, the version before its first update: the base alone
    frozen: Mapping[Version, ReceivedAdapter] = field(default_factory=dict[Version, ReceivedAdapter])  # never updated

    @property
    def versions(self) -> list[Version]:
        """The first version of each policy, by its number."""
        return [*self.trained, *self.frozen]

    def serve(self, decoder: Decoder, pack: bool) -> Weights:
        """Prepare the base and the frozen adapters for serving. pack: as for `staged_weights.serve`.

        Raises UnsupportedModel for an adapter that is none of this model.
        """
        adapters = attach_grouped(decoder, len(self.versions))
        for number, (version, adapter) in enumerate(self.frozen.items(), len(self.trained)):
            try:
                adapters = adapters.having(number, at_once(placing(decoder, adapter, version)))
            except PolicyMismatch as error:
                raise UnsupportedModel(f"policy {version.policy!r}: {error}; give the folder of an adapter of it") from None
        # Compiled decoding takes rows through all layers at once, and knows no adapters.
        return replace(serve(decoder, self.versions[0], pack), decoding=None, adapters=adapters)


class AdapterStaging(VersionStaging):
    """Puts the next version of one policy's adapter beside those that are served. One stage at a time."""

    def __init__(self, receiver: Receiver, serving: Weights, numbers: Mapping[str, int], name: str) -> None:
        """numbers: of the policies, by name. name: of the engine."""
        super().__init__(receiver, serving.decoder, ("adapter",), name)
        self._numbers = numbers
        self._base = Contents.of(serving.decoder, serving.decoder.embed.weight.dtype)
        self._words = words_by_matrix(serving.decoder, self._base.words)
        self._staged: PlacedAdapter | None = None  # by the latest stage

    def arrive(self, update: WeightUpdate, serving: Weights, stop: threading.Event) -> None:
        assert isinstance(self._receiver, LiveReceiver)
        self._receive_adapter(self._receiver, update, stop)

    def stage(self, update: WeightUpdate, serving: Weights) -> Work[Weights]:
        assert serving.adapters is not None
        adapter = self._adapter_of(update, self._base)
        yield
        with beside(self._device):
            placed = yield from placing(serving.decoder, adapter, update.version, self._uploads)
        self._staged = placed
        adapters = serving.adapters.having(self._numbers[update.version.policy], placed)
        return replace(serving, version=update.version, adapters=adapters)

    def prove(self, serving: Weights, version: Version) -> Work[None]:
        assert self._staged is not None, "nothing was staged"
        expect_committed(version, self._staged.version, serving.version)
        adapters, number = serving.adapters, self._numbers[version.policy]
        if adapters is None or serving.decoding is not None or not adapters.added_to(serving.decoder):
            raise PolicyMismatch(f"{version} was staged and committed, but steps compute without the adapters")
        present = adapters.by_policy[number]
        if present is None or (present.version, present.fingerprint) != (version, self._staged.fingerprint):
            found = "none" if present is None else present.version.exact
            raise PolicyMismatch(f"{version} was staged and committed, but the adapter that is served is {found}")
        with beside(self._device):
            for adapter in filter(None, adapters.by_policy):  # an update leaves the others as they are
                yield from adapter.verifying()
            yield from expect_words(serving, self._words, version)
