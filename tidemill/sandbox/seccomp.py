"""Seccomp filters, assembled as BPF for x86-64 and arm64 from the table of refused calls.

A filter looks at the machine, the number and the arguments of each system call (`struct seccomp_data`): number at byte 0,
machine at 4, arguments from 16 on, 8 bytes each, low half first. A call of another machine's numbering (`int 0x80`) ends the
process.
"""

from __future__ import annotations

import errno
import os
import platform
import struct
from collections.abc import Iterable

from tidemill.sandbox.system_calls import NEWEST, ArgumentCheck, SystemCall, number_of

MACHINES = {"x86_64": 0xC000003E, "arm64": 0xC00000B7}  # AUDIT_ARCH_*
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
X32 = 0x40000000  # marks calls of the x32 numbering, which x86-64 knows beside its own
LOAD, AND = 0x20, 0x54  # of a 32-bit word; with a constant
EQUAL, AT_LEAST, RETURN = 0x15, 0x35, 0x06  # jumps compare with a constant
NUMBER, MACHINE, ARGUMENTS = 0, 4, 16
Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def machine() -> str:
    """This machine's name in MACHINES; "" if the filters do not know it."""
    name = {"amd64": "x86_64", "aarch64": "arm64"}.get(platform.machine().lower(), platform.machine().lower())
    return name if name in MACHINES and os.uname().sysname == "Linux" else ""


def program(calls: Iterable[SystemCall], name: str) -> list[Instruction]:
    """The filter that refuses `calls` on a machine, as instructions."""
    found: list[Instruction] = [
        (LOAD, 0, 0, MACHINE),
        (EQUAL, 1, 0, MACHINES[name]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
    ]
    if name == "x86_64":
        found += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    found += [(AT_LEAST, 0, 1, NEWEST + 1), (RETURN, 0, 0, ERROR | errno.ENOSYS)]
    for call in calls:
        number = number_of(call, name)
        if number is not None:
            found += _rule(number, call)
    return [*found, (RETURN, 0, 0, ALLOW)]


def _rule(number: int, call: SystemCall) -> list[Instruction]:
    verdict: Instruction = (RETURN, 0, 0, ERROR | call.error)
    if not call.checks:
        return [(EQUAL, 0, 1, number), verdict]
    body = [step for check in call.checks for step in _checked(check, verdict)]
    body.append((RETURN, 0, 0, ALLOW))  # the number is gone from the accumulator, and no other rule has it
    return [(EQUAL, 0, len(body), number), *body]


def _checked(check: ArgumentCheck, verdict: Instruction) -> list[Instruction]:
    """Instructions that end with the verdict, or go on behind them."""
    found: list[Instruction] = [(LOAD, 0, 0, ARGUMENTS + 8 * check.argument), (AND, 0, 0, check.mask)]
    count = len(check.values)
    for place, value in enumerate(check.values):
        to_end = count - place  # over the other values and the verdict
        found.append((EQUAL, to_end if check.refuse_others else to_end - 1, 0, value))
    if not check.refuse_others:
        last, _, _, value = found[-1]
        found[-1] = (last, 0, 1, value)
    return [*found, verdict]


def assembled(instructions: Iterable[Instruction]) -> bytes:
    """The bytes of a filter, as `bwrap --seccomp` and prctl(2) take them: an array of `struct sock_filter`."""
    return b"".join(struct.pack("=HBBI", *each) for each in instructions)
