"""The routes of one SGLang server that an engine calls for anything but samples (SGLang 0.5.23)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tidemill.core.errors import EngineFailed, StartFailed
from tidemill.core.types import InFlight
from tidemill.engine.remote.http_client import ServerClient

SHORT_S = 60.0  # for calls that the server answers between two steps
LONG_S = 600.0  # for an update
_PAUSES = {InFlight.KEEP: "in_place", InFlight.RECOMPUTE: "retract", InFlight.FINISH: "in_place"}


class SglangRoutes:
    """Calls of one server, by what they are for."""

    def __init__(self, client: ServerClient) -> None:
        self._client, self.name = client, client.name

    async def health(self) -> None:
        await self._client.look("/health")

    async def info(self) -> dict[str, Any]:
        """The server's settings. Raises StartFailed for one whose labels of weights cannot be relied on."""
        found = await self._client.look("/server_info")
        if not isinstance(found, dict) or "max_req_input_len" not in found:
            raise StartFailed(f"{self.name} answered /server_info with no SGLang server's settings: {str(found)[:200]}")
        if not found.get("disable_overlap_schedule"):
            raise StartFailed(
                f"{self.name} schedules steps ahead, so a token that is under way at an update gets the label of the next "
                "weights: start it with --disable-overlap-schedule"
            )
        return found

    async def label(self) -> str:
        """The name of the weights that are served."""
        return (await self._client.look("/model_info"))["weight_version"]

    async def load(self) -> dict[str, Any]:
        """The server's load at this moment."""
        try:
            return (await self._client.look("/v1/loads?include=core"))["loads"][0]
        except (KeyError, IndexError, TypeError):
            return {}

    async def abort(self, names: Sequence[str]) -> None:
        await asyncio.gather(*(self._post("/abort_request", {"rid": name}) for name in names))

    async def clear(self) -> None:
        """End what an engine before this one left: its requests, a pause, and an update in the middle."""
        with suppress(ValueError):  # mostly there is none
            await self._post("/end_weight_update")
        await self._post("/abort_request", {"abort_all": True})
        await self.resume()

    async def hold(self, mode: InFlight) -> None:
        await self._post("/pause_generation", {"mode": _PAUSES[mode]})

    async def resume(self) -> None:
        await self._post("/continue_generation", {"torch_empty_cache": False})

    async def load_folder(self, folder: str, label: str, flush: bool) -> None:
        """Load the weights of a folder, and call them `label`. flush: forget the KV of those before."""
        body = {"model_path": folder, "weight_version": label, "flush_cache": flush, "load_format": "safetensors"}
        await self._post("/update_weights_from_disk", body, LONG_S)

    async def join_group(self, address: str, port: int, size: int, group: str) -> None:
        """Let the server's ranks join a process group, as ranks 1 and up."""
        body = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": size}
        await self._post("/init_weights_update_group", body | {"group_name": group, "backend": "gloo"})

    async def begin(self) -> None:
        await self._post("/begin_weight_update", {})

    async def receive(self, forms: dict[str, list[Any]], group: str, label: str | None, flush: bool) -> None:
        """Let the server receive tensors that rank 0 broadcasts. label: names the weights, with the last of them."""
        body: dict[str, Any] = forms | {"group_name": group, "flush_cache": flush}
        await self._post("/update_weights_from_distributed", body | ({"weight_version": label} if label else {}), LONG_S)

    async def end(self) -> None:
        await self._post("/end_weight_update", {})

    async def first_rows(self, tensor: str, rows: int) -> list[Any] | None:
        """The first rows of a tensor that is served, as float32; None from a server that cannot say."""
        try:
            return await self._post("/get_weights_by_name", {"name": tensor, "truncate_size": rows})
        except ValueError:
            return None

    async def _post(self, path: str, body: dict[str, Any] | None = None, deadline_s: float = SHORT_S) -> Any:
        found = await self._client.post(path, body or {}, deadline_s)
        if isinstance(found, dict) and found.get("success") is False:
            raise EngineFailed(f"{self.name} failed at {path}: {found.get('message')}")
        return found
