"""Reward `code`: the program in a reply is run in a sandbox, and judged by cases or by tests.

    cases   [{"stdin": "3\\n", "stdout": "9\\n"}, ...]: the program runs once for each, and its output is compared out here
    tests   "assert square(3) == 9", or a list of such texts: they run in a sandbox of their own, and call the program's
            functions in another one (see `remote_objects`)

So no process that runs the policy's code knows what is expected, or says what has passed. A program that ends early, prints
a verdict, changes `assert`, returns an object that equals everything, is late, or floods its output, has failed. It is
imported in reward workers only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tidemill.envs.code_checks
from tidemill.core.errors import SandboxFailed
from tidemill.core.types import InfraError, Outcome, Score, Unscorable
from tidemill.envs.code_checks.code_settings import settings_of, tests_of
from tidemill.envs.code_checks.kept_sandboxes import kept_sandboxes
from tidemill.sandbox.execution import Execution, SandboxedProgram
from tidemill.sandbox.sandbox_pool import Sandbox

FENCE = "```"
LONGEST = 200_000  # characters of a program
MODULES = ("remote_objects", "tested_code")
PACKAGE = tidemill.envs.code_checks.__name__


def score(
    completion: str,
    tests: str | Sequence[str] | None = None,
    cases: Sequence[Mapping[str, str]] | None = None,
    entry_point: str | None = None,
    partial: bool = False,
    sandbox: Any = None,
    budget_s: float = 5.0,
) -> Outcome:
    """1 if the program in the reply passes every check, else 0. partial: the share of checks that it passes.

    entry_point: the only name that tests take from the program. budget_s: seconds after which no further check begins; those
    that are left have failed.
    """
    if not tests and not cases:
        return Unscorable("the task has neither tests nor cases")
    code = program_in(completion)
    if not code.strip() or len(code) > LONGEST:
        return Score(0.0)
    checks = _Checks(code, list(cases or ()), tests_of(tests), entry_point or "", partial, time.monotonic() + budget_s)
    try:
        settings = settings_of({} if sandbox is None else sandbox)
        passed, count = kept_sandboxes().use(settings, checks.made)
    except SandboxFailed as failed:
        return InfraError(str(failed))
    return Score(passed / count) if partial else Score(float(passed == count))


def program_in(reply: str) -> str:
    """The last fenced block of a reply, also one that has no end; the whole reply if it has none."""
    found, block = None, None
    for line in reply.splitlines(keepends=True):
        if line.lstrip(" ").startswith(FENCE):
            block = [] if block is None else None
            found = block if block is not None else found
        elif block is not None:
            block.append(line)
    return reply if found is None else "".join(found)


class _Checks:
    """The checks of one program."""

    def __init__(
        self, code: str, cases: list[Mapping[str, str]], tests: list[str], entry_point: str, partial: bool, deadline: float
    ) -> None:
        self._code, self._cases, self._tests = code, cases, tests
        self._entry_point, self._partial, self._deadline = entry_point, partial, deadline

    async def made(self, sandbox: Sandbox) -> tuple[int, int]:
        """(passed, all). Without partial scores the first failure ends it."""
        count, passed = len(self._cases) + len(self._tests), 0
        if self._cases:
            passed = await self._by_cases(sandbox)
        if self._tests and (self._partial or passed == len(self._cases)) and time.monotonic() < self._deadline:
            passed += await self._by_tests(sandbox)
        return passed, count

    async def _by_cases(self, sandbox: Sandbox) -> int:
        passed, program = 0, SandboxedProgram(self._code)
        for case in self._cases:
            stdin = case.get("stdin", "").encode(errors="surrogatepass")
            right = same_output(await sandbox.run(program, stdin), case["stdout"])
            passed += right
            if not (right or self._partial) or time.monotonic() > self._deadline:
                break
        return passed

    async def _by_tests(self, sandbox: Sandbox) -> int:
        tested = _program(f"serve_code({self._code!r})")
        tester = _program(f"run_tests({self._tests!r}, {self._entry_point!r})")
        execution = await sandbox.run_pair(tester, tested)
        if execution.limit:
            return 0
        try:
            verdicts = json.loads(execution.stdout)
            return sum(said == "" for said in verdicts)
        except (ValueError, TypeError):
            last = execution.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            how = f"the process that ran them {execution.describe()}; {last:.200}"
            raise SandboxFailed(f"the tests gave no verdict: {how}") from None


def same_output(execution: Execution, expected: str) -> bool:
    """True when a program ended well and wrote what was expected, spaces at the ends of lines and of the text aside."""
    return execution.succeeded and _lines(execution.stdout.decode(errors="replace")) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _program(last_line: str) -> SandboxedProgram:
    name = last_line.partition("(")[0]
    return SandboxedProgram(f"from {PACKAGE}.tested_code import {name}\n{last_line}\n", files=_files())


@cache
def _files() -> dict[str, bytes]:
    folder = Path(tidemill.envs.code_checks.__path__[0])
    return {f"{PACKAGE.replace('.', '/')}/{name}.py": (folder / f"{name}.py").read_bytes() for name in MODULES}
