"""Real ranks for tests: processes of `rank_program.py` that meet and answer cases."""

import json
import secrets
import subprocess
import sys
from pathlib import Path


def together(folder, size, asked):
    """The answers of all ranks to each case; None from one that ended before."""
    meeting = folder / f"meeting-{secrets.token_hex(4)}"  # a file that others have met at would mislead
    command = [sys.executable, str(Path(__file__).parent / "rank_program.py"), str(meeting)]
    (folder / "cases").write_text("".join(json.dumps(case) + "\n" for case in asked))
    processes = []
    try:
        for rank in range(size):
            with open(folder / "cases") as given, open(folder / f"out-{rank}", "w") as out:
                processes.append(subprocess.Popen([*command, str(rank), str(size)], stdin=given, stdout=out))
        for process in processes:
            process.wait(timeout=60 + 10 * len(asked))
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=30)
    lines = [(folder / f"out-{rank}").read_text().splitlines() for rank in range(size)]
    return [[json.loads(each[i]) if i < len(each) else None for each in lines] for i in range(len(asked))]
