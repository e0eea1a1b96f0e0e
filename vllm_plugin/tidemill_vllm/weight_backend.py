"""The weight-transfer backend "tidemill": everything is received and verified before the first layer is touched.

    stage (a thread, beside the decoding)  ->  update_weights: reload layer by layer, in one call  ->  audit

An adapter is added to the folder's weights while it is staged; their sum is then loaded and read back as whole weights are.

Between the beginning and the end of vLLM's layerwise reload the layers lie on the meta device, and an error there leaves a
model that cannot be used. So a refusal comes before it and leaves what is served. `broken` says that a reload did not end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import msgspec
import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from tidemill.core.weight_update import WeightUpdate
from tidemill.models.adapted_base import AdaptedBase
from tidemill.models.weight_slices import Receiver
from tidemill.weight_sync.transport import make_receiver
from tidemill_vllm.read_back import ServedBlock, negative_zeros, repack_tied, served_blocks
from tidemill_vllm.received_weights import ReceivedUpdate


@dataclass
class InitInfo(WeightTransferInitInfo):
    transport: str  # whose receiver this rank makes
    base_dtype: str = ""  # updates are adapters of the folder that the server loaded, with these numbers; "": whole weights


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    update: str  # a WeightUpdate as JSON


class TidemillBackend(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives, verifies and loads the updates of one rank."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._receiver: Receiver | None = None
        self._base: Callable[[], AdaptedBase] | None = None  # the frozen weights that adapters are added to
        self._staged: ReceivedUpdate | None = None
        self._zeros: dict[str, torch.Tensor] = {}  # where the served tensors hold -0.0, which no product shows
        self.broken = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        self._receiver = make_receiver(init_info.transport)
        self._base = cache(partial(self._frozen, init_info.base_dtype)) if init_info.base_dtype else None

    def _frozen(self, base_dtype: Any) -> AdaptedBase:
        return AdaptedBase.of_folder(self.model_config.model, base_dtype, self.model_config.dtype)

    def stage(self, update: str) -> None:
        """Begin to receive an update; an earlier one that was not loaded is dropped."""
        if self._receiver is None:
            raise ValueError("no transport was named: init_weight_transfer_engine comes first")
        if self._staged is not None:
            self._staged.wait()  # bounded: as there. A receiver does one thing at a time
        self._staged = ReceivedUpdate(self._own(update), self._receiver, self._base)

    def _own(self, update: str) -> WeightUpdate:
        """An update as this rank takes it."""
        return msgspec.json.decode(update, type=WeightUpdate).for_process(get_tensor_model_parallel_rank())

    def staged(self) -> dict[str, Any]:
        """The state of the update that was begun last, as JSON can hold it."""
        staged = self._staged
        if staged is None:
            return {"state": "none"}
        if not staged.done:
            return {"state": "receiving"}
        if staged.error:
            return {"state": "refused", "error": staged.error, "lost": staged.lost, "no_base": staged.no_base}
        return {"state": "staged", "sums": {name: str(total) for name, total in staged.sums.items()}}

    def drop(self) -> None:
        """Forget the update that was begun last."""
        self._staged = None

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load an update in one call: receive it unless it is staged, verify it, reload the layers."""
        wanted = self.parse_update_info(update_info).update
        if self._staged is None or self._staged.update != self._own(wanted):
            self.stage(wanted)
        assert self._staged is not None
        self._staged.wait()
        if self._staged.error:
            raise ValueError(self._staged.error)
        self._load(self._staged.tensors)
        self._staged = None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        raise NotImplementedError("update_weights does it all")

    def finish_weight_update(self) -> None:
        pass

    @torch.no_grad()
    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        self.broken = True
        expected = {name for name, _ in self.model.named_parameters()}  # now, because a tied head is one with the embedding
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)
            loaded = self.model.load_weights(weights=iter(tensors.items()))
            finalize_layerwise_reload(self.model, self.model_config)
            repack_tied(self.model)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        if isinstance(loaded, set) and (left := expected - loaded):
            raise RuntimeError(f"{min(left)} and {len(left) - 1} more parameters got no weights")
        self._zeros = negative_zeros(tensors)
        self.broken = False

    def served(self) -> list[ServedBlock]:
        """The blocks that this rank computes with: see `read_back`."""
        return served_blocks(self.model, self._zeros)

    def shutdown(self) -> None:
        self._staged = None
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
