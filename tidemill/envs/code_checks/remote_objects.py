"""Objects of another process: calls by a pair of pipes, so that tests and the tested code share no memory.

It runs in sandboxes, on its own, at both ends of the descriptor 3. Plain data travels by value; anything else stays where it
is, and the other side has a `Remote` for it. A comparison of a Remote with plain data is never asked of the other side: the
expected value does not travel, and an object that equals everything equals nothing here.
"""

import builtins
import collections
import datetime
import decimal
import fractions
import json
import operator
import os
import struct
from collections.abc import Callable
from typing import Any

CHANNEL, LENGTH, MOST = 3, struct.Struct("<I"), 16 << 20
ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "neg", "pos", "abs")
BITS = ("and_", "or_", "xor", "lshift", "rshift", "invert")
OPERATIONS = {name: getattr(operator, name) for name in (*ARITHMETIC, *BITS)}
COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
ACTIONS: dict[str, Callable[..., Any]] = {
    "call": lambda value, args, kwargs: value(*args, **kwargs),
    "get": lambda value, args, kwargs: getattr(value, *args),
    "set": lambda value, args, kwargs: setattr(value, *args),
    "item": lambda value, args, kwargs: value[args[0]],
    "set_item": lambda value, args, kwargs: operator.setitem(value, *args),
    "delete_item": lambda value, args, kwargs: operator.delitem(value, *args),
    "iter": lambda value, args, kwargs: iter(value),
    "next": lambda value, args, kwargs: next(value),
    "is_instance": lambda value, args, kwargs: isinstance(args[0], value),
    "enter": lambda value, args, kwargs: value.__enter__(),
    "exit": lambda value, args, kwargs: value.__exit__(None, None, None),
}
DIRECT = {"len": len, "str": str, "repr": repr, "bool": bool, "hash": hash, **OPERATIONS, **COMPARISONS}
ACTIONS |= {name: lambda value, args, kwargs, do=do: do(value, *args) for name, do in DIRECT.items()}


class PeerGone(BaseException):
    """The other process has ended. No `except Exception` of a test takes it for a result."""


class OtherSideError(Exception):
    """An exception of the other side whose type does not exist here."""


