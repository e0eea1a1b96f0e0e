"""Format version of a run folder, 1 without format.json: checked and migrated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import tidemill
from tidemill.core.atomic_files import write_json
from tidemill.core.errors import ConfigError

FORMAT = 3
FILE = "format.json"


class FolderFormat(msgspec.Struct):
    """The content of `format.json`."""

    format: int
    tidemill: str = "an unknown version"  # the version that wrote it


def check_format(folder: Path) -> int:
    """The format of `folder`, or 1 if it names none. Raises ConfigError for an unknown format."""
    path = folder / FILE
    try:
        found = msgspec.json.decode(path.read_bytes(), type=FolderFormat)
    except FileNotFoundError:
        return 1
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f'{path} is not readable: {error}; expected {{"format": {FORMAT}}}') from None
    if not 1 <= found.format <= FORMAT:
        raise ConfigError(
            f"{folder} has run folder format {found.format}, written by Tidemill {found.tidemill}: expected at most "
            f"{FORMAT}; use that version, or a newer one"
        )
    return found.format


def write_format(folder: Path) -> None:
    """Mark `folder` as one of this version's format."""
    if not (folder / FILE).exists() or check_format(folder) != FORMAT:
        write_json(folder / FILE, {"format": FORMAT, "tidemill": tidemill.__version__})


def migrated(recipe: dict[str, Any], written: int) -> dict[str, Any]:
    """The recipe of a folder of format `written`, in the present format."""
    for number in range(written, FORMAT):
        MIGRATIONS[number](recipe)
    return recipe


def _from_1_to_2(recipe: dict[str, Any]) -> None:
    """A warm-up had a limit in seconds, which ended before training began. The transport was called carrier."""
    if isinstance(recipe.get("warmup"), dict):
        recipe["warmup"].pop("seconds", None)
    placement = recipe.get("placement")
    if isinstance(placement, dict) and isinstance(sync := placement.get("sync"), dict) and "carrier" in sync:
        sync.setdefault("transport", sync.pop("carrier"))


def _from_2_to_3(recipe: dict[str, Any]) -> None:
    """The recipe is the same. The ledger's schema became 6, see `ledger.older_schemas`."""


MIGRATIONS: dict[int, Callable[[dict[str, Any]], None]] = {1: _from_1_to_2, 2: _from_2_to_3}
