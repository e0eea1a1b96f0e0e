"""Tidemill's part of a vLLM server, which vLLM loads as a general plug-in in each of its processes.

weight_backend      the weight-transfer backend "tidemill": verify what was received, then reload layer by layer
received_weights    an update, received and verified beside the decoding
read_back           the weights that this rank computes with, read back
worker_extension    methods of a worker that the server's `/collective_rpc` can call
"""

BACKEND = "tidemill"


def register() -> None:
    """Make the backend known to vLLM. It calls this in every process, perhaps several times."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "tidemill_vllm.weight_backend", "TidemillBackend")
