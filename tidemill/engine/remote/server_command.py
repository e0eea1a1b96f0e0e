"""Parts of the command that starts a server: its Python, its options, and checks of both. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

import tidemill
from tidemill.core.errors import ConfigError
from tidemill.engine.remote.server_settings import ServerSettings
from tidemill.models.architecture import Architecture

MIB = 1 << 20
FREE_SHARE = 4  # a KV cache of no given size takes at most one part in so many of the free memory
_WIDTH = {"float32": 4, "bfloat16": 2}


def find_python(settings: ServerSettings, environment: Path, build: str) -> str:
    """The Python that runs the server. Raises ConfigError, and says what to do, if there is none.

    environment: where the kind's own lies, in the working folder or beside the package. build: how to make it.
    """
    kind = settings.kind_name
    if settings.python:
        if not Path(settings.python).is_file():
            raise ConfigError(
                f"engine.python = {settings.python!r} is no file: expected the Python of an environment of engine.kind = "
                f"{kind!r}"
            )
        return str(Path(settings.python).absolute())
    for root in (Path.cwd(), Path(tidemill.__file__).parents[1]):
        if (found := root / environment).is_file():
            return str(found)
    raise ConfigError(f"engine.kind = {kind!r}: there is no {environment}; {build}")


def check_ranks(settings: ServerSettings, arch: Architecture) -> None:
    """Raise ConfigError where the attention heads cannot be dealt out to the server's ranks."""
    if arch.heads % settings.tensor_parallel:
        raise ConfigError(
            f"engine.tensor_parallel = {settings.tensor_parallel}: the model has {arch.heads} attention heads; expected a "
            "divisor of it"
        )


def checked_options(settings: ServerSettings, by_setting: Mapping[str, str], ours: Sequence[str]) -> dict[str, Any]:
    """The user's options with dashes. Raises ConfigError for one that a setting, or the engine itself, decides."""
    found = {name.replace("_", "-").lstrip("-"): value for name, value in settings.options.items()}
    for name in found:
        if name in by_setting:
            raise ConfigError(f"engine.options: {name!r} is set by {by_setting[name]}; set that instead")
        if name in ours:
            raise ConfigError(
                f"engine.options: {name!r} is decided by engine.kind = {settings.kind_name!r} itself; leave it out"
            )
    return found


def arguments(options: Mapping[str, Any], negated: bool = True) -> list[str]:
    """Options as words of a command line. negated: one that is false is said as --no-NAME, else left out."""
    words = list[str]()
    for name, value in options.items():
        if isinstance(value, bool):
            words += [f"--{name}"] if value else [f"--no-{name}"] * negated
        else:
            words += [f"--{name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words


def kv_share(settings: ServerSettings, arch: Architecture, on_cpu: bool, tokens: int, free: int | None = None) -> int | None:
    """Bytes of the KV cache of each rank for so many tokens, or for those that fit; None: the server decides.

    free: bytes of free memory; None: asked of the system.
    """
    if settings.kv_memory_mb is not None:
        return settings.kv_memory_mb * MIB
    if not on_cpu:
        return None
    left = psutil.virtual_memory().available if free is None else free
    return max(MIB, min(tokens * token_bytes(settings, arch), left // FREE_SHARE // settings.tensor_parallel))


def token_bytes(settings: ServerSettings, arch: Architecture) -> int:
    """Bytes that a token takes in the KV cache of each rank."""
    heads = max(1, arch.kv_heads // settings.tensor_parallel)
    return 2 * arch.layers * heads * arch.head_dim * _WIDTH[settings.dtype]
