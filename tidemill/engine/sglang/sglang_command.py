"""The command that starts an SGLang server, and additions to its environment. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidemill.engine.remote.server_command import arguments, check_ranks, checked_options, kv_share, token_bytes
from tidemill.engine.sglang.sglang_settings import SglangSettings
from tidemill.models.architecture import Architecture

# SGLang refuses a prompt of less than six tokens below its context, and keeps one for the token after the last.
SPARE = 7
_BY_SETTING = {
    "dtype": "engine.dtype",
    "device": "engine.device",
    "context-length": "engine.context",
    "max-running-requests": "engine.max_sequences",
    "max-total-tokens": "engine.kv_memory_mb",
    "disable-radix-cache": "engine.prefix_cache",
    "tp-size": "engine.tensor_parallel",
    "tensor-parallel-size": "engine.tensor_parallel",
}
_OURS = (
    *("model", "model-path", "served-model-name", "host", "port", "api-key", "admin-api-key", "weight-version"),
    *("skip-tokenizer-init", "disable-overlap-schedule", "incremental-streaming-output", "load-format"),
    *("dp-size", "data-parallel-size", "pp-size", "quantization", "enable-lora", "enable-torch-compile"),
)


def kv_bytes(settings: SglangSettings, arch: Architecture, on_cpu: bool, free: int | None = None) -> int | None:
    """Bytes of the KV cache of each rank; None: SGLang decides. free: bytes of free memory; None: asked of the system."""
    most = settings.max_sequences * (settings.context_of(arch.context) + SPARE)
    return kv_share(settings, arch, on_cpu, most, free)


def server_command(
    python: str, settings: SglangSettings, model: Path, arch: Architecture, *, port: int, on_cpu: bool
) -> list[str]:
    """The command line. Raises ConfigError for options that something else decides."""
    check_ranks(settings, arch)
    options: dict[str, Any] = {"grammar-backend": "none"}
    if on_cpu:
        options |= {"attention-backend": "torch_native", "sampling-backend": "pytorch"}
        options |= {"disable-prefill-cuda-graph": True, "disable-decode-cuda-graph": True}
    options |= checked_options(settings, _BY_SETTING, _OURS)
    options |= {
        "model-path": str(model),
        "host": "127.0.0.1",
        "port": port,
        "dtype": settings.dtype,
        "device": "cpu" if on_cpu else "cuda",
        "context-length": settings.context_of(arch.context) + SPARE,
        "max-running-requests": settings.max_sequences,
        "tp-size": settings.tensor_parallel,
        "disable-radix-cache": not settings.prefix_cache,
        "skip-tokenizer-init": True,  # tokens come in, and tokens go out
        "disable-overlap-schedule": True,  # else a token that is under way at an update gets the label of the next weights
        "incremental-streaming-output": True,
    }
    if (size := kv_bytes(settings, arch, on_cpu)) is not None:
        options["max-total-tokens"] = size // token_bytes(settings, arch)
    return [python, "-m", "sglang.launch_server", *arguments(options, negated=False)]


def server_environment(threads: int, ranks: int, on_cpu: bool) -> dict[str, str]:
    """Additions to the server's environment. threads: of all ranks together."""
    return {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for `SPARE`
        "OMP_NUM_THREADS": str(max(1, threads // ranks)),
        "OMP_WAIT_POLICY": "PASSIVE",  # trainer and engines share the cores
    } | ({"SGLANG_USE_CPU_ENGINE": "1"} if on_cpu else {})
