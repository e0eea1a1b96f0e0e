"""An update that this rank receives and verifies in a thread, while the server goes on decoding.

Nothing here touches what is served. What was received is copied, because a transport's tensors may be views of memory that
another version overwrites, and vLLM keeps the tensors of a layer until it has all of them. The fingerprint is that of the
copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from tidemill.core.errors import BaseMissing, PolicyMismatch, TransferFailed
from tidemill.core.weight_update import WeightUpdate
from tidemill.models.adapted_base import AdaptedBase
from tidemill.models.adapter_update import received_adapter
from tidemill.models.fingerprint import Fingerprint
from tidemill.models.weight_slices import Receiver, Slice, whole_tensors


class ReceivedUpdate:
    """One update on its way: `wait`, then `error`, or `tensors` and `sums`."""

    def __init__(self, update: WeightUpdate, receiver: Receiver, base: Callable[[], AdaptedBase] | None = None) -> None:
        """Begin to receive. base: loads the weights that an adapter is added to; None: updates are whole weights."""
        self.update = update
        self.error = ""  # why it is refused
        self.lost = False  # it did not arrive, so it may be sent again
        self.no_base = False  # it is a change of weights that are not those received last
        self.tensors: dict[str, Tensor] = {}  # whole, by Hugging Face name
        self.sums: dict[str, int] = {}  # of each tensor, see `Fingerprint.sums`
        self._receiver, self._base = receiver, base
        self._thread = threading.Thread(target=self._receive, name="tidemill-receive", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()  # bounded: by the transport's own deadlines, and by the engine that ends this server

    def _receive(self) -> None:
        try:
            tensors, total = self._received()
            adapted = self._base is not None
            found, expected = total.hexdigest(), self.update.version.fingerprint
            if found != expected and not adapted:  # an adapter's own fingerprint was compared before it was added
                self.error = f"{self.update.version}: received were weights of the fingerprint {found}, published {expected}"
                return
            self.tensors, self.sums = tensors, total.sums()
        except Exception as error:  # any error is the refusal of this update: the served weights are untouched
            self.error = f"{self.update.version}: {type(error).__name__}: {error}"
            self.lost, self.no_base = isinstance(error, TransferFailed), isinstance(error, BaseMissing)

    def _received(self) -> tuple[dict[str, Tensor], Fingerprint]:
        """All weights of the update, as new tensors, and their fingerprint.

        Raises PolicyMismatch for another adapter than was published.
        """
        pieces = self._receiver.receive(self.update)
        if (self.update.kind == "adapter") != (self._base is not None):
            raise PolicyMismatch(
                f"this server takes {'adapters' if self._base else 'whole weights'}, not a {self.update.kind!r} update"
            )
        if self._base is None:
            tensors, total = whole_tensors(pieces), Fingerprint()
            for name, tensor in tensors.items():
                total.add(Slice.whole(name, tensor))
            return tensors, total
        adapter, base = received_adapter(pieces, self.update, "this rank"), self._base()
        base.expect(self.update, "this rank")
        return base.whole(adapter)
