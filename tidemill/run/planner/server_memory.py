"""Estimate of the memory of a server that an engine starts."""

from __future__ import annotations

from tidemill.engine.remote.server_settings import ServerSettings
from tidemill.engine.sglang import sglang_command
from tidemill.engine.sglang.sglang_settings import SglangSettings
from tidemill.engine.vllm import vllm_command
from tidemill.engine.vllm.vllm_settings import VllmSettings
from tidemill.models.architecture import Architecture
from tidemill.run.planner.held_memory import ITEM, Held

# Bytes of one process of vLLM 0.32 with its imports, measured on CPUs. Servers of both kinds have two beside the ranks.
PROCESS = 470 << 20


def server_memory(
    settings: ServerSettings,
    arch: Architecture,
    weights: int,
    on_cpu: bool,
    free: int | None,
    updated: bool,
    adapted: bool = False,
) -> list[Held]:
    """The most memory of one engine. weights: their number. free: bytes, of which the KV cache takes a share at most.

    adapted: its versions are adapters of its folder's weights.
    """
    if settings.url:
        return []  # it runs already, perhaps elsewhere
    ranks, own = settings.tensor_parallel, ITEM[settings.dtype] * weights
    lower = "engine.dtype = 'bfloat16'" if settings.dtype == "float32" else "a smaller model"
    held = [Held(f"the server's {2 + ranks} processes", (2 + ranks) * PROCESS, host=True), Held("weights", own, lower)]
    if adapted:
        lever, holders = "trainer.lora.publish = 'merged'", ranks if isinstance(settings, VllmSettings) else 1
        held.append(Held("frozen base, to which adapters are added", holders * own, lever, host=True))
    if updated and isinstance(settings, VllmSettings):
        held.append(Held("the next version, received by each rank", ranks * own, lower, host=True))
    elif updated:
        held.append(Held("the next version, received by the engine", own, lower, host=True))
    if (kv := _kv_bytes(settings, arch, on_cpu, free)) is not None:
        given = settings.kv_memory_mb is not None
        lever = f"a lower engine.kv_memory_mb (now {settings.kv_memory_mb:,})" if given else ""
        held.append(Held("KV cache", ranks * kv, lever, lazy=not given))
    return held


def _kv_bytes(settings: ServerSettings, arch: Architecture, on_cpu: bool, free: int | None) -> int | None:
    if isinstance(settings, VllmSettings):
        return vllm_command.kv_bytes(settings, arch, on_cpu, free)
    assert isinstance(settings, SglangSettings)
    return sglang_command.kv_bytes(settings, arch, on_cpu, free)
