"""The contract of engines, kept by a real SGLang server, where .peers/sglang holds one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from contract_base import Reference, new_version
from engine.sglang.test_sglang_contract import engine_at
from engine_contract import EngineContract

from tidemill.core.errors import ConfigError
from tidemill.core.interfaces import Engine
from tidemill.engine.remote.http_client import ServerClient
from tidemill.engine.remote.server_command import find_python
from tidemill.engine.remote.server_process import ServerProcess, free_port
from tidemill.engine.sglang.sglang_command import server_command, server_environment
from tidemill.engine.sglang.sglang_settings import BUILD, ENVIRONMENT, SglangSettings
from tidemill.models.architecture import Architecture

START_S = 300.0
SETTINGS = SglangSettings(device="cpu", max_sequences=8)
HEAD_DIM = 32


@pytest.mark.sglang
class TestRealSglang(EngineContract):
    head_dim = HEAD_DIM

    @pytest.fixture(scope="class")
    def server(self, models: list[Reference], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        """The address of one server for all tests."""
        try:
            python = find_python(SETTINGS, ENVIRONMENT, BUILD)
        except ConfigError as error:
            pytest.skip(str(error))
        model, port = models[0].folder, free_port()
        command = server_command(python, SETTINGS, model, Architecture.from_folder(model), port=port, on_cpu=True)
        log, loop = tmp_path_factory.mktemp("sglang") / "server.log", asyncio.new_event_loop()

        async def start() -> ServerProcess:
            process = ServerProcess(command, name="the tested server", log=log, env=server_environment(1, 1, on_cpu=True))
            client = ServerClient(f"http://127.0.0.1:{port}", name="the tested server")
            try:
                await process.healthy(lambda: client.get("/health", 10), START_S)
            except BaseException:
                await process.close()
                raise
            finally:
                await client.close()
            return process

        with ThreadPoolExecutor(1) as thread:  # its own: the keepers end a server with the thread that started it
            process = thread.submit(loop.run_until_complete, start()).result(START_S + 60)
            try:
                yield f"http://127.0.0.1:{port}"
            finally:
                thread.submit(loop.run_until_complete, process.close()).result(60)
                loop.close()

    @pytest.fixture(autouse=True)
    def _server(self, server: str) -> None:
        self.url = server

    def make(self, folder: Path) -> Engine:
        async def set_back() -> None:
            engine = engine_at(self.url, folder)
            try:
                async with new_version(folder, folder / "scratch", 0) as update:
                    await engine.update(update)
            finally:
                await engine.close()

        with ThreadPoolExecutor(1) as thread:  # this one's event loop runs already
            thread.submit(asyncio.run, set_back()).result(120)
        return engine_at(self.url, folder)
