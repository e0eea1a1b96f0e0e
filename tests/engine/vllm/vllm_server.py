"""Real vLLM servers for tests, and engines that use them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from contract_base import new_version

from tidemill.core.types import Version
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.remote.http_client import ServerClient
from tidemill.engine.remote.server_command import find_python
from tidemill.engine.remote.server_process import ServerProcess, free_port
from tidemill.engine.vllm.build_vllm_engine import build
from tidemill.engine.vllm.vllm_command import server_command, server_environment
from tidemill.engine.vllm.vllm_engine import VllmEngine
from tidemill.engine.vllm.vllm_settings import BUILD, ENVIRONMENT, VllmSettings
from tidemill.models.adapter_config import BaseDtype
from tidemill.models.architecture import Architecture
from tidemill.runtime.cpu_sharing import Cores
from tidemill.weight_sync.transport import make_receiver

HEAD_DIM = 32  # the least that vLLM has on CPUs
START_S = 300.0


@contextmanager
def started(settings: VllmSettings, model: Path, folder: Path) -> Iterator[str]:
    """The address of a server that runs while the context is open, apart from any engine."""
    loop = asyncio.new_event_loop()
    with ThreadPoolExecutor(1) as thread:  # its own: the keepers end a server with the thread that started it
        running = thread.submit(loop.run_until_complete, _serve(settings, model, folder))
        try:
            _, url = running.result(START_S)
            yield url
        finally:
            if running.exception() is None:
                thread.submit(loop.run_until_complete, running.result()[0].close()).result(60)
            loop.close()


async def _serve(settings: VllmSettings, model: Path, folder: Path) -> tuple[ServerProcess, str]:
    port, arch = free_port(), Architecture.from_folder(model)
    command = server_command(
        find_python(settings, ENVIRONMENT, BUILD), settings, model, arch, port=port, name="tested", on_cpu=True
    )
    environment = server_environment(1, settings.tensor_parallel)
    process = ServerProcess(command, name="the tested server", log=folder / "server.log", env=environment)
    url = f"http://127.0.0.1:{port}"
    client = ServerClient(url, name="the tested server")
    try:
        await process.healthy(lambda: client.get("/health", 10), START_S)
    except BaseException:
        await process.close()
        raise
    finally:
        await client.close()
    return process, url


def engine_at(
    url: str,
    folder: Path,
    transport: str = "shared_memory",
    adapter_rank: int = 0,
    base_dtype: BaseDtype = "float32",
    **settings: object,
) -> VllmEngine:
    """An engine of the server at `url`, which serves the folder's weights as version 0 from now on."""

    async def set_back() -> None:
        plain = EngineSpec(model=folder, engine=VllmSettings(url=url), transport="shared_memory")
        engine = build(plain, make_receiver("shared_memory"), Cores())
        try:
            async with new_version(folder, folder / "scratch", 0) as update:
                await engine.update(update)
        finally:
            await engine.close()

    chosen = VllmSettings.model_validate({"url": url, **settings})
    spec = EngineSpec(model=folder, engine=chosen, transport=transport, adapter_rank=adapter_rank, base_dtype=base_dtype)
    with ThreadPoolExecutor(1) as thread:  # this one's event loop runs already
        thread.submit(asyncio.run, set_back()).result(120)
    engine = build(spec, make_receiver(transport), Cores())
    engine._updates.version = Version(0)  # as if the server had been started with this folder
    return engine
