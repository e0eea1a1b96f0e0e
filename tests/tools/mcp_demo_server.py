"""An MCP server as the SDK's quickstart has it, with tools that fail: python mcp_demo_server.py stdio | PORT"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from enum import Enum

import anyio
from mcp.server.mcpserver import MCPServer  # pyright: ignore[reportMissingImports]
from mcp.server.mcpserver.exceptions import ToolError  # pyright: ignore[reportMissingImports]

server = MCPServer("Demo")


class Style(Enum):
    FORMAL = "formal"
    CASUAL = "casual"


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers"""
    return a + b


@server.tool()
def greet(name: str, style: Style = Style.CASUAL) -> str:
    """Greet someone"""
    return f"{'Good day' if style is Style.FORMAL else 'Hi'}, {name}"


@server.tool()
def environment() -> list[str]:
    """Names of the environment's variables"""
    return sorted(os.environ)


@server.tool()
def pid() -> str:
    """The server's process id"""
    return str(os.getpid())


@server.tool()
def child() -> str:
    """Start a process in a session of its own, and tell its id"""
    return str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)


@server.tool()
def fail() -> str:
    """Raise an exception"""
    raise ToolError("no such thing")


@server.tool()
async def wait() -> str:
    """Wait for a minute"""
    await anyio.sleep(60)
    return "done"


@server.tool()
def freeze() -> str:
    """Stop the whole server"""
    os.kill(os.getpid(), signal.SIGSTOP)
    return "thawed"


@server.tool()
def die() -> str:
    """End the server"""
    print("these are my last words", file=sys.stderr, flush=True)
    os._exit(7)


@server.tool()
def write(size: int) -> str:
    """Write much"""
    return "x" * size


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run()
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
