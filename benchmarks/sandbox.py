"""Cost of a sandbox: seconds of a program at each level, alone and many at a time, beside a plain subprocess.

    python benchmarks/sandbox.py [--programs 500] [--at-once 16]

Prints a table and writes `results/sandbox.json`. "first" starts a sandbox for one program, "next" uses one that has run
others before, "checks" is the reward `code` for a reply with two cases, and with a test. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

from harness import save, table

from tidemill.core.errors import ConfigError
from tidemill.envs.rewards.code import score
from tidemill.sandbox.execution import SandboxedProgram
from tidemill.sandbox.interpreters import interpreter
from tidemill.sandbox.sandbox_pool import Sandbox
from tidemill.sandbox.sandbox_settings import LEVELS, SandboxSettings

SOURCE = "print(int(input()) ** 2)"
REPEATS = 20
FIGURES = ("first_ms", "next_ms", "all_s", "cases_ms", "tests_ms")
CASES = [{"stdin": "3\n", "stdout": "9"}, {"stdin": "4\n", "stdout": "16"}]
TESTED, TEST = "def square(x): return x * x", "assert square(3) == 9"


async def typical(do: Callable[[], Awaitable[Any]]) -> float:
    """Median milliseconds of a call, the first one left out."""
    await do()
    seconds = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        await do()
        seconds.append(time.perf_counter() - begun)
    return 1000 * median(seconds)


async def measured(level: str, programs: int, at_once: int) -> dict[str, float]:
    program, one = SandboxedProgram(SOURCE), SandboxSettings(level=level, warm=0, seconds=60.0)  # type: ignore[arg-type]

    async def first() -> None:
        async with Sandbox(one) as sandbox:
            assert (await sandbox.run(program, b"3")).stdout == b"9\n"

    found = {"first_ms": await typical(first)}
    many = SandboxSettings(level=level, at_once=at_once, seconds=60.0)  # type: ignore[arg-type]
    async with Sandbox(many) as sandbox:
        found["next_ms"] = await typical(lambda: sandbox.run(program, b"3"))
        begun = time.perf_counter()
        done = await asyncio.gather(*(sandbox.run(program, b"%d" % number) for number in range(programs)))
        found["all_s"] = time.perf_counter() - begun
        assert all(each.stdout == b"%d\n" % number**2 for number, each in enumerate(done)), "a program failed"
    options = {"level": level, "warm": 0, "seconds": 60.0}

    async def judged(reply: str, **checks: Any) -> None:
        outcome = await asyncio.to_thread(score, reply, sandbox=options, budget_s=60.0, **checks)
        assert getattr(outcome, "value", None) == 1.0, outcome

    found["cases_ms"] = await typical(lambda: judged(SOURCE, cases=CASES))
    found["tests_ms"] = await typical(lambda: judged(TESTED, tests=TEST))
    return found


def plain() -> float:
    """Median milliseconds of the same program as a subprocess that nothing isolates."""
    seconds, command = [], [interpreter("", 0), "-s", "-S", "-B", "-c", SOURCE]
    for _ in range(REPEATS):
        begun = time.perf_counter()
        subprocess.run(command, input=b"3", capture_output=True, timeout=60, check=True)
        seconds.append(time.perf_counter() - begun)
    return 1000 * median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=16)
    given = parser.parse_args()
    rows = [{"level": "a plain subprocess", "first_ms": plain()} | dict.fromkeys(FIGURES[1:], "")]
    for level in LEVELS:
        try:
            rows.append({"level": level} | asyncio.run(measured(level, given.programs, given.at_once)))
        except ConfigError as why:
            print(f"{level}: {why}")
    print(table(rows))
    save("sandbox", rows, {})


if __name__ == "__main__":
    main()
