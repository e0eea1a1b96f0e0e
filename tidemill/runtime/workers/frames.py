"""Frames between a process and its workers: typed messages over the worker's stdin and stdout.

    parent -> worker   WorkerCall, any number of WorkerNote to it; CancelCall; WorkerPing
    worker -> parent   CallBegan (all it needs is loaded: its limit begins), any number of WorkerNote, and one CallResult or
                       CallFailure; the WorkerPing

A frame is a length and the msgpack of one message. Each call has a number, so one worker can do many at a time. A reader
refuses a frame that is too long or is no such message; a worker can do no more harm than that by what it writes.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec

from tidemill.core.errors import CodecError

T = TypeVar("T")
_HEADER = struct.Struct("<I")
HEADER_BYTES = _HEADER.size


class WorkerCall(msgspec.Struct, Generic[T], frozen=True, tag=True):
    """Request to a worker's handler."""

    id: int
    request: T


class WorkerNote(msgspec.Struct, Generic[T], frozen=True, tag=True):
    """Message between a running call and its caller, in either direction."""

    id: int
    message: T


class CancelCall(msgspec.Struct, frozen=True, tag=True):
    id: int


class WorkerPing(msgspec.Struct, frozen=True, tag=True):
    number: int  # a worker with an event loop sends it back


class CallBegan(msgspec.Struct, frozen=True, tag=True):
    id: int


class CallResult(msgspec.Struct, Generic[T], frozen=True, tag=True):
    id: int
    value: T
    children: bool = False  # the call left processes behind


class CallFailure(msgspec.Struct, frozen=True, tag=True):
    """Notice that the handler raised an exception."""

    id: int
    reason: str
    trace: str
    children: bool = False


def to_worker(requests: Any, notes: Any) -> Any:
    """The type of the frames to a worker; its handler takes `requests`, and `notes` while it works on one."""
    return WorkerCall[requests] | WorkerNote[notes] | CancelCall | WorkerPing


def from_worker(results: Any, notes: Any) -> Any:
    """The type of the frames from a worker, whose handler returns `results` and sends `notes` before."""
    return CallBegan | WorkerNote[notes] | CallResult[results] | CallFailure | WorkerPing


def framed(body: bytes) -> bytes:
    """The bytes of a frame: the length of the body, then the body."""
    return _HEADER.pack(len(body)) + body


def size_of(header: bytes, most: int | None = None) -> int:
    """The length of the body that follows. Raises CodecError when it is more than `most`."""
    size: int = _HEADER.unpack(header)[0]
    if most is not None and size > most:
        raise CodecError(f"a frame of {size} bytes, at most {most} are taken")
    return size
