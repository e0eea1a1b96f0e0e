"""What a client's script tries, one line each on its standard output."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

GIVEN: dict[str, str] = json.loads(sys.argv[1])
URL, MODEL, FOLDER, KEY = (GIVEN[name] for name in ("url", "model", "folder", "key"))


def trial(what: str) -> Callable[[Callable[[], Any]], None]:
    """Runs what it decorates, at once, and says whether it raised."""

    def run(work: Callable[[], Any]) -> None:
        said = ""
        try:
            work()
        except Exception:
            said = traceback.format_exc()
        print("trial " + json.dumps({"tried": what, "ok": not said, "said": said}), flush=True)

    return run
