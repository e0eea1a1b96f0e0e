"""Frames between a process and its workers: a length, then bytes, over stdin and stdout.

A reader refuses a frame that is longer than it allows; a worker can do no more harm than that by what it writes.
"""

from __future__ import annotations

import struct

from tidemill.core.errors import CodecError

_HEADER = struct.Struct("<I")
HEADER_BYTES = _HEADER.size


def framed(body: bytes) -> bytes:
    """The bytes of a frame: the length of the body, then the body."""
    return _HEADER.pack(len(body)) + body


def size_of(header: bytes, most: int | None = None) -> int:
    """The length of the body that follows. Raises CodecError when it is more than `most`."""
    size: int = _HEADER.unpack(header)[0]
    if most is not None and size > most:
        raise CodecError(f"a reply of {size} bytes, at most {most} are taken")
    return size
