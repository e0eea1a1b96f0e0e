"""Forwarder: the one address that a sandboxed program may reach, as a port of its own network.

Like `supervisor` it runs without this package. The network of the sandbox has nothing but its loopback. What connects to the
port there is carried over a UNIX socket, at whose other end the starter connects to the address.
"""

import os
import socket

SOCKET = "/run/tidemill/address"


def listening(port):
    """The socket that the sandbox's programs connect to."""
    end = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    end.bind(("127.0.0.1", port))
    end.listen(128)
    return end


def forked(end):
    """Fork a process that carries connections, until it is killed."""
    if os.fork():
        return
    try:
        carry(end)
    finally:
        os._exit(1)


def carry(end):
    import asyncio  # imported late: few sandboxes have an address

    async def pipe(reader, writer):
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except OSError:
            writer.close()

    async def accepted(reader, writer):
        try:
            others = await asyncio.open_unix_connection(SOCKET)
            await asyncio.gather(pipe(reader, others[1]), pipe(others[0], writer))
        except OSError:
            pass
        writer.close()

    async def serve():
        server = await asyncio.start_server(accepted, sock=end)
        await server.serve_forever()

    asyncio.run(serve())
