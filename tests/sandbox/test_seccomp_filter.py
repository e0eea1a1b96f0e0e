"""Filters of system calls, run by a machine of the test's own, and their numbers beside those of the kernel's headers."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest
from bpf_machine import verdict

from tidemill.sandbox import seccomp, system_calls
from tidemill.sandbox.system_calls import SystemCall, number_of, refused

ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS = ERROR | errno.EPERM, ERROR | errno.ENOSYS
AUDIT = {"x86_64": 0xC000003E, "arm64": 0xC00000B7}
HEADERS = {
    "x86_64": (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm/unistd_64.h")),
    "arm64": (Path("/usr/include/asm-generic/unistd.h"),),
}
EVERY = {call.name: call for call in refused(shared=False, own_files=False, signals=False)}
ALLOWED = {  # name: (x86-64, arm64), of programs that do nothing wrong
    "read": (0, 63), "write": (1, 64), "openat": (257, 56), "mmap": (9, 222), "exit_group": (231, 94), "wait4": (61, 260),
    "execve": (59, 221), "futex": (202, 98), "getrandom": (318, 278), "pipe2": (293, 59), "kill": (62, 129),
}  # fmt: skip


def answer(machine: str, number: int, *args: int, **how: bool) -> int:
    return verdict(seccomp.assembled(seccomp.program(refused(**how), machine)), AUDIT[machine], number, *args)


@pytest.mark.parametrize("machine", AUDIT)
def test_what_is_in_the_table_is_refused_and_nothing_else(machine: str) -> None:
    calls = refused(shared=False, own_files=False, signals=False)
    steps = seccomp.assembled(seccomp.program(calls, machine))
    plain = {number_of(call, machine): call.error for call in calls if not call.checks}
    checked = {number_of(call, machine) for call in calls if call.checks}
    for number in range(system_calls.NEWEST + 1):
        if number not in checked:
            wanted = ERROR | plain[number] if number in plain else ALLOW
            assert verdict(steps, AUDIT[machine], number) == wanted, number
    for number in (system_calls.NEWEST + 1, 467, 1000, 0x3FFFFFFF):
        assert verdict(steps, AUDIT[machine], number) == ENOSYS


@pytest.mark.parametrize("machine", AUDIT)
def test_ordinary_calls_are_allowed(machine: str) -> None:
    for name, numbers in ALLOWED.items():
        assert answer(machine, numbers[machine == "arm64"]) == ALLOW, name


def test_another_machines_numbering_ends_the_process() -> None:
    for machine, other in (
        ("x86_64", 0x40000003),
        ("x86_64", AUDIT["arm64"]),
        ("arm64", AUDIT["x86_64"]),
        ("arm64", 0x40000028),
    ):
        assert verdict(seccomp.assembled(seccomp.program(refused(), machine)), other, 0) == KILL
    for number in (0x40000000, 0x40000000 | 39, 0xFFFFFFFF):
        assert answer("x86_64", number) == KILL


@pytest.mark.parametrize("machine", AUDIT)
def test_arguments_decide(machine: str) -> None:
    def of(name: str, *args: int, **how: bool) -> int:
        number = number_of(EVERY[name], machine)
        assert number is not None
        return answer(machine, number, *args, **how)

    for flag in (0x20000, 0x00800000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert of("clone", flag | 17) == EPERM
    assert (
        of("clone", 17) == of("clone", 0x003D0F00) == of("clone", 0x1200011) == ALLOW
    )  # fork, pthread_create, fork of glibc
    assert of("clone3") == ENOSYS
    assert of("socketpair", 1) == ALLOW and of("socketpair", 2) == EPERM
    assert of("socket", 1, 1) == of("socket", 2, 1) == EPERM
    assert of("socket", 2, 1, sockets=True) == of("socket", 2, 1 | 0x80800, sockets=True) == ALLOW
    assert of("socket", 1, 1, sockets=True) == of("socket", 10, 1, sockets=True) == ALLOW
    for family, kind in ((2, 2), (2, 3), (16, 3), (17, 3), (40, 1), (38, 5)):
        assert of("socket", family, kind, sockets=True) == EPERM
    assert of("prlimit64", 0) == ALLOW and of("prlimit64", 1) == EPERM and of("prlimit64", 0xFFFFFFFF) == EPERM
    assert of("sched_setaffinity", 0) == ALLOW and of("sched_setaffinity", 77) == EPERM
    assert of("ioctl", 0, 0x5412) == of("ioctl", 1, 0x541C) == EPERM and of("ioctl", 0, 0x5401) == ALLOW
    assert of("ioctl", 0, 0x5412 | 1 << 32) == EPERM, "the kernel looks at the low half alone"
    assert of("mknodat", 0, 0, 0x2000 | 0o666) == of("mknodat", 0, 0, 0x6000) == EPERM
    assert of("mknodat", 0, 0, 0x1000 | 0o600) == of("mknodat", 0, 0, 0x8000) == of("mknodat", 0, 0, 0o600) == ALLOW


@pytest.mark.parametrize("machine", AUDIT)
def test_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    path = next((path for path in HEADERS[machine] if path.exists()), None)
    if path is None:
        pytest.skip("the kernel's headers are not installed")
    known = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text())}
    assert len(known) > 250
    lists = (refused(shared=False, own_files=False, signals=False), refused(sockets=True))
    wrong = [
        (call.name, number, known.get(call.name))
        for calls in lists
        for call in calls
        if (number := number_of(call, machine)) is not None and known.get(call.name, number) != number
    ]
    assert not wrong
    named = {call.name for calls in lists for call in calls if number_of(call, machine) is not None}
    assert len(named & set(known)) > 0.85 * len(named)
    missing = {call.name for calls in lists for call in calls if number_of(call, machine) is None} & set(known)
    assert not missing, "these exist on this machine"


def test_no_call_stands_in_two_lines() -> None:
    for calls in (refused(shared=False, own_files=False, signals=False), refused(sockets=True)):
        for machine in AUDIT:
            numbers = [number for call in calls if (number := number_of(call, machine)) is not None]
            assert len(set(numbers)) == len(numbers)


def test_a_level_without_namespaces_refuses_more() -> None:
    shmget = SystemCall("shmget", 29, 194)
    assert answer("x86_64", shmget.x86_64 or 0) == ALLOW
    assert answer("x86_64", shmget.x86_64 or 0, shared=False) == EPERM
    assert answer("x86_64", 90) == ALLOW and answer("x86_64", 90, own_files=False) == EPERM  # chmod
    assert answer("x86_64", 62) == ALLOW and answer("x86_64", 62, signals=False) == EPERM  # kill
