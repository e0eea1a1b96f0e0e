"""A command below the keepers of a worker: `python -m tidemill.runtime.workers.kept_command PARENT REPORT COMMAND...`

PARENT is the process that started this one, REPORT a descriptor to which the command's process id is written. When the
command or the parent ends, the keepers kill everything that the command has started. Only Linux has keepers.
"""

import os
import sys

from tidemill.runtime.workers import keeper


def main(parent: str, report: str, *command: str) -> None:
    if keeper.KEEPERS:
        keeper.keep(int(parent))
    os.write(int(report), keeper.PID.pack(os.getpid()))
    os.close(int(report))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
