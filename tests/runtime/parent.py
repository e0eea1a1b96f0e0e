"""A controller to be killed: starts one child, says its pid and the fork server's, waits.

`python parent.py FOLDER idle|blocked|stopped|server-stopped|polled`
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
from echo_worker import WITHOUT_THE_KERNEL, WORKER, Echo

from tidemill.runtime.local import Local


async def main(folder: Path, when: str) -> None:
    child = await Local(folder, WITHOUT_THE_KERNEL if when == "polled" else WORKER).start(Echo, "engine", "engine-0", {})
    server = psutil.Process(child.pid).ppid()
    if when == "blocked":
        asyncio.get_running_loop().create_task(child.proxy.block(300.0))
        await asyncio.sleep(0.2)
    if when == "stopped":
        os.kill(child.pid, signal.SIGSTOP)
    if when == "server-stopped":
        os.kill(server, signal.SIGSTOP)
    print(child.pid, server, flush=True)
    await asyncio.Event().wait()


asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
