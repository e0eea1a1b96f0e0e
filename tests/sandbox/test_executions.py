"""Programs in sandboxes of both levels: what comes of them, their limits, and that nothing is left."""

from __future__ import annotations

import asyncio
import glob
import os
import tempfile

import pytest
from sandbox_levels import USER

from tidemill.core.errors import ConfigError, SandboxFailed
from tidemill.sandbox import bubblewrap, landlock, sandbox_pool, supervisor_process
from tidemill.sandbox.execution import SandboxedProgram
from tidemill.sandbox.sandbox_pool import Sandbox
from tidemill.sandbox.sandbox_settings import SandboxSettings

P = SandboxedProgram


async def test_a_program_has_its_input_files_and_environment(sandbox: Sandbox) -> None:
    source = "import os, sys; print(input(), open('a/b.txt').read(), os.environ['X'], sys.argv, os.listdir())"
    done = await sandbox.run(P(source, argv=("one",), files={"a/b.txt": b"text"}, env={"X": "y"}), b"told\n")
    assert done.stdout.decode() == "told text y ['main.py', 'one'] ['a']\n" and done.succeeded
    assert done.level == sandbox.level and 1 << 20 < done.peak_bytes < 1 << 30


async def test_a_command_runs_by_its_path(sandbox: Sandbox) -> None:
    done = await sandbox.run(P(argv=("sh", "-c", "cat; echo no >&2; exit 3")), b"in")
    assert (done.stdout, done.stderr, done.status, done.limit) == (b"in", b"no\n", 3, "")
    missing = await sandbox.run(P(argv=("no-such-program",)))
    assert missing.status == 126 and b"FileNotFoundError" in missing.stderr
    assert (await sandbox.run(P(argv=("sh", "-c", "kill -SEGV $$")))).status == -11


async def test_source_ends_as_in_an_interpreter_of_its_own(sandbox: Sandbox) -> None:
    for source, status, out, err in (
        ("print('a', end='')", 0, b"a", b""),
        ("raise SystemExit(4)", 4, b"", b""),
        ("exit('why')", 1, b"", b"why\n"),
        ("import atexit; atexit.register(print, 'last')", 0, b"last\n", b""),
        ("import threading; threading.Timer(0.05, print, ['late']).start()", 0, b"late\n", b""),
        ("import os; os.abort()", -6, b"", b""),
        ("x = '\ud800'", 1, b"", None),
        ("def f(:", 1, b"", None),
    ):
        done = await sandbox.run(P(source))
        assert (done.status, done.stdout) == (status, out), (source, done)
        assert err is None or done.stderr == err
    trace = (await sandbox.run(P("def f():\n    return 1 / 0\nf()"))).stderr.decode()
    assert trace.startswith("Traceback") and "return 1 / 0" in trace and "supervisor" not in trace and "become" not in trace


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        ("while True: pass", "cpu_seconds"),
        ("import time; time.sleep(60)", "seconds"),
        ("while True: print('x' * 1000)", "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
    ],
)
async def test_a_limit_ends_a_program_and_is_named(level: str, source: str, limit: str) -> None:
    seconds = 1.0 if limit == "seconds" else 600.0
    settings = SandboxSettings(level=level, seconds=seconds, cpu_seconds=1, output_kb=8, warm=0)
    async with Sandbox(settings) as sandbox:
        done = await sandbox.run(P(source))
        assert done.limit == limit and not done.succeeded and done.describe().endswith(limit.replace("_", " "))
        assert len(done.stdout) <= 8192 and len(done.stderr) <= 8192
        if seconds > 1:
            assert (await sandbox.run(P("print(1)"))).stdout == b"1\n", "the next one runs"


async def test_a_large_input_is_given_whole_and_may_be_left(sandbox: Sandbox) -> None:
    done = await sandbox.run(P("import sys; print(len(sys.stdin.read()))"), b"x" * 3_000_000)
    assert done.stdout == b"3000000\n"
    assert (await sandbox.run(P("print('no')"), b"x" * 3_000_000)).stdout == b"no\n"


async def test_one_program_finds_nothing_of_another(sandbox: Sandbox) -> None:
    leave = "import os; open('left', 'w').write('x'); os.chmod('..', 0)"
    for _ in range(3):
        await sandbox.run(P(f"try:\n    exec({leave!r})\nexcept OSError: pass"))
        look = "import os; print(os.listdir('.'), [n for n in os.listdir('..') if n != os.path.basename(os.getcwd())])"
        found = await sandbox.run(P(f"try:\n    exec({look!r})\nexcept OSError: print([])"))
        assert found.stdout in (b"[] []\n", b"[]\n"), found


