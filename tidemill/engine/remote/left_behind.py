"""Files that a killed server leaves: noted beside its log while it lives, and removed once its processes are gone.

    server.log    server.left   (its processes, its folder for temporary files, the shared memory that they map)

What is removed belongs to the dead server for certain: the folder was made for it alone, and shared memory has the inode
that its processes mapped. Nothing is removed while one of the noted processes lives.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from tidemill.core.atomic_files import write_whole

SHARED = Path("/dev/shm")
FOLDER = "tidemill-server-"
# Python's shared memory and locks by `multiprocessing`; what other programs share with the server is called otherwise.
_MAPPED = re.compile(rf"^\S+ \S+ \S+ \S+ (\d+) +{SHARED}/((?:psm_|sem\.mp-)\S+)$", re.MULTILINE)


class Note(msgspec.Struct):
    """The note about one server."""

    folder: str
    processes: dict[int, float] = {}  # when each began, by id
    shared: dict[str, int] = {}  # inodes, by name


class LeftBehind:
    """The files of one server, and of those before it with the same log."""

    def __init__(self, log: Path) -> None:
        """Make a folder for this one's temporary files. What earlier ones left is removed by `note`."""
        self._path, self._others = log.with_suffix(".left"), list[Note]()
        with suppress(OSError, msgspec.MsgspecError):
            self._others = msgspec.json.decode(self._path.read_bytes(), type=list[Note])
        self._note = Note(tempfile.mkdtemp(prefix=FOLDER))
        self.folder = self._note.folder

    def note(self, processes: Iterable[psutil.Process]) -> None:
        """Note processes of the server, and the shared memory that they map now; remove what earlier ones left."""
        for process in processes:
            with suppress(psutil.Error, OSError):
                self._note.processes[process.pid] = process.create_time()
                maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
                self._note.shared |= {name: int(inode) for inode, name in _MAPPED.findall(maps)}
        self._others = [note for note in self._others if not _remove(note)]
        write_whole(self._path, msgspec.json.encode([*self._others, self._note]))

    def remove(self) -> None:
        """Remove the files, unless a process of the server lives."""
        left = [note for note in (*self._others, self._note) if not _remove(note)]
        if left:
            write_whole(self._path, msgspec.json.encode(left))
        else:
            self._path.unlink(missing_ok=True)


def _remove(note: Note) -> bool:
    """Remove the files of a note; False if one of its processes lives."""
    if any(_lives(*each) for each in note.processes.items()):
        return False
    for name, inode in note.shared.items():
        path = SHARED / Path(name).name
        with suppress(OSError):
            found = path.lstat()
            if (found.st_ino, found.st_uid) == (inode, os.getuid()):
                path.unlink()
    folder = Path(note.folder)
    if folder.name.startswith(FOLDER) and folder.parent == Path(tempfile.gettempdir()) and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)
    return True


def _lives(pid: int, began: float) -> bool:
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return process.create_time() == began and process.status() != psutil.STATUS_ZOMBIE
    return False
