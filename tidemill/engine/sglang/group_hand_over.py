"""Weights by broadcast: an engine is rank 0 of a process group, and the ranks of its SGLang server are the others.

    join      the server's /init_weights_update_group meets this side's store
    load      begin -> [ the server's call and our broadcasts, at the same time ] per bucket -> end

SGLang takes whole tensors from one rank, so the engine receives and verifies them first, by whichever transport. Its side
makes the group by `torch.distributed`; ours must use the same keys of the store. Gloo carries tensors of CUDA devices, too.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from tidemill.core.errors import EngineFailed, TransferFailed
from tidemill.core.executors import in_thread
from tidemill.core.weight_update import WeightUpdate
from tidemill.engine.sglang.sglang_routes import LONG_S, SHORT_S, SglangRoutes
from tidemill.engine.verified_weights import ReceivedWeights
from tidemill.weight_sync.process_groups import gloo_options, hold

BUCKET = 256 << 20  # bytes that the server holds beside its weights
LOOK_S = 0.002  # between two looks whether a broadcast has ended, or is to be ended


class GroupHandOver:
    """Weights by broadcasts to the ranks of a server."""

    def __init__(self, routes: SglangRoutes, server: tuple[str, int]) -> None:
        """server: its host and port, by which the interface is chosen that it finds this side at."""
        self._routes, self._server, self._name = routes, server, f"tidemill-{secrets.token_hex(4)}"
        self.ranks = 1  # of the server; known once it has started
        self._group: ProcessGroupGloo | None = None
        self._store: TCPStore | None = None
        self._tensors = dict[str, Tensor]()

    async def stage(self, received: ReceivedWeights, update: WeightUpdate) -> None:
        self._tensors = received.tensors
        if self._group is None:
            try:
                await self._join()
            except (RuntimeError, TimeoutError, ValueError) as error:
                raise EngineFailed(f"{self._routes.name} met no process group: {error}") from error

    async def load(self, label: str, flush: bool) -> None:
        assert self._group is not None
        await self._routes.begin()
        buckets = [*_buckets(self._tensors)]
        for bucket in buckets:
            forms: dict[str, list[Any]] = {"names": [*bucket]}
            forms["dtypes"] = [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()]
            forms["shapes"] = [[*tensor.shape] for tensor in bucket.values()]
            last = bucket is buckets[-1]
            receiving = self._routes.receive(forms, self._name, label if last else None, flush and last)
            stop = threading.Event()
            await _together(receiving, in_thread(_broadcast, self._group, [*bucket.values()], stop, stop=stop))
        await self._routes.end()
        self._tensors = {}

    async def close(self) -> None:
        self._group = self._store = None
        self._tensors = {}

    async def _join(self) -> None:
        listening = socket.create_server((_own_address(self._server), 0))
        address, port = listening.getsockname()[:2]
        limit, size = timedelta(seconds=SHORT_S), 1 + self.ranks
        self._store = TCPStore(address, port, None, True, limit, wait_for_workers=False, master_listen_fd=listening.detach())
        # `init_custom_process_group` there: the name by itself, then as `torch.distributed` adds it, and a device
        store = PrefixStore("cpu/", PrefixStore(f"{self._name}/", PrefixStore(self._name, self._store)))
        options = gloo_options(address, limit)
        joining = self._routes.join_group(address, port, size, self._name)
        _, self._group = await _together(joining, in_thread(ProcessGroupGloo, store, 0, size, options))


async def _together(asked: Any, done: Any) -> tuple[Any, Any]:
    """Both results. When one fails, the other is ended, too."""
    both = [asyncio.ensure_future(asked), asyncio.ensure_future(done)]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION, timeout=LONG_S)
        if not all(each.done() for each in both) and not any(each.done() and each.exception() for each in both):
            raise TransferFailed(f"the server did not take part in a broadcast within {LONG_S:g} s")
    finally:
        for each in both:
            each.cancel()
        await asyncio.wait(both, timeout=LONG_S)
    failed = [error for each in both if not each.cancelled() and (error := each.exception()) is not None]
    if failed:
        raise failed[0]
    return both[0].result(), both[1].result()


def _broadcast(group: Any, tensors: list[Tensor], stop: threading.Event) -> None:
    options = BroadcastOptions()
    options.rootRank = 0
    works = [group.broadcast([tensor], options) for tensor in tensors]
    for work in works:
        while not work.is_completed():
            if stop.wait(LOOK_S):
                hold(group, works)
                return
        work.wait(timedelta(seconds=LONG_S))  # it is completed; this raises its error


def _buckets(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    held, size = dict[str, Tensor](), 0
    for name, tensor in tensors.items():
        if held and size + tensor.nbytes > BUCKET:
            yield held
            held, size = {}, 0
        held[name] = tensor.contiguous()
        size += tensor.nbytes
    if held:
        yield held


def _own_address(server: tuple[str, int]) -> str:
    """The address of this machine that a server sees."""
    with socket.create_connection(server, timeout=SHORT_S) as connection:
        return connection.getsockname()[0]
