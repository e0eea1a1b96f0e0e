"""What the scripts beside this one share: how a system says that it is ready, and answers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def given() -> dict[str, Any]:
    """What the harness wants of this system."""
    return json.loads(sys.argv[1])


def serve(about: dict[str, Any], answer: Callable[..., dict[str, Any]]) -> None:
    """Say what this is, then answer requests until there are no more."""
    with os.fdopen(int(os.environ["BENCHMARK_REPLY"]), "w") as out:
        print(json.dumps(about), file=out, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(**json.loads(line))), file=out, flush=True)
