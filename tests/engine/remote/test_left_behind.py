"""Files of a killed server: what it left is removed when the next one starts, and nothing else is."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import msgspec
import psutil
import pytest
from engine.remote.test_server_process import gone

from tidemill.engine.remote.left_behind import SHARED, LeftBehind, Note
from tidemill.engine.remote.server_process import ServerProcess

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="shared memory is no folder on this system")
SERVER = """
import multiprocessing, os, sys, tempfile, time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
resource_tracker.register = lambda *a: None  # else the tracker may remove it before it is killed, too
memory, lock = shared_memory.SharedMemory(create=True, size=4096), multiprocessing.Lock()
own = Path(tempfile.mkdtemp(prefix="vllm_dist_"))
Path(sys.argv[1]).with_suffix(".part").write_text(f"{os.getpid()} {memory.name} {own}")
Path(sys.argv[1]).with_suffix(".part").rename(sys.argv[1])
time.sleep(600)
"""
STARTER = """
import asyncio, sys
from pathlib import Path
from tidemill.engine.remote.server_process import ServerProcess
async def main():
    server = ServerProcess(sys.argv[3:], name="it", log=Path(sys.argv[1]))
    async def up():
        if not Path(sys.argv[2]).exists():
            raise ValueError("not yet")
    await server.healthy(up, 60)
    print("healthy", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.fixture
def foreign() -> Iterator[SharedMemory]:
    memory = SharedMemory(create=True, size=64)
    yield memory
    memory.close()
    memory.unlink()


def killed_server(folder: Path) -> tuple[int, str, Path]:
    """(process id, name of shared memory, temporary folder) of a server that was killed with the role that started it."""
    told = folder / "told"
    words = [sys.executable, "-c", STARTER, str(folder / "it.log"), str(told), sys.executable, "-c", SERVER, str(told)]
    starter = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert starter.stdout is not None and starter.stdout.readline() == "healthy\n"
    finally:
        starter.kill()
        starter.wait(30)
        assert starter.stdout is not None
        starter.stdout.close()
    pid, name, own = told.read_text().split()
    return int(pid), name, Path(own)


async def test_the_next_server_removes_what_a_killed_one_left(tmp_path: Path, foreign: SharedMemory) -> None:
    pid, name, own = killed_server(tmp_path)
    (note,) = msgspec.json.decode((tmp_path / "it.left").read_bytes(), type=list[Note])
    assert pid in note.processes and await gone([psutil.Process(each) for each in note.processes if psutil.pid_exists(each)])
    assert (SHARED / name).exists() and own.exists() and (tmp_path / "it.left").exists(), "it was killed"
    server = ServerProcess([sys.executable, "-c", "import time; time.sleep(600)"], name="it", log=tmp_path / "it.log")
    assert not (SHARED / name).exists() and not own.parent.exists()
    assert (SHARED / foreign.name).exists(), "of another process"
    await server.close()
    assert not (tmp_path / "it.left").exists()


async def test_a_server_that_ends_by_itself_leaves_nothing(tmp_path: Path) -> None:
    server = ServerProcess([sys.executable, "-c", "pass"], name="it", log=tmp_path / "it.log")
    async with asyncio.timeout(30):
        while not server.ended:
            await asyncio.sleep(0.01)
    assert not Path(server._left.folder).exists() and not (tmp_path / "it.left").exists()
    await server.close()


def test_nothing_is_removed_that_may_be_in_use_or_is_another_file(tmp_path: Path, foreign: SharedMemory) -> None:
    left = LeftBehind(tmp_path / "it.log")
    left.note([psutil.Process()])
    assert foreign.name in left._note.shared, "this process maps it"
    left.remove()
    again = LeftBehind(tmp_path / "it.log")
    again.note([])
    kept, _ = msgspec.json.decode((tmp_path / "it.left").read_bytes(), type=list[Note])
    assert kept == left._note, "it is looked at again"
    assert (SHARED / foreign.name).exists() and Path(left.folder).exists(), "this process lives"
    again._others.clear()
    again._note.shared = {foreign.name: (SHARED / foreign.name).stat().st_ino + 1}
    again._note.folder = str(tmp_path)
    again.remove()
    assert (SHARED / foreign.name).exists() and tmp_path.exists(), "another file by that name, and a folder of somebody else"
    os.rmdir(left.folder)
    os.rmdir(again.folder)


def test_a_note_that_cannot_be_read_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "it.left").write_text("{")
    LeftBehind(tmp_path / "it.log").remove()
    assert not (tmp_path / "it.left").exists()
