"""What the scripts beside this one share: how a system says that it is ready, and answers."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


def given() -> dict[str, Any]:
    """What the harness wants of this system."""
    return json.loads(sys.argv[1])


def serve(about: dict[str, Any], answer: Callable[..., dict[str, Any]]) -> None:
    """Say what this is, then answer requests until there are no more. Requests that end while one is worked on have lost who
    asked: this process ends at once then, with its whole group, lest it computes beside what is measured next."""
    requests: SimpleQueue[str] = SimpleQueue()
    working = threading.Lock()  # held from a request that was read to its answer

    def read() -> None:
        for line in sys.stdin:
            working.acquire()
            requests.put(line)
        if not working.acquire(blocking=False):
            os.killpg(0, signal.SIGKILL)
        requests.put("")

    with os.fdopen(int(os.environ["BENCHMARK_REPLY"]), "w") as out:
        print(json.dumps(about), file=out, flush=True)
        threading.Thread(target=read, daemon=True).start()
        while line := requests.get():
            reply = json.dumps(answer(**json.loads(line)))
            working.release()  # before it can be read: the next request may come, or the end
            print(reply, file=out, flush=True)
