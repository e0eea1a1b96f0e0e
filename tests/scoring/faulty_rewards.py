"""Reward functions that misbehave, each in its own way. Loaded by path, in scoring workers."""

import ctypes
import os
import subprocess
import sys
import time

from tidemill.types import Score


def good(completion: str, answer: str) -> float:
    return float(completion == answer)


def sleeps(completion: str, pids: str = "") -> float:
    time.sleep(600)
    return 1.0


def spins(completion: str) -> float:
    while True:
        pass


def holds_the_interpreter(completion: str) -> float:
    import re

    return float(bool(re.match(r"(a+)+$", "a" * 60 + "b")))


def exits(completion: str) -> float:
    os._exit(0)


def sys_exits(completion: str) -> float:
    sys.exit(0)


def raises(completion: str) -> float:
    raise KeyError("no such column")


def nan(completion: str) -> float:
    return float("nan")


def inf(completion: str) -> float:
    return float("inf")


def string(completion: str) -> str:
    return "1.0"


def long_string(completion: str) -> str:
    return "x" * 5_000_000


def too_much(completion: str) -> Score:
    return Score(1.0, {f"part {i}": 0.0 for i in range(100_000)})


def nothing(completion: str) -> None:
    return None


def segfaults(completion: str) -> float:
    ctypes.string_at(0)
    return 1.0


def prints(completion: str) -> float:
    print("noise" * 2_000_000)
    sys.stdout.flush()
    os.write(1, b"\xff\xff\xff\x7f and more noise, past sys.stdout")
    return 0.5


def writes_everywhere(completion: str) -> float:
    """Finds the frames' own descriptor and writes rubbish into it."""
    for number in range(3, 32):
        try:
            os.write(number, b"\xff\xff\xff\x7f" * 64)
        except OSError:
            continue
    return 1.0


def forks_and_both_return(completion: str) -> float:
    return float(os.fork() == 0)


def dies_with_a_child_left(completion: str, pids: str) -> float:
    if os.fork() == 0:
        _note(pids, os.getpid())
        time.sleep(600)
    while not os.path.exists(pids):
        time.sleep(0.01)
    os._exit(3)


def forks_and_sleeps(completion: str, pids: str) -> float:
    if os.fork() == 0:
        _note(pids, os.getpid())
    time.sleep(600)
    return 1.0


def leaves_a_process(completion: str, pids: str) -> float:
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    _note(pids, child.pid)
    return 1.0


def leaves_the_group(completion: str, pids: str) -> float:
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
    _note(pids, child.pid)
    time.sleep(600)
    return 1.0


def eats_memory(completion: str) -> float:
    return float(len(bytearray(8 << 30)))


def group(completions: list[str], answer: list[str], **kwargs) -> list[float | None]:
    return [None if not c else float(c == a) for c, a in zip(completions, answer, strict=True)]


def group_short(completions: list[str], **kwargs) -> list[float]:
    return [1.0]


calls = 0


def counts(completion: str) -> float:
    global calls
    calls += 1
    return calls


def _note(path: str, pid: int) -> None:
    with open(path, "a") as file:
        file.write(f"{pid}\n")
