"""Durable writes: flush files to disk, and put files and folders in place whole.

A file or folder that was flushed survives a power cut. One that was renamed into place is there whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def flush(path: Path) -> None:
    """Put a file's contents, or a folder's entries (created, renamed, removed files), on the medium."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Flush everything in `folder`, then the folder itself."""
    for path in sorted(folder.rglob("*"), reverse=True):  # a folder comes after its contents
        if not path.is_symlink():
            flush(path)
    flush(folder)


def write_json(path: Path, value: Mapping[str, Any], lasting: bool = True) -> None:
    """Write JSON to a file beside `path`, flush it if `lasting`, and rename it into place."""
    write_whole(path, f"{json.dumps(value, indent=2)}\n".encode(), lasting)


def write_whole(path: Path, raw: bytes, lasting: bool = False) -> None:
    """Write a file beside `path`, flush it if `lasting`, and rename it into place."""
    beside = path.with_name(path.name + ".partial")
    beside.write_bytes(raw)
    if lasting:
        flush(beside)
    os.replace(beside, path)
    if lasting:
        flush(path.parent)


def remove_marked(folder: Path, marker: str) -> None:
    """Remove `folder`; its file `marker` goes last, so that a half-removed one is still known as ours."""
    for each in folder.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        elif each.name != marker:
            each.unlink()
    (folder / marker).unlink()
    folder.rmdir()


def remove_left(folder: Path, marker: str) -> bool:
    """Remove what a killed process left of `folder`; False if it is not ours: neither marked nor empty."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    if (folder / marker).is_file():
        remove_marked(folder, marker)
    elif any(folder.iterdir()):
        return False
    else:
        folder.rmdir()
    return True


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, which takes its place when the context ends without an error, and else is removed."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    partial.mkdir(parents=True)
    try:
        yield partial
        put_in_place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already when it was moved


def put_in_place(partial: Path, folder: Path) -> None:
    """Flush the folder `partial` and rename it to `folder`, which it replaces.

    Between two renames `folder` does not exist; until the new one is in place, the old one is kept as `.NAME.replaced`.
    """
    flush_tree(partial)
    old = folder.with_name(f".{folder.name}.replaced")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)  # left by an earlier call: `folder` is the newer one
        os.replace(folder, old)
    os.replace(partial, folder)
    flush(folder.parent)
    if old.exists():
        shutil.rmtree(old)
