"""A controller to be killed: starts one child, says its pid, waits. `python parent.py FOLDER idle|blocked|stopped|polled`"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from echo_worker import WORKER, Echo

from tidemill.orchestration.local import spawn

WITHOUT_THE_KERNEL = """
import sys; sys.path.insert(0, sys.argv[1])
import echo_worker
from tidemill.orchestration import hosting
hosting._die_with_parent = lambda: False
hosting.host(echo_worker.build)
"""


async def main(folder: Path, when: str) -> None:
    polling = [sys.executable, "-c", WITHOUT_THE_KERNEL, str(Path(__file__).parent)]
    command = polling if when == "polled" else WORKER
    child = await spawn(Echo, "engine", "engine-0", {}, folder, command=command)
    if when == "blocked":
        asyncio.get_running_loop().create_task(child.proxy.block(300.0))
        await asyncio.sleep(0.2)
    if when == "stopped":
        os.kill(child.pid, signal.SIGSTOP)
    print(child.pid, flush=True)
    await asyncio.Event().wait()


asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