async def test_a_process_that_is_left_behind_is_ended(sandbox: Sandbox) -> None:
    leave = "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(600)\nos._exit(0)"
    assert (await sandbox.run(P(leave))).succeeded, "and its pipes, which the other one has, are read to their end"
    count = "import os; print(sum(n.isdigit() for n in os.listdir('/proc')))"
    if sandbox.level == "bubblewrap":
        assert (await sandbox.run(P(count))).stdout == b"2\n", "the supervisor and itself"


async def test_a_pair_is_connected_and_ends_with_its_first(sandbox: Sandbox) -> None:
    first = P("import os; os.write(3, input().encode()); print(os.read(3, 100))")
    second = P("import os, time; os.write(3, os.read(3, 100) * 2); time.sleep(60)")
    assert (await sandbox.run_pair(first, second, b"ab\n")).stdout == b"b'abab'\n"
    ended = await sandbox.run_pair(P("import os; print(os.read(3, 1))"), P("import os; os._exit(0)"))
    assert ended.stdout == b"b''\n", "the end of the second one is seen"


async def test_nothing_is_left_when_a_sandbox_is_closed_or_given_up(level: str) -> None:
    async with Sandbox(SandboxSettings(level=level, warm=2)) as sandbox:
        await sandbox.run(P("print(1)"))
        task = asyncio.create_task(sandbox.run(P("import time; time.sleep(60)")))
        while not any(b"supervisor" in line for line in command_lines()):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await sandbox.run(P("print(2)"))).stdout == b"2\n"
    assert not [line for line in command_lines() if b"tidemill.sandbox.supervisor" in line]
    assert not [path for path in own_folders() if os.listdir(path)]


def command_lines() -> list[bytes]:
    """Command lines of this process's children."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        children = file.read().split()
    found = []
    for child in children:
        try:
            with open(f"/proc/{child}/cmdline", "rb") as file:
                found.append(file.read())
        except OSError:
            continue
    return found


def own_folders() -> list[str]:
    return glob.glob(os.path.join(tempfile.gettempdir(), "tidemill-sandbox-*", "work-*"))


async def test_a_supervisor_that_is_gone_is_no_result(level: str) -> None:
    async with Sandbox(SandboxSettings(level=level, warm=1, at_once=1)) as sandbox:
        (pid,) = sandbox.processes
        os.kill(pid, 9)
        with pytest.raises(SandboxFailed, match=level):
            await sandbox.run(P("print(1)"))
        assert (await sandbox.run(P("print(1)"))).stdout == b"1\n"


@pytest.mark.runs
async def test_500_programs_16_at_once(level: str) -> None:
    async with Sandbox(SandboxSettings(level=level, at_once=16, seconds=60.0)) as sandbox:
        done = await asyncio.gather(*(sandbox.run(P("print(int(input()) ** 2)"), b"%d" % n) for n in range(500)))
    assert [int(each.stdout) for each in done] == [n * n for n in range(500)]


# --- levels and settings -------------------------------------------------------------------------------------------------


async def test_without_any_level_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "bwrap", lambda user: "")
    monkeypatch.setattr(landlock, "abi", lambda: 0)
    with pytest.raises(
        ConfigError, match=r"no sandbox works here \(.*bubblewrap.*Landlock.*pip install 'tidemill\[sandbox\]'"
    ):
        async with Sandbox():
            pass


async def test_the_next_level_is_taken_only_by_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "bwrap", lambda user: "")
    if supervisor_process.reason_against("landlock", USER):
        pytest.skip("no Landlock")
    async with Sandbox() as sandbox:
        assert sandbox.level == "landlock"
    with pytest.raises(ConfigError, match=r"there is no bwrap|only root"):
        async with Sandbox(SandboxSettings(level="bubblewrap")):
            pass


async def test_limits_alone_are_asked_for_by_name() -> None:
    async with Sandbox(SandboxSettings(level="limits", seconds=600.0, cpu_seconds=1)) as sandbox:
        assert sandbox.level == "limits" and "limits" not in sandbox_pool.LEVELS
        assert (await sandbox.run(P("while True: pass"))).limit == "cpu_seconds"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"level": "docker"}, "level 'docker': expected one of auto, bubblewrap, landlock, limits"),
        ({"seconds": 0}, "seconds = 0: expected a number of at least 0.05"),
        ({"cpu_seconds": 1.5}, "cpu_seconds = 1.5"),
        ({"memory_mb": True}, "memory_mb = True"),
        ({"readable": ("relative",)}, "'relative' is not the absolute path"),
        ({"cores": 3}, "no setting 'cores': it has level, seconds"),
    ],
)
def test_settings_that_cannot_be_meant(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        SandboxSettings.from_options(options)
    assert said in str(raised.value)


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "."])
def test_files_of_a_program_lie_below_its_folder(name: str) -> None:
    with pytest.raises(ValueError, match="below its folder"):
        P("1", files={name: b""})
