"""Size of the KV cache: the number of pages by the settings and the free memory."""

from __future__ import annotations

import torch

from tidemill.core.hardware import memory_bytes
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.models.architecture import Architecture

SHARE_OF_FREE_MEMORY = {"cpu": 0.25, "cuda": 0.6}  # share for the KV cache if kv_memory_mb is None


def device_of(asked: str) -> str:
    """The device that is meant: for "auto" cuda if there is one, else cpu."""
    return asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def free_memory(device: str) -> int | None:
    """Free bytes on a device now; None if this machine lacks it."""
    if device == "cpu":
        return memory_bytes()[1]
    return torch.cuda.mem_get_info(device)[0] if torch.cuda.is_available() else None


def page_bytes(arch: Architecture, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one KV page over all layers."""
    return arch.layers * arch.kv_heads * page_size * 2 * arch.head_dim * dtype.itemsize


def kv_pages(settings: EngineSettings, arch: Architecture, free: int | None) -> tuple[int, bool]:
    """The number of pages, with the null page, and True if it is short of all sequences' contexts.

    free: free bytes; None: not known, so as many pages as are wanted.
    """
    each = page_bytes(arch, settings.page_size, getattr(torch, settings.dtype))
    wanted = settings.max_sequences * -(-settings.context_of(arch.context) // settings.page_size) + 1
    if settings.kv_memory_mb is not None:
        pages = (settings.kv_memory_mb << 20) // each
    else:
        share = SHARE_OF_FREE_MEMORY[device_of(settings.device)]
        pages = wanted if free is None else min(wanted, int(free * share) // each)
    return pages, pages < wanted


def pages_of(settings: EngineSettings, arch: Architecture, device: str) -> int:
    """KV pages for an engine on `device` now. Raises ValueError for less than two."""
    pages, _ = kv_pages(settings, arch, free_memory(device))
    if pages < 2:
        raise ValueError(
            f"kv_memory_mb={settings.kv_memory_mb}: less than two pages of {settings.page_size} tokens: give the cache more"
        )
    return pages
