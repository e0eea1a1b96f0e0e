"""An update that this rank receives and verifies in a thread, while the server goes on decoding.

Nothing here touches what is served. What was received is copied, because a transport's tensors may be views of memory that
another version overwrites, and vLLM keeps the tensors of a layer until it has all of them. The fingerprint is that of the
copies.
"""

from __future__ import annotations

import threading

from torch import Tensor

from tidemill.core.errors import BaseMissing, TransferFailed
from tidemill.core.weight_update import WeightUpdate
from tidemill.models.fingerprint import Fingerprint
from tidemill.models.weight_slices import Receiver, Slice, whole_tensors


class ReceivedUpdate:
    """One update on its way: `wait`, then `error`, or `tensors` and `sums`."""

    def __init__(self, update: WeightUpdate, receiver: Receiver) -> None:
        """Begin to receive."""
        self.update = update
        self.error = ""  # why it is refused
        self.lost = False  # it did not arrive, so it may be sent again
        self.no_base = False  # it is a change of weights that are not those received last
        self.tensors: dict[str, Tensor] = {}  # whole, by Hugging Face name
        self.sums: dict[str, int] = {}  # of each tensor, see `Fingerprint.sums`
        self._receiver = receiver
        self._thread = threading.Thread(target=self._receive, name="tidemill-receive", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()  # bounded: by the transport's own deadlines, and by the engine that ends this server

    def _receive(self) -> None:
        try:
            tensors = whole_tensors(self._receiver.receive(self.update))
            total = Fingerprint()
            for name, tensor in tensors.items():
                total.add(Slice.whole(name, tensor))
            found, expected = total.hexdigest(), self.update.version.fingerprint
            if found != expected:
                self.error = f"{self.update.version}: received were weights of the fingerprint {found}, published {expected}"
                return
            self.tensors, self.sums = tensors, total.sums()
        except Exception as error:  # any error is the refusal of this update: the served weights are untouched
            self.error = f"{self.update.version}: {type(error).__name__}: {error}"
            self.lost, self.no_base = isinstance(error, TransferFailed), isinstance(error, BaseMissing)
