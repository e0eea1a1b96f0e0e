"""MCP servers of the SDK's own examples, from its source package: one over stdin and stdout, one over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import os
import socket
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clients.scripted_policy import all_recorded, scripted_policy

from tidemill import McpServer, ToolSet

PAGE = "The answer on this page is 42."
EXAMPLES = {"MCP: simple-tool, stdio": "simple-tool", "MCP: everything-server, HTTP": "everything-server"}


def example_source(python: Path, folder: Path) -> Path:
    """The folder of the example servers, from the source of the SDK that this Python has."""
    found = folder / "examples" / "servers"
    if not found.exists():
        ask = "import importlib.metadata; print(importlib.metadata.version('mcp'))"
        version = subprocess.run([str(python), "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
        with tempfile.TemporaryDirectory() as place:
            package = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", place, f"mcp=={version}"]
            subprocess.run([str(python), "-m", "pip", *package], check=True)
            with tarfile.open(next(Path(place).glob("*.tar.gz"))) as archive:
                archive.extractall(place, filter="data")
            (Path(place) / f"mcp-{version}").rename(folder)
    return found


async def example_played(python: Path, source: Path, example: str) -> dict[str, Any]:
    """One episode of a policy that calls the tools of an example."""
    begin = time.monotonic()
    environment = {"PYTHONPATH": str(source / example)}
    if example == "simple-tool":
        command = [str(python), "-c", "from mcp_simple_tool.server import main; main()"]
        with _page() as url:
            server = McpServer(command, env=environment)
            found = await _worked(server, "It is 42.", [("fetch", {"url": url})], [PAGE])
    else:
        port = _free_port()
        command = [str(python), "-m", "mcp_everything_server.server", "--port", str(port)]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, env={"PATH": os.environ["PATH"], **environment}, **silent)
        try:
            await _until_open(process, port)
            server = McpServer(url=f"http://127.0.0.1:{port}/mcp")
            calls = [("test_simple_text", {}), ("test_error_handling", {})]
            found = await _worked(server, "It answered.", calls, ["simple text response", "error: "])
        finally:
            process.kill()
            process.wait()
    return {**found, "s": time.monotonic() - begin}


async def _worked(server: McpServer, answer: str, calls: list[tuple[str, Any]], expected: list[str]) -> dict[str, Any]:
    """An attempt that makes all calls in one reply, and answers once their results hold what is expected."""
    asked = "".join(f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>" for name, given in calls)

    def say(prompt: str) -> str:
        return asked if "<|im_start|>tool" not in prompt else answer

    chat, engine = scripted_policy(say)
    try:
        done = await chat.work("Use the tools.", ToolSet(await server.tools(only=[name for name, _ in calls])))
    finally:
        await server.close()
    told = [each.content for each in done.results]
    ok = len(told) == len(expected) and all(part in text for part, text in zip(expected, told, strict=True))
    ok = ok and done.text == answer and all_recorded(chat, engine, turns=2)
    return {"ok": ok, "answer": told[-1][:60], "calls": len(told), "rows": chat.rows()}


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(PAGE.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the table is what is shown."""


@contextlib.contextmanager
def _page() -> Iterator[str]:
    """The address of a web server on the loopback interface that has one page."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


async def _until_open(process: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.1)
        else:
            writer.close()
            return
    raise RuntimeError("the server did not listen within a minute")
