"""Guard process: kills the workers that are left when the process that started it dies.

It reads lines `+GROUP` and `-GROUP` from stdin and kills those process groups when stdin ends. It covers what a worker's
keepers do not: keepers that were stopped or killed together, and systems without keepers. Its argument is the mark that all
processes of this run's workers have in their environment. It is run by its path, without site packages, so it is small.
"""

import os
import signal
import sys
import time

PROC = os.path.isdir("/proc/self")
KEEPER = b"tidemill-keeper"  # process name of a worker's keepers
KEEPING_S = 5.0  # limit for keepers to end, with all processes below them


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:  # bounded: it lives as long as the process that started it
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
    """Kill every process that was started with `mark` in its environment; False when there is none.

    Linux only. A worker's keepers are asked to end (SIGTERM), because they kill the processes without a mark.
    keepers: kill the keepers as well.
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
    """A file of /proc, as of the process's start; empty for a process that is gone or another user's."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


if __name__ == "__main__":
    main()
