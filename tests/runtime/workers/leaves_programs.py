"""A worker whose code starts programs in every way that could let them live on, and then does what it is told."""

import json
import os
import signal
import struct
import subprocess
import sys
import time

SLEEP = ["/bin/sleep", "600"]


def daemon() -> int:
    """Forked twice, in a session of its own and without an environment."""
    told, telling = os.pipe()
    if first := os.fork():
        os.waitpid(first, 0)
        return int(os.read(told, 20))
    os.setsid()
    if os.fork():
        os._exit(0)
    os.write(telling, str(os.getpid()).encode())
    os.execve(SLEEP[0], SLEEP, {})
    raise AssertionError


def deaf() -> int:
    """Not a program of its own; no signal but SIGKILL ends it."""
    if child := os.fork():
        return child
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(600)


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])


def main() -> None:
    plain = subprocess.Popen(SLEEP).pid
    apart = subprocess.Popen(SLEEP, env={}, start_new_session=True).pid
    inner = os.getppid()
    told = {"programs": [plain, apart, daemon(), deaf()], "worker": os.getpid(), "inner": inner, "outer": parent_of(inner)}
    body = json.dumps(told).encode()
    os.write(1, struct.pack("<I", len(body)) + body)
    order = sys.stdin.buffer.read(8)[4:]
    if order == b"exit":
        os._exit(3)
    if order == b"kill":
        os.kill(inner, signal.SIGKILL)
    time.sleep(600)


if __name__ == "__main__":
    main()
