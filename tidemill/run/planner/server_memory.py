"""Estimate of the memory of a vLLM server that an engine starts."""

from __future__ import annotations

from tidemill.engine.vllm.server_command import kv_bytes
from tidemill.engine.vllm.vllm_settings import VllmSettings
from tidemill.models.architecture import Architecture
from tidemill.run.planner.held_memory import ITEM, Held

PROCESS = 470 << 20  # bytes of one process of vLLM 0.32 with its imports, measured on CPUs; there are two beside the ranks


def vllm_memory(
    settings: VllmSettings, arch: Architecture, weights: int, on_cpu: bool, free: int | None, updated: bool
) -> list[Held]:
    """The most memory of one engine. weights: their number. free: bytes, of which the KV cache takes a share at most."""
    if settings.url:
        return []  # it runs already, perhaps elsewhere
    ranks, own = settings.tensor_parallel, ITEM[settings.dtype] * weights
    lower = "engine.dtype = 'bfloat16'" if settings.dtype == "float32" else "a smaller model"
    held = [Held(f"vLLM's {2 + ranks} processes", (2 + ranks) * PROCESS, host=True), Held("weights", own, lower)]
    if updated:
        held.append(Held("the next version, received by each rank", ranks * own, lower, host=True))
    if (kv := kv_bytes(settings, arch, on_cpu, free)) is not None:
        given = settings.kv_memory_mb is not None
        lever = f"a lower engine.kv_memory_mb (now {settings.kv_memory_mb:,})" if given else ""
        held.append(Held("KV cache", ranks * kv, lever, lazy=not given))
    return held
