"""The process that outlives the pool by a moment: when its stdin ends, it kills the process groups it was told of.

Reads lines `+GROUP` and `-GROUP`. It is run by its path, without site packages (`python -I -S`), so it is small, and
it covers what the kernel does not: processes that a reward function started, and systems without PR_SET_PDEATHSIG.
"""

import os
import signal
import sys


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


if __name__ == "__main__":
    main()
