"""Reward functions that misbehave, each in its own way. Loaded by path, in scoring workers."""

import ctypes
import os
import signal
import subprocess
import sys
import time

from tidemill.core.types import Score


def good(completion: str, answer: str) -> float:
    return float(completion == answer)


def sleeps(completion: str, pids: str = "") -> float:
    time.sleep(600)
    return 1.0


def stops(completion: str) -> float:
    os.kill(os.getpid(), signal.SIGSTOP)
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
    return Score(1.0, turns=(0.0,) * 200_000)


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


def prints_a_gigabyte(completion: str) -> float:
    line = b"noise" * (1 << 18)
    for _ in range((1 << 30) // len(line)):
        os.write(1, line)
    return 1.0


def returns_a_gigabyte(completion: str) -> str:
    return "x" * (1 << 30)


def returns_a_gigabyte_of_bytes(completion: str) -> bytes:
    return bytes(1 << 30)


def raises_a_gigabyte(completion: str) -> float:
    raise ValueError("x" * (1 << 30))


def nan_part(completion: str) -> Score:
    return Score(1.0, {"format": float("nan")})


def text_part(completion: str) -> Score:
    return Score(1.0, {"format": "good"})  # type: ignore[dict-item]


def complex_score(completion: str) -> Score:
    return Score(True and 1 << 2000)


def recurses(completion: str) -> float:
    def deeper(n: int) -> int:
        return deeper(n + 1) + len(repr(n))

    return deeper(0)


def closes_everything(completion: str) -> float:
    os.closerange(0, 256)
    return 1.0


def stops_itself(completion: str) -> float:
    os.kill(os.getpid(), 19)
    return 1.0


def kills_its_group(completion: str) -> float:
    os.killpg(0, 9)
    return 1.0


def daemonises(completion: str, pids: str) -> float:
    """A grandchild in a session of its own, whose parent is gone."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            _note(pids, os.getpid())
            time.sleep(600)
        os._exit(0)
    os.wait()
    while not os.path.exists(pids):
        time.sleep(0.01)
    return 1.0


def daemonises_and_dies(completion: str, pids: str) -> float:
    daemonises(completion, pids)
    os._exit(0)


def daemonises_and_sleeps(completion: str, pids: str) -> float:
    daemonises(completion, pids)
    time.sleep(600)
    return 1.0


def leaves_a_thread_that_holds_the_interpreter(completion: str) -> float:
    import threading

    threading.Timer(0.2, holds_the_interpreter, [completion]).start()
    return 1.0


def disturbs(completion: str) -> float:
    os.chdir("/")
    os.environ.pop("PATH")
    os.environ["DISTURBED"] = "1"
    sys.stdout = None  # type: ignore[assignment]
    sys.setrecursionlimit(333)
    import signal

    signal.setitimer(signal.ITIMER_REAL, 0.3)
    return 1.0


def is_undisturbed(completion: str) -> float:
    print("to stdout")
    time.sleep(0.6)
    return float(
        os.getcwd() != "/" and "PATH" in os.environ and "DISTURBED" not in os.environ and sys.getrecursionlimit() > 333
    )


def waits_passively(completion: str) -> float:
    return float(os.environ.get("OMP_WAIT_POLICY") == "PASSIVE")


KINDS = {
    "sleeps": sleeps, "segfaults": segfaults, "exits": exits, "raises": raises, "nan": nan, "inf": inf, "string": string,
    "prints": prints_a_gigabyte, "returns": returns_a_gigabyte, "closes": closes_everything, "stops": stops_itself,
    "forks": daemonises_and_sleeps, "forks and dies": daemonises_and_dies,
}  # fmt: skip


def now_and_then(completion: str, fault: str, pids: str) -> float:
    """For a run: half of the replies to each task meet its fault, the others are judged."""
    from zlib import crc32

    drawn = crc32(completion.encode())
    if drawn % 2:
        return drawn % 100 / 100
    _note(pids + ".calls", os.getpid())
    return KINDS[fault](completion, f"{pids}.{os.getpid()}") if "forks" in fault else KINDS[fault](completion)
