"""The command that starts a vLLM server, and additions to its environment. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidemill.core.errors import ConfigError
from tidemill.engine.remote.server_command import arguments, check_ranks, checked_options, kv_share
from tidemill.engine.vllm.vllm_settings import VllmSettings
from tidemill.models.architecture import Architecture

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # head sizes of vLLM's attention on CPUs
BLOCK = 128  # tokens of a block of the KV cache on CPUs
PREFILL = 2048  # the fewest prompt tokens of a step on CPUs

# The settings, or the engine itself, decide these options.
_BY_SETTING = {
    "dtype": "engine.dtype",
    "max-model-len": "engine.context",
    "max-num-seqs": "engine.max_sequences",
    "kv-cache-memory-bytes": "engine.kv_memory_mb",
    "enable-prefix-caching": "engine.prefix_cache",
    "tensor-parallel-size": "engine.tensor_parallel",
}
_OURS = (
    *(
        "model",
        "served-model-name",
        "host",
        "port",
        "uds",
        "api-key",
        "enable-scale-out",
        "logprobs-mode",
        "generation-config",
    ),
    *(
        "weight-transfer-config",
        "worker-extension-cls",
        "skip-tokenizer-init",
        "enable-prompt-tokens-details",
        "tokens-only",
    ),
    *("data-parallel-size", "pipeline-parallel-size", "quantization", "enable-lora"),
)


def check_model(settings: VllmSettings, arch: Architecture, on_cpu: bool) -> None:
    """Raise ConfigError for a model that vLLM cannot serve so."""
    if on_cpu and arch.head_dim not in CPU_HEADS:
        known = ", ".join(map(str, CPU_HEADS))
        raise ConfigError(
            f"engine.kind = 'vllm' on CPUs: the model's attention heads have {arch.head_dim} numbers, expected {known}; "
            "take another model, or another kind of engine"
        )
    check_ranks(settings, arch)


def kv_bytes(settings: VllmSettings, arch: Architecture, on_cpu: bool, free: int | None = None) -> int | None:
    """Bytes of the KV cache of each rank; None: vLLM decides. free: bytes of free memory; None: asked of the system."""
    blocks = -(-(settings.context_of(arch.context) + 1) // BLOCK)
    most = (settings.max_sequences * blocks + 1) * BLOCK
    return kv_share(settings, arch, on_cpu, most, free)


def server_command(
    python: str, settings: VllmSettings, model: Path, arch: Architecture, *, port: int, name: str, on_cpu: bool
) -> list[str]:
    """The command line. name: what the server calls its model, by which it is told from others."""
    kv, longest = kv_bytes(settings, arch, on_cpu), settings.context_of(arch.context) + 1
    # On CPUs vLLM 0.32 dies of a request with a seed whose prompt is computed in several steps.
    whole = {"enable-chunked-prefill": False, "max-num-batched-tokens": max(PREFILL, longest)} if on_cpu else {}
    options: dict[str, Any] = {
        "enforce-eager": True,  # compiled graphs across an update of the weights were never tried
        "disable-uvicorn-access-log": True,
        **whole,
        **checked_options(settings, _BY_SETTING, _OURS),
        "model": str(model),
        "served-model-name": name,
        "host": "127.0.0.1",
        "port": port,
        "dtype": settings.dtype,
        "max-model-len": longest,  # `score` of a full row samples one token after it
        "max-num-seqs": settings.max_sequences,
        "enable-prefix-caching": settings.prefix_cache,
        "tensor-parallel-size": settings.tensor_parallel,
        "skip-tokenizer-init": True,  # tokens come in, and tokens go out
        "generation-config": "vllm",  # no defaults of the model's folder
        "logprobs-mode": "processed_logprobs",  # of the distribution that is sampled
        "enable-scale-out": True,  # the route for tokens
        "enable-prompt-tokens-details": True,
        "weight-transfer-config": {"backend": "tidemill"},
        "worker-extension-cls": "tidemill_vllm.worker_extension.TidemillWorker",
    }
    if kv is not None:
        options["kv-cache-memory-bytes"] = kv
    return [python, "-m", "vllm.entrypoints.openai.api_server", *arguments(options)]


def server_environment(threads: int, ranks: int) -> dict[str, str]:
    """Additions to the server's environment. threads: of all ranks together."""
    return {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes for pauses, updates and worker methods; it listens on the loopback only
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trainer and engines share the cores
        "OMP_NUM_THREADS": str(max(1, threads // ranks)),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
