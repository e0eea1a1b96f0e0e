"""Request bodies from bytes to a JSON object, with limits, and off the event loop if large.

A body of eight megabytes may be one text, or millions of lists. Python blocks all other threads while it creates these, so
they are counted in the bytes first, and a body with too many is refused.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from tidemill.core.errors import ApiError
from tidemill.core.executors import in_thread
from tidemill.core.memory import return_free_memory

T = TypeVar("T")
HERE = 1 << 14  # a body of at most so many bytes is decoded on the event loop: that takes microseconds
LARGE = 1 << 20  # bytes of a body, from which its memory is given back
RETURN_S = 1.0  # seconds after a large body is decoded
MOST_PARTS = 1 << 17  # texts, lists and objects per body
MOST_VALUES = 1 << 20  # values of all kinds per body, mostly token ids
_FIRST, _SECOND = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF = re.compile(rb"%(first)b(?!%(second)b)|(?<!%(first)b)%(second)b" % {b"first": _FIRST, b"second": _SECOND})


async def beside(raw: bytes, work: Callable[..., T], *given: Any) -> T:
    """Call `work(*given)`, in a thread if the body `raw` is large.

    A while later, when the request has let go of a large body, its memory goes back to the system.
    """
    if len(raw) <= HERE:
        return work(*given)
    try:
        return await in_thread(work, *given)
    finally:
        if len(raw) >= LARGE:
            asyncio.get_running_loop().call_later(RETURN_S, return_free_memory)


def read(raw: bytes) -> dict[str, Any]:
    """Decode a body to an object. Raises ApiError when it is not one, or has too many parts."""
    check_parts(raw)
    try:
        tree = json.loads(raw.decode("utf-8-sig"), parse_constant=_no_constant)
    except UnicodeError:
        raise ApiError("the body is not valid Unicode: send UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {error}") from None
    if _HALF.search(raw.replace(b"\\\\", b"  ")):  # valid JSON, but not Unicode text
        raise ApiError("the body is not valid Unicode: send texts without half surrogate pairs")
    if not isinstance(tree, dict):
        raise ApiError(f"the body is {short(tree)}: expected a JSON object")
    return tree


def check_parts(raw: bytes) -> None:
    """Raise ApiError when a body holds too many values. Characters inside texts do not count."""
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # each remaining quote begins or ends a text
    texts = plain.count(b'"') // 2
    if texts <= MOST_PARTS:
        outside = b"".join(plain.split(b'"')[::2])
        parts = texts + outside.count(b"[") + outside.count(b"{")
        if parts <= MOST_PARTS and outside.count(b",") < MOST_VALUES:
            return
    raise ApiError(
        f"the body is of too many parts: expected at most {MOST_PARTS} texts, lists and objects, and {MOST_VALUES} values: "
        "send it as several requests",
        status=413,
    )


def short(value: Any) -> str:
    """A value for an error message, at most 100 characters long."""
    if isinstance(value, list | dict):  # not printed: it may be nested deeper than Python can print
        return f"a list of {len(value)}" if isinstance(value, list) else "an object"
    text = repr(value[:100] if isinstance(value, str) else value)
    return text if len(text) <= 100 else text[:97] + "..."


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
