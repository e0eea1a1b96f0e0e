"""Making files last: what was flushed survives a power cut, what was renamed into place appears whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def flush(path: Path) -> None:
    """Put a file's contents, or a folder's entries (created, renamed, removed files), on the medium."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write beside, then rename."""
    beside = path.with_name(path.name + ".partial")
    beside.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(beside, path)