class Peer:
    """This process's end. guarded: the other side may only call functions that it was given, and see public attributes."""

    def __init__(self, guarded):
        self.guarded, self.gone = guarded, False
        self._objects = {}

    def ask(self, operation, target, *args, **kwargs):
        """Have the other side do something with its object `target`, and return the result."""
        sent = [self.encoded(arg) for arg in args]
        named = {name: self.encoded(value) for name, value in kwargs.items()}
        self._send({"do": operation, "on": target, "args": sent, "kwargs": named})
        reply = self._reply()
        for place, changed in reply.get("changed", []):
            take_over(args[place], self.decoded(changed))
        if "error" in reply:
            name, text = reply["error"]
            raise error_of(name, text, ends=operation == "next")
        return self.decoded(reply["value"])

    def serve(self):
        """Do what the other side asks for, until it ends."""
        while True:
            self._do(self._receive())

    def _reply(self):
        while "do" in (message := self._receive()):
            self._do(message)
        return message

    def _do(self, message):
        """Do one thing for the other side, and reply."""
        args = [self.decoded(arg) for arg in message["args"]]
        kwargs = {name: self.decoded(value) for name, value in message["kwargs"].items()}
        try:
            target = self._objects[message["on"]]
            if self.guarded:
                permit(message["do"], target, args)
            reply: dict[str, Any] = {"value": self.encoded(ACTIONS[message["do"]](target, args, kwargs))}
        except (PeerGone, SystemExit, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            reply = {"error": [type(error).__name__, str(error)[:1000]]}
        pairs = ((place, self.encoded(arg)) for place, arg in enumerate(args) if isinstance(arg, MUTABLE))
        reply["changed"] = [[place, now] for place, now in pairs if now != message["args"][place]]
        self._send(reply)

    def give(self, value):
        """Keep an object for the other side, which knows it by the number that is returned."""
        number = len(self._objects)
        self._objects[number] = value
        return number

    def _send(self, message):
        data = json.dumps(message).encode()
        data = LENGTH.pack(len(data)) + data
        try:
            while data:
                data = data[os.write(CHANNEL, data) :]
        except OSError:
            self._end()

    def _receive(self):
        (size,) = LENGTH.unpack(self._exactly(LENGTH.size))
        if size > MOST:
            self._end()
        try:
            message = json.loads(self._exactly(size))
        except (ValueError, RecursionError):
            self._end()
        return message if isinstance(message, dict) else self._end()

    def _exactly(self, size):
        found = bytearray()
        while len(found) < size:
            chunk = os.read(CHANNEL, min(size - len(found), 1 << 16))
            if not chunk:
                self._end()
            found += chunk
        return bytes(found)

    def _end(self):
        self.gone = True
        raise PeerGone

    # --- values ----------------------------------------------------------------------------------------------------------

    def encoded(self, value):
        """A value as JSON: plain types as they are or tagged, an own object by its number."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, Remote):
            return {"yours": value._number}
        for kind, tag, parts in TAGGED:
            if isinstance(value, kind):
                found = parts(value)
                if tag in NESTED:
                    found = [self.encoded(each) for each in found]
                return {tag: found} if tag else found
        return {"mine": self.give(value)}

    def decoded(self, value):
        if isinstance(value, list):
            return [self.decoded(each) for each in value]
        if not isinstance(value, dict):
            return value
        ((tag, found),) = value.items()
        if tag == "mine":
            return Remote(self, int(found))
        if tag == "yours":
            return self._objects[found]
        return MADE[tag]([self.decoded(each) for each in found] if tag in NESTED else found)


MUTABLE = (list, dict, set, bytearray, collections.deque)
NESTED = ("list", "tuple", "set", "frozenset", "deque", "dict")
TAGGED: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (  # type, tag, the value's parts; subclasses travel as the type
    (str, "", lambda value: str.__str__(value)),
    (int, "int", lambda value: hex(int(value))),
    (float, "", float),
    (complex, "complex", lambda value: [value.real, value.imag]),
    (list, "list", list),
    (tuple, "tuple", list),
    (dict, "dict", lambda value: [list(pair) for pair in dict.items(value)]),
    (set, "set", list),
    (frozenset, "frozenset", list),
    (collections.deque, "deque", list),
    (bytes, "bytes", lambda value: bytes(value).hex()),
    (bytearray, "bytearray", lambda value: bytes(value).hex()),
    (range, "range", lambda value: [hex(value.start), hex(value.stop), hex(value.step)]),
    (decimal.Decimal, "decimal", str),
    (fractions.Fraction, "fraction", str),
    (datetime.datetime, "datetime", lambda value: value.isoformat()),
    (datetime.date, "date", lambda value: value.isoformat()),
    (datetime.time, "time", lambda value: value.isoformat()),
    (datetime.timedelta, "timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
)
MADE = {
    "int": lambda text: int(text, 16),
    "complex": lambda parts: complex(*parts),
    "list": list,
    "tuple": tuple,
    "dict": dict,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "range": lambda parts: range(*(int(part, 16) for part in parts)),
    "decimal": decimal.Decimal,
    "fraction": fractions.Fraction,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda parts: datetime.timedelta(*parts),
}


def take_over(value, changed):
    """Give an argument the content that the call left in it."""
    if type(value) is not type(changed) or not isinstance(value, MUTABLE):
        return
    value.clear()
    value.update(changed) if isinstance(value, dict | set) else value.extend(changed)


HARMLESS = ("bool", "len", "str", "repr", "hash", "iter", "next", "item", "set_item", "delete_item")


def permit(operation, target, args):
    """Raise PermissionError unless the tested code may do this with an object of the tests.

    It may call functions, and use objects whose class the tests define by their public attributes and their operators: no
    way leads from there to the tests' own variables, where the expected values are.
    """
    theirs = type(target).__module__ == "tests"
    operators = operation in OPERATIONS or operation in COMPARISONS or operation in HARMLESS
    public = operation in ("get", "set") and isinstance(args[0], str) and not args[0].startswith("_")
    if not (operation == "call" and callable(target)) and not (theirs and (public or operators)):
        raise PermissionError(f"the tested code may not use {operation!r} on an object of the tests")


def error_of(name, text, ends):
    """The exception that the other side raised, if it is a built-in one."""
    kind: Any = getattr(builtins, str(name), None)
    if kind is StopIteration:  # elsewhere it would end a loop of the tests early, and pass
        return StopIteration() if ends else RuntimeError("the tested code raised StopIteration")
    known = isinstance(kind, type) and issubclass(kind, Exception) and kind is not StopAsyncIteration
    try:
        return kind(str(text)) if known else OtherSideError(f"{name}: {text}")
    except TypeError:  # such as UnicodeDecodeError, which takes more than a text
        return OtherSideError(f"{name}: {text}")


def _asking(operation):
    return lambda self, *args, **kwargs: self._peer.ask(operation, self._number, *args, **kwargs)


def _operating(name):
    """An operator: with plain data only a Remote may come of it, as the other side has then heard what is expected."""

    def operate(self, *others):
        found = self._peer.ask(name, self._number, *others)
        if others and not isinstance(others[0], Remote) and not isinstance(found, Remote):
            raise TypeError(f"{name} of an object of the tested code and a {type(others[0]).__name__} gave no object")
        return found

    return operate


def _comparing(name):
    def compare(self, other):
        return self._peer.ask(name, self._number, other) if isinstance(other, Remote) else NotImplemented

    return compare


class Remote:
    """An object of the other side."""

    def __init__(self, peer, number):
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name):
        return self._peer.ask("get", self._number, name)

    def __setattr__(self, name, value):
        self._peer.ask("set", self._number, name, value)

    def __instancecheck__(self, value):
        return isinstance(value, Remote) and self._peer.ask("is_instance", self._number, value) is True

    def __exit__(self, *error):
        self._peer.ask("exit", self._number)

    def __hash__(self):
        found = self._peer.ask("hash", self._number)
        return found if isinstance(found, int) else 0


_DIRECT = {"call": "call", "getitem": "item", "setitem": "set_item", "delitem": "delete_item", "enter": "enter"}
_DIRECT |= {name: name for name in ("iter", "next", "len", "bool", "str", "repr")}
for _special, _operation in _DIRECT.items():
    setattr(Remote, f"__{_special}__", _asking(_operation))
for _operation in OPERATIONS:
    setattr(Remote, f"__{_operation.rstrip('_')}__", _operating(_operation))
for _operation in COMPARISONS:
    setattr(Remote, f"__{_operation}__", _comparing(_operation))
