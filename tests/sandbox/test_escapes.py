"""The escape suite: every attempt is held at every level, and succeeds where nothing holds it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from sandbox_levels import NO_TRACING, USER

from tidemill.sandbox import bubblewrap
from tidemill.sandbox.escapes import suite
from tidemill.sandbox.escapes.escape_tools import MARK
from tidemill.sandbox.escapes.stage import EscapeStage, staged
from tidemill.sandbox.escapes.suite import EscapeAttempt, attempts, program_of, run_suite, small_limits
from tidemill.sandbox.interpreters import interpreter
from tidemill.sandbox.sandbox_pool import Sandbox
from tidemill.sandbox.users import reachable

FEW = (
    "file_outside",
    "written_outside",
    "tcp",
    "udp",
    "key_ring",
    "signal_victim",
    "memory_file",
    "calls_of_32_bits",
    "daemon",
)
NOT_EVERYWHERE = {  # what even root cannot do on some machines, as the kernel has not got it or the machine is virtual
    "accounting", "calls_of_32_bits", "calls_of_x32", "debugging_files", "disks", "first_process_environment",
    "input_and_output_ports", "kernel_addresses", "kernel_crypto", "kernel_module", "memory_device", "others_namespace",
    "pair_of_another_family", "performance_counter", "ping", "swap_space", "system_request", "tcp_by_6", "terminal_input",
    "virtual_machine", "control_group",
}  # fmt: skip
FAST = [attempt for attempt in attempts() if attempt.name in FEW]
LIMIT_S = 60.0


def test_there_are_enough_attempts() -> None:
    assert len(attempts()) >= 120 and len({each.name for each in attempts()}) == len(attempts())
    assert all(attempt.aim.endswith(".") or ":" in attempt.aim for attempt in attempts())


async def test_some_attempts_are_held(sandbox: Sandbox) -> None:
    found = await run_suite(sandbox, FAST)
    assert len(found) == len(FEW)
    assert not [finding for finding in found if finding.escaped]


@pytest.mark.runs
async def test_every_attempt_is_held(sandbox: Sandbox) -> None:
    found = await run_suite(sandbox)
    assert len(found) == len(attempts())
    escaped = [f"{finding.attempt.name}: {finding.said}" for finding in found if finding.escaped]
    assert not escaped, "\n".join(escaped)


async def test_limits_alone_hold_nothing() -> None:
    """Without isolation the suite says so, for each of these attempts."""
    chosen = [attempt for attempt in attempts() if attempt.name in ("file_outside", "tcp", "udp", "link_out", "way_up")]
    async with Sandbox(replace(small_limits("limits"), seconds=30.0)) as sandbox:
        found = await run_suite(sandbox, chosen)
    assert len(found) == 5 and all(finding.escaped for finding in found), found


async def test_the_supervisor_is_closed(sandbox: Sandbox) -> None:
    names = ("supervisors_memory", "supervisors_descriptors", "supervisors_limits", "trace_supervisor", "stop_supervisor")
    found = await run_suite(sandbox, [attempt for attempt in attempts() if attempt.name in names])
    assert len(found) == len(names) and not [finding for finding in found if finding.escaped], found


async def test_a_sandbox_that_breaks_counts_as_an_escape(sandbox: Sandbox) -> None:
    async with staged(sandbox.settings) as stage:
        for pid in sandbox.processes:
            os.kill(pid, signal.SIGKILL)
        found = await suite.tried(sandbox, stage, FAST[0])
    assert found.escaped and "broke the sandbox" in found.said


UNPRIVILEGED = """
import asyncio, sys
from tidemill.sandbox import landlock
from tidemill.sandbox.escapes.suite import attempts, run_suite, small_limits
from tidemill.sandbox.interpreters import interpreter
from tidemill.sandbox.sandbox_pool import Sandbox
from tidemill.sandbox.users import reachable
abi, level, *names = sys.argv[1:]
landlock.abi = (lambda found: lambda: min(found, int(abi)))(landlock.abi())
async def main():
    async with Sandbox(small_limits(level)) as sandbox:
        chosen = [each for each in attempts() if not names or each.name in names]
        for found in await run_suite(sandbox, chosen):
            print("ESCAPED" if found.escaped else "held", found.attempt.name, found.said[:200].replace("\\n", "/"))
asyncio.run(main())
"""
OF_OLD_KERNELS = (
    "signal_victim",
    "end_supervisor",
    "stop_supervisor",
    "truncated",
    "file_outside",
    "changed_rights",
    "abstract_name",
    "tcp",
)


@pytest.mark.runs
@pytest.mark.skipif(os.getuid() != 0, reason="the other tests are run without root already")
@pytest.mark.parametrize(("abi", "names"), [(99, ()), (5, OF_OLD_KERNELS), (3, OF_OLD_KERNELS)])
def test_attempts_are_held_without_root(level: str, abi: int, names: tuple[str, ...]) -> None:
    """By a user who owns the files and the process that are attacked, and by versions of Landlock that know less."""
    python, root = interpreter("", USER), Path(__file__).parents[2]
    if not reachable(str(root / "tidemill"), USER) or subprocess.run([python, "-c", "import tomllib"]).returncode:
        pytest.skip("the package or a Python of 3.11 is not to be reached by another user")
    environment = {"PYTHONPATH": str(root), "PATH": os.environ["PATH"], "HOME": "/"}
    if found := bubblewrap.bwrap(USER):
        environment["PATH"] = f"{os.path.dirname(found)}:{environment['PATH']}"
    command = [python, "-s", "-B", "-c", UNPRIVILEGED, str(abi), level, *names]
    how = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/", "env": environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **how)  # type: ignore[call-overload]
    if NO_TRACING in done.stderr:
        pytest.skip(NO_TRACING)
    lines = done.stdout.splitlines()
    assert len(lines) == (len(names) or len(attempts())), done.stdout + done.stderr
    assert not [line for line in lines if line.startswith("ESCAPED")]


@pytest.mark.runs
@pytest.mark.skipif(os.getuid() != 0, reason="many of these need root where nothing holds them")
async def test_attempts_succeed_without_a_sandbox() -> None:
    tried, failed = 0, []
    async with staged(small_limits("limits")) as stage:
        for attempt in attempts():
            if attempt.harmful or attempt.name in NOT_EVERYWHERE:
                continue
            tried += 1
            if MARK not in (said := await unconfined(stage, attempt)):
                failed.append(f"{attempt.name}: {said}")
    assert tried >= 80
    assert not failed, "\n".join(failed)


async def unconfined(stage: EscapeStage, attempt: EscapeAttempt) -> str:
    """What an attempt says in a process that nothing holds. A shell above it is what attempts on the supervisor hit."""
    await stage.start_victim()
    with tempfile.TemporaryDirectory(prefix="tidemill-stage-", dir="/tmp") as folder:
        made = program_of(attempt)
        files = {**made.files, "work-1/of-another-execution": stage.facts["secret"].encode()}
        for name, content in files.items():
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, name).write_bytes(content)
        pipe = asyncio.subprocess.PIPE
        how = {"stdin": pipe, "stdout": pipe, "stderr": asyncio.subprocess.STDOUT, "cwd": folder, "close_fds": False}
        shell = ('"$0" -S -B -c "$1"; :', sys.executable, made.python)
        process = await asyncio.create_subprocess_exec("sh", "-c", *shell, **how)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(stage.facts).encode())
        process.stdin.close()
        said = (await asyncio.wait_for(process.stdout.readline(), LIMIT_S)).decode()
        with suppress(ProcessLookupError):
            process.kill()
        await asyncio.wait_for(process.wait(), LIMIT_S)
    return said
