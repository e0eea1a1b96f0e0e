"""Sends a command's warnings to a log, with one sentence on the screen."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tidemill.observability.safe_text import visible
from tidemill.runtime.process_logs import warnings_to


@contextmanager
def warnings_logged(command: str, logs: Path | None = None) -> Iterator[None]:
    """Send tracebacks to a file in `logs`, or in a temporary folder if that is not writable.

    Standard error names the file.
    """
    own = logs is None or not _writable(logs)
    place = Path(tempfile.mkdtemp(prefix=f"tidemill-{command}-")) if own or logs is None else logs
    try:
        with warnings_to(place / f"{command}-warnings.log", _tell):
            yield
    finally:
        if own:
            with suppress(OSError):  # not empty: it holds a log
                place.rmdir()


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK)


def _tell(path: Path) -> None:
    print(visible(f"an attempt failed in its environment's code: the tracebacks go to {path}"), file=sys.stderr, flush=True)
