"""Messages of remote calls: calls, replies and failures, decoded by declared type, never pickle.

    call    [token, Call | Cancel | Hello | Ping, arguments]        reply    [Done | Failed, result]

Errors that the caller can handle, above all the ValueError family, become the same type again; every other one becomes a
`RemoteError` that shows the traceback of the other side.
"""

from __future__ import annotations

import inspect
import traceback
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

import msgspec

from tidemill.core import errors
from tidemill.core.errors import RemoteError

MAX_FRAME = 1 << 30  # bytes; a step of 512 rows of 32k tokens is about 400 MB
_MAX_TRACE = 20_000  # characters of a traceback that are sent, counted from its end


class Call(msgspec.Struct, frozen=True, tag="call"):
    id: int
    method: str  # its encoded arguments are a frame of their own


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    id: int  # of the call to cancel


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    id: int  # the reply holds the names of the served methods


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    id: int  # the reply is a Beat, from the peer's event loop whatever else it does


class Beat(msgspec.Struct, frozen=True):
    """Heartbeat of a peer: its progress and its running calls."""

    progress: float  # grows while work is being done
    busy: list[tuple[str, float]]  # calls in flight, oldest first: method, seconds since it came


class Done(msgspec.Struct, frozen=True, tag="done"):
    id: int  # of the request; the encoded result is a frame of its own


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    id: int
    kinds: list[str]  # class names, from the exception's own up to Exception
    message: str
    trace: str


Request = Call | Cancel | Hello | Ping
Reply = Done | Failed


_REBUILT: dict[str, type[Exception]] = {
    e.__name__: e
    for e in (
        *(ValueError, errors.CodecError, errors.ConfigError, errors.UnsupportedModel, errors.CheckpointError),
        *(errors.BaseMissing, errors.PolicyMismatch, errors.TransferFailed, errors.WeightsMoved),
        *(errors.TrainingDiverged, errors.EngineFailed),
        *(TimeoutError, NotImplementedError, FileNotFoundError, FileExistsError, PermissionError),
    )
}


def failure(call: int, error: BaseException) -> Failed:
    """Describe an exception as a reply to call number `call`."""
    kinds = [k.__name__ for k in type(error).__mro__ if issubclass(k, BaseException)]
    trace = "".join(traceback.format_exception(error))
    return Failed(call, kinds, str(error), trace[-_MAX_TRACE:])


def keeps_its_type(error: Exception) -> bool:
    """True when `rebuild` restores the error's type or a known ancestor, not a RemoteError."""
    return any(kind.__name__ in _REBUILT for kind in type(error).__mro__)


def rebuild(failed: Failed, peer: str) -> Exception:
    """The exception to raise here: the nearest known ancestor of the one raised there."""
    for kind in failed.kinds:
        if kind in _REBUILT:
            error = _REBUILT[kind](failed.message or kind)
            error.add_note(f"--- traceback in {peer} ---\n{failed.trace}")
            return error
    return RemoteError(peer, failed.kinds[0] if failed.kinds else "Exception", failed.message, failed.trace)


@dataclass(frozen=True)
class Method:
    """An async method of a protocol, with the types of its arguments and result."""

    name: str
    signature: inspect.Signature  # without self
    arguments: Any  # tuple type of the parameters
    result: Any


@cache
def methods_of(protocol: type) -> dict[str, Method]:
    """The public methods that a protocol declares, by name. Raises TypeError for one that cannot be called remotely."""
    return {
        name: _method(protocol, name, function)
        for name, function in inspect.getmembers(protocol, inspect.isfunction)
        if not name.startswith("_")
    }


def _method(protocol: type, name: str, function: Any) -> Method:
    where = f"{protocol.__name__}.{name}"
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"{where} is not async: only async methods can be called from another process")
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1:]
    hints = get_type_hints(function)
    if any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters) or {p.name for p in parameters} - set(hints):
        raise TypeError(f"{where}: expected plain parameters, each with a type")
    if "return" not in hints:
        raise TypeError(f"{where} does not say what it returns")
    arguments = tuple[tuple(hints[p.name] for p in parameters)]  # type: ignore[misc]
    return Method(name, signature.replace(parameters=parameters), arguments, hints["return"])
