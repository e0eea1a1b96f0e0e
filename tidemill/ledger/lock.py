"""Lock of a run folder, so that it has one writer: the system releases it when its holder dies.

It is a POSIX record lock, which belongs to the process: a forked child does not keep it alive. The same process could take
it a second time, and closing that second file would release the first lock too. So this process also keeps a list of the
locks it holds.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tidemill.core.errors import RunFolderError

_held: set[tuple[int, int]] = set()  # (device, inode) of the lock files this process holds


class FolderLock:
    """The lock of one run folder, held from construction to `release`."""

    def __init__(self, folder: Path) -> None:
        """Take the lock of a run folder. Raises RunFolderError, which names the holder, if it is taken."""
        path = folder / "ledger.lock"
        if path.exists() and _identity(path) in _held:
            raise _refusal(folder, os.getpid())
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.pread(self._descriptor, 32, 0).strip()
            os.close(self._descriptor)
            raise _refusal(folder, int(holder) if holder.isdigit() else None) from None
        if not path.exists() or not os.path.samestat(os.fstat(self._descriptor), path.stat()):
            os.close(self._descriptor)
            raise RunFolderError(f"{str(folder)!r} was removed meanwhile: start it again")
        os.pwrite(self._descriptor, f"{os.getpid():<31}\n".encode(), 0)
        self._identity = _identity(path)
        _held.add(self._identity)

    def release(self) -> None:
        """Release the lock. The file stays: without it, two writers could lock two different files."""
        if self._identity in _held:
            _held.remove(self._identity)
            os.close(self._descriptor)


def holder(folder: Path) -> int | None:
    """Id of the process that writes to this folder now; None when there is none."""
    path = folder / "ledger.lock"
    if not path.is_file():
        return None
    if _identity(path) in _held:  # opening and closing the file would release the lock
        return os.getpid()
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None
    except (BlockingIOError, PermissionError):
        pid = os.pread(descriptor, 32, 0).strip()
        return int(pid) if pid.isdigit() else None
    finally:
        os.close(descriptor)  # also releases the lock, if it was granted


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _refusal(folder: Path, pid: int | None) -> RunFolderError:
    who = "another process" if pid is None else "this process" if pid == os.getpid() else f"process {pid}"
    end = "close the other ledger first" if pid == os.getpid() else "wait until it has ended, or stop it"
    return RunFolderError(f"{str(folder)!r} is being written by {who}; {end}, or choose another run_dir")
