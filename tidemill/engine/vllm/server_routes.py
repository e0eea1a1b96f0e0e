"""The routes of one vLLM server that an engine calls for anything but samples."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from tidemill.core.errors import EngineFailed, PolicyMismatch, StartFailed
from tidemill.core.types import InFlight
from tidemill.core.weight_update import WeightUpdate
from tidemill.engine.remote.http_client import ServerClient

SHORT_S = 60.0  # for calls that the server answers between two steps
LONG_S = 600.0  # for an update, or for the longest reply in flight to end
_PAUSES = {  # vLLM keeps requests in flight and their KV, keeps them and computes their KV anew, or waits for their end
    InFlight.KEEP: "/pause?mode=keep&clear_cache=false",
    InFlight.RECOMPUTE: "/pause?mode=keep&clear_cache=true",
    InFlight.FINISH: "/pause?mode=wait&clear_cache=false",
}
_METRIC = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})? ([-+.\deE]+)$", re.MULTILINE)


class Served(msgspec.Struct):
    """A block of a tensor that one rank computes with, and the sum of its elements (see `models.fingerprint`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    sum: str


class ServerRoutes:
    """Calls of one server, by what they are for."""

    def __init__(self, client: ServerClient) -> None:
        self._client, self.name = client, client.name

    async def health(self) -> None:
        await self._client.look("/health")

    async def model(self) -> tuple[str, int]:
        """(the name that the server gives its model, tokens that a sequence may hold there)."""
        found = (await self._client.look("/v1/models"))["data"][0]
        return found["id"], int(found["max_model_len"])

    async def label(self) -> str:
        """The name of the weights that are served."""
        return (await self._client.look("/weight_info"))["weight_version"]

    async def open_transport(self, transport: str, base_dtype: str = "") -> None:
        """Let each rank make the receiver of a transport. Raises StartFailed where the plug-in is not there.

        base_dtype: updates are adapters, which each rank adds to the weights of the server's model folder with these numbers
        (see `AdapterConfig`); "": updates are whole weights.
        """
        if any(state["broken"] for state in await self._ranks("tidemill_state", SHORT_S)):
            raise StartFailed(f"{self.name} was left in the middle of an update of its weights: start it again")
        body = {"init_info": {"transport": transport, **({"base_dtype": base_dtype} if base_dtype else {})}}
        await self._client.post("/init_weight_transfer_engine", body, SHORT_S)

    async def abort(self, names: Sequence[str]) -> None:
        await self._client.post("/abort_requests", {"request_ids": list(names)}, SHORT_S)

    async def metrics(self) -> Counter[str]:
        """The sums of the server's counters and gauges, by name without `vllm:`."""
        found = Counter[str]()
        for name, value in _METRIC.findall(await self._client.look("/metrics") or ""):
            found[name] += float(value)  # pyright: ignore[reportArgumentType]
        return found

    async def stage(self, update: str) -> list[dict[str, Any]]:
        """Let each rank begin to receive an update; returns how far each one is."""
        return await self._ranks("tidemill_stage", SHORT_S, update)

    async def staged(self) -> list[dict[str, Any]]:
        return await self._ranks("tidemill_staged", SHORT_S)

    async def drop(self) -> None:
        await self._ranks("tidemill_drop", SHORT_S)

    async def hold(self, mode: InFlight) -> None:
        await self._client.post(_PAUSES[mode], None, LONG_S)

    async def resume(self) -> None:
        await self._client.post("/resume", None, SHORT_S)

    async def load(self, update: str, label: str) -> None:
        """Load the update that every rank has staged, and call it `label`."""
        await self._client.post("/start_weight_update", None, SHORT_S)
        await self._client.post("/update_weights", {"update_info": {"update": update}}, LONG_S)
        await self._client.post("/finish_weight_update", {"weight_version": label}, SHORT_S)

    async def served(self) -> list[Served]:
        """The blocks that the ranks compute with."""
        ranks = await self._ranks("tidemill_served", LONG_S)
        return [msgspec.convert(block, Served) for rank in ranks for block in rank]

    async def _ranks(self, method: str, deadline_s: float, *args: str) -> list[Any]:
        reply = await self._client.post("/collective_rpc", {"method": method, "args": list(args)}, deadline_s)
        if not isinstance(reply, dict) or not isinstance(reply.get("results"), list):
            raise EngineFailed(f"{self.name} answered {method} with no results: {str(reply)[:200]}")
        return reply["results"]


def as_text(update: WeightUpdate) -> str:
    return msgspec.json.encode(update).decode()


def served_sums(blocks: Sequence[Served], server: str) -> dict[str, int]:
    """The sum of each tensor over all ranks, which holds every element once.

    Ranks may hold the same block, and so may a table and its product; their sums must then be equal. Raises PolicyMismatch
    if they are not, or if elements are missing.
    """
    places, shapes = dict[tuple[str, tuple[int, ...], tuple[int, ...]], int](), dict[str, tuple[int, ...]]()
    for block in blocks:
        place, total = (block.name, block.offset, block.size), int(block.sum)
        if places.setdefault(place, total) != total:
            raise PolicyMismatch(f"{server} computes with two different copies of {block.name}")
        shapes[block.name] = block.shape
    sums, elements = Counter[str](), Counter[str]()
    for (name, _, size), total in places.items():
        sums[name] += total
        elements[name] += math.prod(size)
    for name, shape in shapes.items():
        if elements[name] != math.prod(shape):
            raise PolicyMismatch(f"{server} computes with {elements[name]} of the {math.prod(shape)} elements of {name}")
    return {name: total % 2**64 for name, total in sums.items()}
