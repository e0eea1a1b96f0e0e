"""Programs without a user of their own, whose tasks are traced: none runs beyond the limit, and nothing else changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
from sandbox_levels import NO_TRACING

from tidemill.core.errors import ConfigError, SandboxFailed
from tidemill.sandbox import supervisor_process
from tidemill.sandbox.escapes.suite import LIMITS, small_limits
from tidemill.sandbox.execution import Execution, SandboxedProgram
from tidemill.sandbox.sandbox_pool import Sandbox
from tidemill.sandbox.sandbox_settings import SandboxSettings
from tidemill.sandbox.supervisor_process import GRACE_S, reason_against

MOST = int(LIMITS["processes"])
P = SandboxedProgram


@contextmanager
def no_user() -> Iterator[int]:
    """Have programs run as the user of the tests, root or not."""
    yield 0


@pytest.fixture
def unowned(monkeypatch: pytest.MonkeyPatch) -> None:
    if why := reason_against("landlock", 0):
        pytest.skip(why)
    monkeypatch.setattr(supervisor_process, "claimed_user", no_user)


@pytest.fixture
async def traced(unowned: None) -> AsyncIterator[Sandbox]:
    try:
        async with Sandbox(small_limits("landlock")) as sandbox:
            yield sandbox
    except ConfigError as error:
        if NO_TRACING in str(error):
            pytest.skip(NO_TRACING)
        raise


FORKS = """
import os, sys, time
for _ in range(int(sys.argv[1])):
    if not os.fork():
        time.sleep(60)
print("well", flush=True)
os._exit(0)
"""
THREADS = """
import os, sys, threading, time
threading.stack_size(1 << 16)
for _ in range(int(sys.argv[1])):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("well", flush=True)
os._exit(0)
"""
ORPHANS = """
import os, sys, time
for _ in range(int(sys.argv[1])):
    pid = os.fork()
    if not pid:
        if os.fork():
            os._exit(0)
        os.setsid()
        time.sleep(60)
    os.waitpid(pid, 0)
print("well", flush=True)
os._exit(0)
"""
BOMB = """
import os
while True:
    if not os.fork():
        os.write(1, b"x")
"""


@pytest.mark.parametrize("source", [FORKS, THREADS], ids=["forks", "threads"])
async def test_as_many_as_allowed_and_not_one_more(source: str, traced: Sandbox) -> None:
    for _ in range(3):
        done = await traced.run(P(source, (str(MOST - 1),)))
        assert done.succeeded and done.stdout == b"well\n", done
        done = await traced.run(P(source, (str(MOST),)))
        assert done.limit == "processes" and not done.stdout, done


async def test_orphans_count(traced: Sandbox) -> None:
    done = await traced.run(P(ORPHANS, (str(MOST - 2),)))
    assert done.succeeded and done.stdout == b"well\n", done
    assert (await traced.run(P(ORPHANS, (str(MOST),)))).limit == "processes"


async def test_of_a_bomb_never_more_than_the_limit_run(traced: Sandbox) -> None:
    """Again and again: one attempt does not show a race."""
    for _ in range(25):
        done = await traced.run(P(BOMB))
        assert done.limit == "processes", done
        assert len(done.stdout) < MOST, "each that has run wrote a letter"


WELL = {
    "pipes": "for i in $(seq 60); do seq 9 | cat | cat | sort | tail -1 > /dev/null; done; echo well",
    "many, one after the other": "for i in $(seq 200); do /bin/true; done; echo well",
    "stopped and continued": "sleep 60 & kill -STOP $!; kill -CONT $!; kill $!; wait $!; [ $? = 143 ] && echo well",
    "a child that stops itself": (
        "sh -c 'kill -STOP $$; echo > on' & sleep 0.2; ! [ -e on ] && kill -CONT $! && wait $! && [ -e on ] && echo well"
    ),
    "a signal that is handled": "trap 'echo well; exit 0' USR1; kill -USR1 $$; sleep 60",
    "a child's death": "sh -c 'kill -KILL $$'; [ $? = 137 ] && echo well",
    "in the background": "for i in 1 2 3 4 5 6; do sleep 0.1 & done; wait; echo well",
}


@pytest.mark.parametrize("script", WELL.values(), ids=WELL)
async def test_a_program_notices_nothing(script: str, traced: Sandbox) -> None:
    done = await traced.run(P(argv=("sh", "-c", script)))
    assert done.succeeded and done.stdout == b"well\n", done


BECOMES = """
import os, sys, threading, time
left, source = int(sys.argv[1]) if sys.argv[1:] else 20, open("source.py").read()
if not left:
    print("well", flush=True)
    os._exit(0)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
