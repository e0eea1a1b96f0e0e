"""How large the KV cache is: what the settings ask for, or a share of what is free."""

from __future__ import annotations

import torch

from tidemill.core.hardware import memory_bytes
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.models.architecture import Architecture

SHARE_OF_FREE_MEMORY = {"cpu": 0.25, "cuda": 0.6}  # that the KV cache may take when kv_memory_mb is not given


def device_of(asked: str) -> str:
    """auto: cuda where there is one."""
    return asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def free_memory(device: str) -> int | None:
    """Bytes, now; None for a device that this machine lacks."""
    if device == "cpu":
        return memory_bytes()[1]
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None


def page_bytes(arch: Architecture, page_size: int, dtype: torch.dtype) -> int:
    return arch.layers * arch.kv_heads * page_size * 2 * arch.head_dim * dtype.itemsize


def kv_pages(settings: EngineSettings, arch: Architecture, free: int | None) -> tuple[int, bool]:
    """Pages, the null page included, and whether they are fewer than full contexts of all sequences take. free: bytes; None:
    not known, and as much as is wanted."""
    each = page_bytes(arch, settings.page_size, getattr(torch, settings.dtype))
    wanted = settings.max_sequences * -(-settings.context_of(arch.context) // settings.page_size) + 1
    if settings.kv_memory_mb is not None:
        pages = (settings.kv_memory_mb << 20) // each
    else:
        share = SHARE_OF_FREE_MEMORY[device_of(settings.device)]
        pages = wanted if free is None else min(wanted, int(free * share) // each)
    return pages, pages < wanted
