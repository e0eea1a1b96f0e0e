"""Methods that each worker of the server gets (`--worker-extension-cls`), for `/collective_rpc`."""

from __future__ import annotations

from typing import Any


class TidemillWorker:
    """Mixed into vLLM's worker; arguments and results are what JSON can hold."""

    weight_transfer_engine: Any

    def tidemill_stage(self, update: str) -> dict[str, Any]:
        """Begin to receive an update beside the decoding. A refusal is a result, so that the server goes on."""
        try:
            self.weight_transfer_engine.stage(update)
        except Exception as error:  # any error is the refusal of this update
            return {"state": "refused", "error": f"{type(error).__name__}: {error}"}
        return self.tidemill_staged()

    def tidemill_staged(self) -> dict[str, Any]:
        return self.weight_transfer_engine.staged()

    def tidemill_drop(self) -> None:
        self.weight_transfer_engine.drop()

    def tidemill_state(self) -> dict[str, Any]:
        return {"broken": self.weight_transfer_engine.broken}

    def tidemill_served(self) -> list[dict[str, Any]]:
        """Sums of the blocks that this rank computes with."""
        return [block.report() for block in self.weight_transfer_engine.served()]
