"""The process that outlives the pool by a moment: when its stdin ends, it kills the process groups it was told of.

Reads lines `+GROUP` and `-GROUP`. It is run by its path, without site packages (`python -I -S`), so it is small, and
it covers what the kernel does not: processes that a reward function started, and systems without PR_SET_PDEATHSIG.
Its argument is the mark of this run's workers: who carries it belongs to one of them, wherever it has gone.
"""

import os
import signal
import sys

PROC = os.path.isdir("/proc/self")
ROUNDS = 10


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
    sweep(sys.argv[1].encode())


def sweep(mark: bytes) -> None:
    """Kill every process that was started with `mark` in its environment, and what these start meanwhile. Linux."""
    for _ in range(ROUNDS):
        found = [pid for pid in os.listdir("/proc") if pid.isdigit() and mark in _environment(pid)] if PROC else []
        for pid in found:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        if not found:
            return


def _environment(pid: str) -> bytes:
    """As it was at its start; empty of a process that is gone, dead or somebody else's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:
        return b""


if __name__ == "__main__":
    main()
