"""Ways in which an engine gives verified weights to its SGLang server: a folder that it loads.

stage  files are written and read back, beside the decoding        load  the paused server reads them
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from safetensors import safe_open
from safetensors.torch import save_file

from tidemill.core.errors import PolicyMismatch
from tidemill.core.executors import in_thread
from tidemill.core.weight_update import WeightUpdate
from tidemill.engine.sglang.sglang_routes import SglangRoutes
from tidemill.engine.verified_weights import ReceivedWeights
from tidemill.models.fingerprint import fingerprint
from tidemill.models.weight_slices import Slice

FILE = "model.safetensors"
FOLDER = ".tidemill-for-"


class HandOver(Protocol):
    """A way to give weights to a server."""

    async def stage(self, received: ReceivedWeights, update: WeightUpdate) -> None:
        """Do what can be done beside the decoding. Raises PolicyMismatch if they are other weights by then."""
        ...

    async def load(self, label: str, flush: bool) -> None:
        """Have the paused server load what was staged. If this fails, it may serve any mixture."""
        ...

    async def close(self) -> None: ...


class FolderHandOver:
    """Weights as a file that the server reads."""

    def __init__(self, routes: SglangRoutes, folder: Path, engine: str) -> None:
        """folder: where files may lie that the server sees, unless a transport's own folder is shared with it."""
        self._routes, self._root, self._name = routes, folder, f"{FOLDER}{engine}-{secrets.token_hex(4)}"
        self._engine, self._folder = engine, folder / self._name

    async def stage(self, received: ReceivedWeights, update: WeightUpdate) -> None:
        part = update.parts[0]
        self._folder = (Path(part.location).parent if part.transport == "checkpoint" else self._root) / self._name
        await in_thread(self._write, received, update)

    async def load(self, label: str, flush: bool) -> None:
        await self._routes.load_folder(str(self._folder), label, flush)
        await in_thread(shutil.rmtree, self._folder)

    async def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, received: ReceivedWeights, update: WeightUpdate) -> None:
        tensors = received.tensors
        self._folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self._folder / FILE)
        tensors.clear()
        found = fingerprint(_read(self._folder / FILE))
        if found != received.fingerprint:
            raise PolicyMismatch(
                f"engine {self._engine} wrote weights of the fingerprint {found} for its server, as {update.version}, "
                f"expected {received.fingerprint}"
            )


def _read(path: Path) -> Iterator[Slice]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            yield Slice.whole(name, file.get_tensor(name))
