"""The one address that a sandboxed program may reach."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from sandbox_levels import USER

from tidemill.core.errors import ConfigError
from tidemill.sandbox.execution import SandboxedProgram
from tidemill.sandbox.sandbox_pool import Sandbox
from tidemill.sandbox.sandbox_settings import SandboxSettings
from tidemill.sandbox.supervisor_process import reason_against

ASK = """
import socket, sys
end = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=10)
end.sendall(b"question " * 20000 + b"\\n")
end.shutdown(socket.SHUT_WR)
print(sum(len(part) for part in iter(lambda: end.recv(65536), b"")))
"""


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read() * 2)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=1 << 20)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_a_program_reaches_the_address_and_nothing_else(port: int) -> None:
    if why := reason_against("bubblewrap", USER):
        pytest.skip(why)
    other = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    elsewhere = str(other.sockets[0].getsockname()[1])
    settings = SandboxSettings(level="bubblewrap", network=f"127.0.0.1:{port}", seconds=30.0)
    async with Sandbox(settings) as sandbox:
        for _ in range(2):
            done = await sandbox.run(SandboxedProgram(ASK, argv=(str(port),)))
            assert done.stdout == b"360002\n", done.stderr
        two = await asyncio.gather(*(sandbox.run(SandboxedProgram(ASK, argv=(str(port),))) for _ in range(2)))
        assert [each.stdout for each in two] == [b"360002\n"] * 2
        assert b"ConnectionRefusedError" in (await sandbox.run(SandboxedProgram(ASK, argv=(elsewhere,)))).stderr
        udp = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)"
        assert b"PermissionError" in (await sandbox.run(SandboxedProgram(udp))).stderr
        far = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=5)"
        assert b"Network is unreachable" in (await sandbox.run(SandboxedProgram(far))).stderr
    other.close()


async def test_without_namespaces_there_is_no_address(port: int) -> None:
    with pytest.raises(ConfigError, match="needs level 'bubblewrap', not 'landlock'"):
        async with Sandbox(SandboxSettings(level="landlock", network=f"127.0.0.1:{port}")):
            pass


@pytest.mark.parametrize("network", ["127.0.0.1", ":80", "host:port", "host:0", "host:70000"])
def test_an_address_has_a_host_and_a_port(network: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        SandboxSettings(network=network)
