"""A server's process: it is started, watched, and ended with everything that it has started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tidemill.core.errors import EngineFailed, StartFailed
from tidemill.engine.remote import server_process
from tidemill.engine.remote.server_process import ServerProcess

SERVER = """
import os, subprocess, sys, time
from pathlib import Path
hidden = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True, env={})
Path(sys.argv[1]).with_suffix(".part").write_text(f"{os.getpid()} {hidden.pid}")
Path(sys.argv[1]).with_suffix(".part").rename(sys.argv[1])
print("the last words", flush=True)
time.sleep(float(sys.argv[2]))
sys.exit(7)
"""
STARTER = """
import asyncio, sys
from pathlib import Path
from tidemill.engine.remote.server_process import ServerProcess
async def main():
    ServerProcess(sys.argv[2:], name="it", log=Path(sys.argv[1]))
    await asyncio.sleep(600)
asyncio.run(main())
"""


def command(folder: Path, seconds: float = 600) -> list[str]:
    return [sys.executable, "-c", SERVER, str(folder / "pids"), str(seconds)]


async def begun(folder: Path) -> list[psutil.Process]:
    """The server and what it started, once both run."""
    async with asyncio.timeout(30):
        while not (folder / "pids").exists():
            await asyncio.sleep(0.01)
    return [psutil.Process(int(pid)) for pid in (folder / "pids").read_text().split()]


async def gone(processes: list[psutil.Process]) -> bool:
    return not (await asyncio.to_thread(psutil.wait_procs, processes, 20))[1]


async def test_closing_ends_the_server_and_what_it_started_in_a_session_of_its_own(tmp_path: Path) -> None:
    server = ServerProcess(command(tmp_path), name="it", log=tmp_path / "logs" / "it.log", env={"OWN": "1"})
    processes = await begun(tmp_path)
    assert processes[0].environ()["OWN"] == "1"
    await server.close()
    await server.close()
    assert await gone(processes)


async def test_the_end_of_a_server_says_its_last_words_and_takes_the_rest_along(tmp_path: Path) -> None:
    server = ServerProcess(command(tmp_path, 0.2), name="it", log=tmp_path / "it.log")
    processes = await begun(tmp_path)

    async def never() -> None:
        raise EngineFailed("nothing listens")

    with pytest.raises(StartFailed, match=r"(?s)it did not start: it ended: exit status 7; .*it.log.*the last words"):
        await server.healthy(never, 30)
    assert await gone(processes)
    await server.close()


async def test_a_server_that_is_not_ready_in_time_is_refused(tmp_path: Path) -> None:
    server = ServerProcess(command(tmp_path), name="it", log=tmp_path / "it.log")
    await begun(tmp_path)

    async def never() -> None:
        raise EngineFailed("nothing listens")

    with pytest.raises(StartFailed, match=r"it was not ready within 0.1 s: nothing listens"):
        await server.healthy(never, 0.1)
    await server.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has keepers")
async def test_a_starter_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(tmp_path / "it.log"), *command(tmp_path)])
    try:
        processes = await begun(tmp_path)
    finally:
        starter.kill()
        starter.wait(30)
    assert await gone(processes)


async def test_a_server_that_is_stopped_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "RARELY_S", 0.0)
    monkeypatch.setattr(server_process, "LOOK_S", 0.02)
    server = ServerProcess(command(tmp_path), name="it", log=tmp_path / "it.log")
    processes = await begun(tmp_path)
    os.kill(processes[0].pid, signal.SIGSTOP)
    begin = time.monotonic()
    while not server.ended and time.monotonic() - begin < 20:
        await asyncio.sleep(0.02)
    assert server.ended == "it was stopped by a signal and was killed"
    assert await gone(processes)
    await server.close()
