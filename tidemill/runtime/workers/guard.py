"""The process that outlives the pool by a moment: when its stdin ends, it kills the process groups it was told of.

Reads lines `+GROUP` and `-GROUP`. It is run by its path, without site packages (`python -I -S`), so it is small, and
it covers what a worker's keepers do not: those that were stopped or killed together, and systems that have none.
Its argument is the mark of this run's workers: who carries it belongs to one of them, wherever it has gone.
"""

import os
import signal
import sys
import time

PROC = os.path.isdir("/proc/self")
KEEPER = b"tidemill-keeper"  # what the keepers of a worker are called
KEEPING_S = 5.0  # for them to end, with all that is below them


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:  # bounded: it lives as long as who started it
        group = int(line[1:])
        (groups.add if line[0] == "+" else groups.discard)(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # gone already
            continue
    begin, mark = time.monotonic(), sys.argv[1].encode()
    while strike(mark, keepers=time.monotonic() - begin > KEEPING_S) and time.monotonic() - begin < 2 * KEEPING_S:
        time.sleep(0.01)


def strike(mark: bytes, keepers: bool) -> bool:
    """Kill every process there is now that was started with `mark` in its environment. Linux. False: there is none.

    A worker's keepers are only told to end, for they kill what has no mark any more. keepers: kill them as well.
    """
    found = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and mark in _read(pid, "environ")] if PROC else []
    for pid in found:
        spared = not keepers and _read(str(pid), "comm").strip() == KEEPER
        try:
            for number in (signal.SIGTERM, signal.SIGCONT) if spared else (signal.SIGKILL,):
                os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue
    return bool(found)


def _read(pid: str, name: str) -> bytes:
    """A file of /proc, an environment as it was at its start; empty of a process that is gone, dead or somebody else's."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


if __name__ == "__main__":
    main()
