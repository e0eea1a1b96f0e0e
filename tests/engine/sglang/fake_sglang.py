"""A fake SGLang server for tests: its routes over HTTP, on a tiny real model.

Routes, names of fields, status codes and the order of things are those of SGLang 0.5.23 (`entrypoints/http_server.py`,
`managers/io_struct.py`, `managers/tokenizer_manager.py`, `managers/tokenizer_control_mixin.py`,
`managers/scheduler_components/weight_updater.py`, `model_executor/model_runner_components/weight_updater.py`). Its process
group is joined by the same calls of `torch.distributed`. `broken` plants what a server may do wrong.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from engine.remote.http_server import Asked, reply, serving
from engine.sglang.fake_model import FakeModel
from engine.sglang.fake_scheduler import FakeScheduler, Row
from torch.distributed import distributed_c10d as c10d


class FakeSglang:
    """One server; an instance answers requests."""

    def __init__(
        self, folder: Path, *, context: int | None = None, running: int = 8, incremental: bool = True, **flags: bool
    ) -> None:
        model = FakeModel(folder, prefix_cache=not flags.get("disable_radix_cache", False))
        self.context = context or model.positions + 7
        self.scheduler = FakeScheduler(model, self.context, running, incremental)
        self.overlap = flags.get("overlap", False)
        self.broken = set[str]()  # "half": a load fails in its middle; a tensor's name: it is not loaded; "gone"...
        self.bodies = list[tuple[str, dict[str, Any]]]()  # as they came
        self.model, self.session, self.groups = model, False, dict[str, Any]()
        self.rids = set[str]()  # of requests under way, as the tokenizer process knows them
        self._resumed = asyncio.Event()
        self._resumed.set()
        self.running = running

    async def __call__(self, asked: Asked) -> bytes | None:
        path = asked.path.partition("?")[0]
        body = json.loads(asked.body) if asked.body else {}
        self.bodies.append((path, body))
        if "gone" in self.broken:
            return None
        if path == "/generate":
            return await self._generate(body, asked)
        route = getattr(self, "_" + path.strip("/").replace("/", "_"), None)
        return reply({"detail": "Not Found"}, 404) if route is None else await route(body)

    async def _health(self, body: Any) -> bytes:
        return reply(b"")

    async def _server_info(self, body: Any) -> bytes:
        info = {"version": "0.5.23", "disable_overlap_schedule": not self.overlap, "tp_size": 1, "device": "cpu"}
        return reply(info | {"max_req_input_len": self.context - 1 - 5, "max_running_requests": self.running})

    async def _model_info(self, body: Any) -> bytes:
        return reply({"weight_version": self.scheduler.label, "is_generation": True})

    async def _v1_loads(self, body: Any) -> bytes:
        rows, prefilled = self.scheduler.rows, self.scheduler.prefilled
        load = {"num_running_reqs": len(rows), "token_usage": 0.1 * bool(rows), "total_prefill_uncached_tokens": prefilled}
        return reply({"version": "0.5.23", "loads": [load]})

    async def _generate(self, body: dict[str, Any], asked: Asked) -> bytes | None:
        await self._resumed.wait()  # the tokenizer process holds requests while it is paused
        prompt, stream, params = body["input_ids"], body.get("stream", False), body.get("sampling_params") or {}
        if len(prompt) >= self.context - 6:
            told = {"message": f"The input ({len(prompt)} tokens) is longer than the model's context length", "code": 400}
            error = {"error": told | {"type": "invalid_request_error", "retryable": False}}
            lines = f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n".encode()
            return reply(lines, kind="text/event-stream") if stream else reply(error, 400)
        start = body.get("logprob_start_len", -1) if body.get("return_logprob") else -1
        tops = body.get("top_logprobs_num", 0)
        row = Row(body["rid"], prompt, params, body.get("extra_key"), start, tops, stream)
        self.rids.add(row.rid)
        self.scheduler.add(row)
        leaving = asyncio.ensure_future(asked.reader.read(1))
        try:
            return await self._stream(row, asked, leaving) if stream else reply(await row.told.get())
        finally:
            self.rids.discard(row.rid)
            leaving.cancel()
            await asyncio.wait({leaving})

    async def _stream(self, row: Row, asked: Asked, leaving: asyncio.Future[bytes]) -> None:
        asked.writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        while True:
            event = asyncio.ensure_future(row.told.get())
            await asyncio.wait({event, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not event.done():  # the client is gone
                event.cancel()
                self.scheduler.abort(row.rid)
                return
            asked.writer.write(f"data: {json.dumps(event.result())}\n\n".encode())
            await asked.writer.drain()
            if event.result()["meta_info"]["finish_reason"]:
                asked.writer.write(b"data: [DONE]\n\n")
                return

    async def _abort_request(self, body: Any) -> bytes:
        rid, everything = body.get("rid") or "", body.get("abort_all", False)
        if everything or rid in self.rids:  # else it is taken for one that has ended
            self.scheduler.abort(rid, everything)
        return reply(b"")

    async def _pause_generation(self, body: Any) -> bytes:
        self._resumed.clear()
        self.scheduler.pause(body.get("mode", "abort"))
        return reply({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, body: Any) -> bytes:
        self._resumed.set()
        self.scheduler.resume()
        return reply({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_weights_from_disk(self, body: Any) -> bytes:
        if not self.scheduler.paused:
            await self.scheduler.emptied()
        if "half" in self.broken:
            self._load(body["model_path"], half=True)
            return _said(False, "Failed to update weights: it broke off.\nRolling back to original weights.")
        if "dies" in self.broken:
            self._load(body["model_path"], half=True)
            self.broken.add("gone")
            raise ConnectionError("it died in the middle")
        try:
            self._load(body["model_path"])
        except (ValueError, RuntimeError, OSError) as error:
            return _said(False, f"Failed to get weights iterator: {error}.")
        return self._loaded(body, "Succeeded to update model weights.")

    def _load(self, folder: str, half: bool = False) -> None:
        before = {name: tensor.clone() for name, tensor in self.model.parameters.items()}
        self.model.load_folder(Path(folder))
        left = [*before][len(before) // 2 :] if half else [name for name in before if name in self.broken]
        self.model.load((name, before[name]) for name in left)

    def _loaded(self, body: Any, told: str) -> bytes:
        self.scheduler.relabel(body.get("weight_version"))
        if body.get("flush_cache", True) and not self.scheduler.flush():
            return _said(False, "Weights were updated, but the cache was not flushed because requests are still running")
        return _said(True, told)

    async def _init_weights_update_group(self, body: Any) -> bytes:
        self.groups[body["group_name"]] = await asyncio.to_thread(_join, body)
        return _said(True, "Succeeded to initialize custom process group.")

    async def _begin_weight_update(self, body: Any) -> bytes:
        if self.session:
            return _said(False, "a weight-update session is already open; call end_weight_update() first")
        self.session = True
        return _said(True, "Success")

    async def _end_weight_update(self, body: Any) -> bytes:
        if not self.session:
            return _said(False, "no weight-update session is open; call begin_weight_update() first")
        self.session = False
        return _said(True, "Success")

    async def _update_weights_from_distributed(self, body: Any) -> bytes:
        if not self.session:
            return _said(
                False, "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            )
        if "half" in self.broken:
            return _said(False, "Failed to receive weights: it broke off")
        tensors = await asyncio.to_thread(_receive, self.groups[body["group_name"]], body)
        self.model.load((name, tensor) for name, tensor in tensors if name not in self.broken)
        return self._loaded(body, "Succeeded to update parameter online.")

    async def _get_weights_by_name(self, body: Any) -> bytes:
        rows = None if "unread" in self.broken else self.model.first_rows(body["name"], body.get("truncate_size", 100))
        return reply({"error": {"message": "Get parameter by name failed"}}, 400) if rows is None else reply(rows)


def _said(success: bool, message: str) -> bytes:
    return reply({"success": success, "message": message}, 200 if success else 400)


def _join(body: dict[str, Any]) -> Any:
    """`utils.common.init_custom_process_group`, for the one rank of this server."""
    rank, world, name = body["rank_offset"], body["world_size"], body["group_name"]
    address, limit = f"tcp://{body['master_address']}:{body['master_port']}", timedelta(seconds=60)
    store, rank, world = next(c10d.rendezvous(address, rank, world, timeout=limit))
    store.set_timeout(limit)
    store, backend = c10d.PrefixStore(name, store), c10d.Backend(body["backend"])
    group, _ = c10d._new_process_group_helper(world, rank, [], backend, store, group_name=name, timeout=limit)
    c10d._world.pg_group_ranks[group] = {each: each for each in range(world)}
    return group


def _receive(group: Any, body: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """`WeightUpdater.receive_weights_from_distributed`."""
    weights, handles = [], []
    for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
        weight = torch.empty(shape, dtype=getattr(torch, dtype))
        handles.append(torch.distributed.broadcast(weight, src=0, group=group, async_op=True))
        weights.append((name, weight))
    for handle in handles:
        handle.wait()
    return weights


@asynccontextmanager
async def running(folder: Path, port: int = 0, **more: Any) -> AsyncIterator[tuple[str, FakeSglang]]:
    """(address, server) of a fake server in this event loop."""
    fake = FakeSglang(folder, **more)
    scheduling = asyncio.ensure_future(fake.scheduler.run())
    try:
        async with serving(fake, port) as url:
            yield url, fake
    finally:
        scheduling.cancel()