again = [sys.executable, "-S", "-c", source, str(left - 1)]
threading.Thread(target=os.execv, args=(sys.executable, again)).start()
time.sleep(60)
"""
TIMER = """
import signal
signal.signal(signal.SIGALRM, lambda *_: print("well"))
signal.setitimer(signal.ITIMER_REAL, 0.05)
signal.pause()
"""
SUBPROCESSES = """
import subprocess
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    codes = list(pool.map(lambda code: subprocess.run(["sh", "-c", f"exit {code}"]).returncode, range(60)))
print("well" if codes == list(range(60)) else codes)
"""


@pytest.mark.parametrize("source", [BECOMES, TIMER, SUBPROCESSES], ids=["thread becomes a program", "timer", "subprocesses"])
async def test_a_python_program_notices_nothing(source: str, traced: Sandbox) -> None:
    done = await traced.run(P(source, files={"source.py": source.encode()}))
    assert done.succeeded and done.stdout == b"well\n", done


async def test_status_and_peak_are_those_of_the_program(traced: Sandbox) -> None:
    async def run(source: str) -> Execution:
        return await traced.run(P(source))

    assert (await run("exit(7)")).status == 7
    assert (await run("import os; os.kill(os.getpid(), 15)")).status == -15
    small, large = await run("0"), await run("x = b'x' * (40 << 20)")
    ends = P(argv=("sh", "-c", "for i in 1 2 3 4 5 6 7 8; do /bin/true & done; exit 7"))
    assert [(await traced.run(ends)).status for _ in range(40)] == [7] * 40, "whoever hears of its end"
    assert large.peak_bytes - small.peak_bytes > 35 << 20


FLOOD = """
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: None)
for _ in range(5):
    if not os.fork():
        break
while True:
    os.kill(0, signal.SIGUSR1)
"""


async def test_a_flood_of_signals_ends_at_the_other_limits(unowned: None) -> None:
    async with Sandbox(SandboxSettings(level="landlock", seconds=1.5, cpu_seconds=60)) as sandbox:
        done = await sandbox.run(P(FLOOD))
        assert done.limit == "seconds" and done.seconds < 1.5 + GRACE_S, done


async def test_where_nothing_may_be_traced_no_program_runs(unowned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    text = supervisor_process.sources(False)
    assert "0x4206" in text
    text = text.replace("0x4206", "0x9206")  # a request that the kernel does not know
    monkeypatch.setattr(supervisor_process, "sources", lambda network: text)
    said = r"could not confine the program: .*ptrace"
    with pytest.raises(ConfigError, match=said):
        async with Sandbox(small_limits("landlock")):
            pass
    async with Sandbox(SandboxSettings(level="landlock", warm=0)) as sandbox:
        with pytest.raises(SandboxFailed, match=said):
            await sandbox.run(P("print(1)"))


async def test_what_cannot_be_confined_does_not_run(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = supervisor_process.landlock.ruleset(["/usr"])
    monkeypatch.setattr(supervisor_process.landlock, "ruleset", lambda *_, **__: given | {"handled": [1 << 63]})
    async with Sandbox(SandboxSettings(level=level, warm=0)) as sandbox:  # type: ignore[arg-type]
        with pytest.raises(SandboxFailed, match=r"could not confine the program: OSError: .*landlock_create_ruleset"):
            await sandbox.run(P("print(1)"))
