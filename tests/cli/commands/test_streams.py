"""What becomes of a command whose standard output is closed, full, not there, or knows few characters."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.cli import main
from tidemill.cli.commands import safe_output, screen
from tidemill.cli.commands.safe_output import Lenient
from tidemill.observability.safe_text import DEGRADE, paragraphs, visible

pytestmark = pytest.mark.runs


def stream(descriptor: int, encoding: str = "utf-8") -> tuple[io.TextIOWrapper, list[OSError]]:
    lost: list[OSError] = []
    raw = Lenient(descriptor, lost.append)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=encoding, errors=DEGRADE), lost


def test_a_reader_that_leaves_is_not_an_error():
    ours, theirs = os.pipe()
    out, lost = stream(theirs)
    print("first", file=out, flush=True)
    assert os.read(ours, 100) == b"first\n" and not lost
    os.close(ours)
    for _ in range(3):
        print("x" * 100_000, file=out, flush=True)
    assert [each.errno for each in lost] == [errno.EPIPE]  # told once
    out.detach().detach()
    os.close(theirs)


def test_a_pipe_that_does_not_block_is_waited_for():
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    out, lost = stream(theirs)
    reader = subprocess.Popen([sys.executable, "-c", "import sys; print(len(sys.stdin.read()))"], stdin=ours, stdout=-1)
    os.close(ours)
    print("x" * 1_000_000, file=out, flush=True)  # more than a pipe holds
    out.detach().detach()
    os.close(theirs)
    assert reader.communicate(timeout=30)[0] == b"1000001\n" and not lost


COMMAND = f"exec {sys.executable} -m tidemill.cli {{}}"


@pytest.mark.parametrize(
    ("shell", "status", "out", "err"),
    [
        ("settings eval | head -1; exit ${PIPESTATUS[0]}", 0, "  eval.every", ""),
        ("settings eval >&-", 0, "", ""),
        ("settings eval <&- >&- 2>&-", 0, "", ""),
        ("settings eval > /dev/full", 1, "", "standard output cannot be written (No space left on device)"),
        ("why nowhere >&-", 2, "", "error: nowhere is not a run"),
        ("why nowhere 2>&- >&-", 2, "", ""),
        ("why nowhere > /dev/full 2>&1", 2, "", ""),
    ],
)
def test_commands_and_their_streams(shell, status, out, err, tmp_path: Path):
    """`python -m tidemill.cli` is the command line, too."""
    if "/dev/full" in shell and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    line = COMMAND.format(shell).replace("exec ", "") if "|" in shell else COMMAND.format(shell)
    said = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert said.returncode == status
    assert said.stdout.startswith(out) and (said.stdout.count("\n") == 1 if out else not said.stdout)
    assert said.stderr.startswith(err) and said.stderr.count("\n") <= 1


def test_a_stream_that_is_closed_keeps_other_files_out_of_its_number(tmp_path: Path):
    """Else what is printed would land in the next file that is opened: the ledger, say."""
    code = (
        "from tidemill.cli.commands.safe_output import guard; guard()\n"
        f"f = open({str(tmp_path / 'ledger')!r}, 'w'); import os; print('stray'); os.write(1, b'stray'); f.close()"
    )
    subprocess.run(["bash", "-c", f'exec {sys.executable} -c "$0" >&- 2>&-', code], check=True, timeout=60)
    assert (tmp_path / "ledger").read_text() == ""


@pytest.mark.parametrize(
    ("encoding", "seen"), [("ascii", "|dlogp| <=1 - x ^[ \\n ?"), ("latin-1", "|dlogp| <=1 · × ^[ \\n ?")]
)
def test_characters_degrade(encoding, seen):
    held = io.BytesIO()
    out = io.TextIOWrapper(held, encoding=encoding, errors=DEGRADE)
    out.write(f"|Δlogp| ≤1 · × {visible(chr(27))} {visible(chr(10))} 漢")
    out.flush()
    assert held.getvalue().decode(encoding) == seen


def test_a_standard_stream_of_few_characters_takes_any_text(monkeypatch):
    """Also one that no console wraps, such as standard error, on which the last sentence stands."""
    ours, theirs = os.pipe()
    monkeypatch.setattr(
        "sys.stderr", io.TextIOWrapper(io.FileIO(theirs, "w", closefd=False), encoding="ascii", errors="strict")
    )
    safe_output._lenient("stderr", theirs, lambda _: None)
    main._tell(ValueError("run naïve → is gone"))
    sys.stderr.flush()
    assert os.read(ours, 1000) == b"error: run na?ve -> is gone\n"
    held = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr("sys.stdout", held)
    screen.print_labelled(screen.console(), [("result", "0.500 → 0.750")])
    held.flush()
    assert held.buffer.getvalue().split() == [b"result", b"0.500", b"->", b"0.750"]  # type: ignore[attr-defined]
    for descriptor in (ours, theirs):
        os.close(descriptor)


@pytest.mark.parametrize(
    ("command", "ended", "failure", "status"),
    [
        ("train", 0, errno.ENOSPC, 0),
        ("demo", 0, errno.ENOSPC, 0),
        ("train", 3, errno.ENOSPC, 3),
        ("settings", 0, errno.ENOSPC, 1),
        ("settings", 0, None, 0),
        ("why", 2, errno.ENOSPC, 2),
    ],
)
def test_a_run_on_disk_is_done_whatever_became_of_what_was_printed(monkeypatch, command, ended, failure, status):
    lost = None if failure is None else OSError(failure, os.strerror(failure))
    monkeypatch.setattr(safe_output, "guard", lambda: lambda: lost)
    monkeypatch.setattr(main, "app", lambda: sys.exit(ended))
    monkeypatch.setattr("sys.argv", ["tidemill", command, "x"])
    with pytest.raises(SystemExit) as said:
        main.main()
    assert said.value.code == status


HOSTILE = "\x00\x07\x08\x0b\x0c\r\x1b[2J\x1b]0;t\x07\x7f\x9b31m\x85\u2028\u202e\u2066\ud800"


def test_nothing_visible_moves_a_cursor():
    shown = visible(HOSTILE)
    assert not [c for c in shown if not c.isprintable()] and "[2J" in shown
    shown.encode()  # half a surrogate pair could not be written
    assert visible("plain text, ünïcode 漢字 👍🏽") == "plain text, ünïcode 漢字 👍🏽"


def test_paragraphs_fit_and_long_words_stay_whole():
    path = "/a" * 80
    lines = paragraphs(f"one two three {path} four \x1b[31mred\nsecond", 40)
    assert lines[-1] == "  second" and f"    {path}" in lines and all("\x1b" not in line for line in lines)
    assert all(len(line) <= 40 for line in lines if path not in line)
    assert paragraphs("", 40) == [""]
