"""Updates of an SGLang server's weights: the engine receives and verifies them, hands them over, and looks at a sample.

SGLang loads what it is given by name and says nothing of what it left out, so what it serves is not proved: `proof =
"received"`. A sample of rows is read back after each load, where the model can say them; the first rows of other tensors
each time.
"""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

from torch import Tensor

from tidemill.core.errors import PolicyMismatch
from tidemill.core.executors import in_thread
from tidemill.core.types import InFlight
from tidemill.core.weight_update import WeightUpdate
from tidemill.engine.remote.server_updates import ServerUpdater, Updated
from tidemill.engine.sglang.hand_over import HandOver
from tidemill.engine.sglang.sglang_routes import LONG_S, SglangRoutes
from tidemill.engine.verified_weights import received_weights
from tidemill.models.adapted_base import AdaptedBase
from tidemill.models.weight_slices import Receiver

SAMPLED, ROWS = 4, 2  # tensors that are read back after an update, and rows of each
# SGLang finds these within a fused tensor by sizes that not every model has, or has no tensor of their own.
_UNSURE = ("k_proj", "v_proj", "up_proj", "lm_head")
Sample = dict[str, Any]  # the first rows of tensors, by name


class SglangUpdater(ServerUpdater):
    """The version that an SGLang server serves, and its change."""

    def __init__(
        self,
        engine: Updated,
        routes: SglangRoutes,
        receiver: Receiver | None,
        hand_over: HandOver,
        base: AdaptedBase | None = None,
    ) -> None:
        """base: the weights that each version, an adapter, is added to; None: versions are whole weights."""
        super().__init__(engine)
        self._base = base
        self._routes, self._receiver, self._hand_over = routes, receiver, hand_over
        self._updates = 0

    async def _stage(self, update: WeightUpdate) -> Sample:
        assert self._receiver is not None, "an engine without a receiver takes no kind of update"
        received = await in_thread(received_weights, self._receiver, update, self.name, self._base)
        sample = _sample(received.tensors, self._updates)
        await self._hand_over.stage(received, update)
        return sample

    async def _load(self, update: WeightUpdate, staged: Sample, label: str) -> None:
        flush = self._engine.in_flight is not InFlight.KEEP
        with self._span("commit", step=update.version.step):
            await self._hand_over.load(label, flush)
        self._updates += 1
        for name, expected in staged.items():
            found = await self._routes.first_rows(name, ROWS)
            if found is not None and not _holds(found, expected):
                raise PolicyMismatch(f"engine {self.name} serves another {name} than its server was given")

    async def _hold(self, mode: InFlight) -> None:
        if mode is InFlight.FINISH:
            await self._engine.admission.emptied(LONG_S)
        await self._routes.hold(mode)

    async def _resume(self) -> None:
        await self._routes.resume()

    async def close(self) -> None:
        await self._hand_over.close()
        if self._receiver is not None:
            self._receiver.close()


def _sample(tensors: dict[str, Tensor], updates: int) -> Sample:
    """The first rows of some tensors, of others at each update."""
    names = [name for name in sorted(tensors) if not any(part in name for part in _UNSURE)]
    begin = SAMPLED * updates % max(1, len(names))
    return {name: tensors[name][:ROWS].float().tolist() for name in islice(cycle(names), begin, begin + SAMPLED)}


def _holds(found: list[Any], expected: list[Any]) -> bool:
    """True if these are the expected rows. On CPUs SGLang widens some with zeros."""
    if expected and isinstance(expected[0], list):
        return len(found) == len(expected) and all(map(_holds, found, expected))
    return found[: len(expected)] == expected and not any(found[len(expected) :])
