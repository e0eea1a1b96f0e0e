"""A machine for classic BPF, written from the kernel's description of it, to run filters on made-up system calls."""

from __future__ import annotations

import struct

LD_W_ABS, AND_K, JEQ_K, JGE_K, RET_K = 0x20, 0x54, 0x15, 0x35, 0x06


def verdict(filter_bytes: bytes, machine: int, number: int, *args: int) -> int:
    """What the filter returns for a system call: SECCOMP_RET_*."""
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, machine, 0, *(*args, *[0] * (6 - len(args))))
    steps = list(struct.iter_unpack("=HBBI", filter_bytes))
    place, held = 0, 0
    while True:
        code, true, false, constant = steps[place]
        place += 1
        if code == LD_W_ABS:
            held = struct.unpack_from("<I", data, constant)[0]
        elif code == AND_K:
            held &= constant
        elif code == JEQ_K:
            place += true if held == constant else false
        elif code == JGE_K:
            place += true if held >= constant else false
        elif code == RET_K:
            return constant
        else:
            raise AssertionError(f"no such instruction: {code:#x}")
