"""Bridge: carries what comes by a UNIX socket to the one address that sandboxed programs may reach."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack, suppress

from tidemill.core.errors import ConfigError

CONNECT_S = 10.0


def address_of(network: str) -> tuple[str, int]:
    """(host, port) of `network`. Raises ConfigError."""
    host, _, port = network.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"sandbox network = {network!r}: expected HOST:PORT, the one address that programs may reach")
    return host.strip("[]"), int(port)


async def bridged(network: str, folder: str, held: ExitStack) -> None:
    """Listen at `address` in a folder, until `held` is closed."""
    host, port = address_of(network)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                others = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError):
            writer.close()
            return
        await asyncio.gather(_pipe(reader, others[1]), _pipe(others[0], writer))
        writer.close()
        others[1].close()

    path = os.path.join(folder, "address")
    server = await asyncio.start_unix_server(carry, path)
    os.chmod(path, 0o666)  # the folder is in this sandbox alone
    held.callback(server.close)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):  # bounded: the sandbox's end closes the connection
            writer.write(data)
            await writer.drain()  # bounded: as above
        writer.write_eof()
