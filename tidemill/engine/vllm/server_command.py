"""The command that starts a vLLM server, and additions to its environment. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

import tidemill
from tidemill.core.errors import ConfigError
from tidemill.engine.vllm.vllm_settings import ENVIRONMENT, VllmSettings
from tidemill.models.architecture import Architecture

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # head sizes of vLLM's attention on CPUs
BLOCK = 128  # tokens of a block of the KV cache on CPUs
PREFILL = 2048  # the fewest prompt tokens of a step on CPUs
MIB = 1 << 20
FREE_SHARE = 4  # a KV cache of no given size takes at most one part in so many of the free memory
_WIDTH = {"float32": 4, "bfloat16": 2}

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


def find_python(settings: VllmSettings) -> str:
    """The Python that runs the server. Raises ConfigError, and says what to do, if there is none."""
    if settings.python:
        if not Path(settings.python).is_file():
            raise ConfigError(
                f"engine.python = {settings.python!r} is no file: expected the Python of an environment that holds vLLM"
            )
        return str(Path(settings.python).absolute())
    for root in (Path.cwd(), Path(tidemill.__file__).parents[1]):
        if (found := root / ENVIRONMENT).is_file():
            return str(found)
    raise ConfigError(
        f"engine.kind = 'vllm': there is no {ENVIRONMENT}; run `make vllm`, which builds that environment, or set "
        "engine.python to the Python of one that holds vLLM and vllm_plugin"
    )


def check_model(settings: VllmSettings, arch: Architecture, on_cpu: bool) -> None:
    """Raise ConfigError for a model that vLLM cannot serve so."""
    if on_cpu and arch.head_dim not in CPU_HEADS:
        known = ", ".join(map(str, CPU_HEADS))
        raise ConfigError(
            f"engine.kind = 'vllm' on CPUs: the model's attention heads have {arch.head_dim} numbers, expected {known}; "
            "take another model, or another kind of engine"
        )
    ranks = settings.tensor_parallel
    if arch.heads % ranks:
        raise ConfigError(
            f"engine.tensor_parallel = {ranks}: the model has {arch.heads} attention heads; expected a divisor of it"
        )


def kv_bytes(settings: VllmSettings, arch: Architecture, on_cpu: bool, free: int | None = None) -> int | None:
    """Bytes of the KV cache of each rank; None: vLLM decides. free: bytes of free memory; None: asked of the system."""
    if settings.kv_memory_mb is not None:
        return settings.kv_memory_mb * MIB
    if not on_cpu:
        return None
    heads = max(1, arch.kv_heads // settings.tensor_parallel)
    token = 2 * arch.layers * heads * arch.head_dim * _WIDTH[settings.dtype]
    blocks = settings.max_sequences * -(-(settings.context_of(arch.context) + 1) // BLOCK) + 1
    left = psutil.virtual_memory().available if free is None else free
    return max(MIB, min(blocks * BLOCK * token, left // FREE_SHARE // settings.tensor_parallel))


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
        **checked_options(settings.options),
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
    return [python, "-m", "vllm.entrypoints.openai.api_server", *_arguments(options)]


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


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The user's options with dashes. Raises ConfigError for one that something else decides."""
    found = {name.replace("_", "-").lstrip("-"): value for name, value in options.items()}
    for name in found:
        if name in _BY_SETTING:
            raise ConfigError(f"engine.options: {name!r} is set by {_BY_SETTING[name]}; set that instead")
        if name in _OURS:
            raise ConfigError(f"engine.options: {name!r} is decided by engine.kind = 'vllm' itself; leave it out")
    return found


def _arguments(options: Mapping[str, Any]) -> list[str]:
    words = list[str]()
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words
