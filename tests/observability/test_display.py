"""Progress: the columns, the four modes, odd streams."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.observability import display
from tidemill.observability.display import BAR, Display, ProgressDisplay, bar, cells, exponent, line, thousands

STEP = {
    "step": 10.0,
    "reward/mean": 0.5,
    "eval/accuracy": 0.66,
    "length/mean": 6.12,
    "lag/mean": 0.75,
    "lag/max": 1.0,
    "mismatch/lag0_mean": 1.3e-6,
    "version": 10.0,
    "throughput/tokens_per_s": 9812.0,
    "time/controller/rollouts": 0.31,
    "time/controller/train": 0.66,
    "time/controller/ledger": 0.02,
    "time/trainer/train": 0.62,
    "time/trainer/sync": 0.04,
    "time/trainer/wait for rollouts": 0.34,
}


def shown(mode: display.Mode, total: int = 100) -> tuple[ProgressDisplay, io.StringIO]:
    stream = io.StringIO()
    return ProgressDisplay(total, stream, mode), stream


def test_a_plain_line() -> None:
    screen, stream = shown("auto")  # a StringIO is no terminal
    as_protocol: Display = screen
    as_protocol.header(["task: spell"])
    screen.step(STEP)
    screen.step({"step": 11.0})
    screen.evaluated(11, {"accuracy": 0.71875, "n": 128.0, "a/accuracy": 0.5, "b/accuracy": 1.0})
    screen.note("done")
    screen.close()
    header, titles, first, empty, held_out, note = stream.getvalue().splitlines()
    assert (header, note, held_out) == (
        "  task: spell",
        "  done",
        "   11  held-out accuracy 0.719 on 128 tasks (a 0.500, b 1.000)",
    )
    assert titles.split() == [
        "step",
        "reward",
        "held-out",
        "len",
        "lag",
        "|Δlogp|",
        "policy",
        "tok/s",
        *("where", "the", "step's", "time", "went,", "in", "%"),
    ]
    columns, _, spent = " ".join(first.split()).partition(" trainer: ")
    assert columns == "10 0.50 ##### 0.66 6.1 0.8 ≤1 1e-6 v10 ok 9.8k"
    assert spent == "train 62 sync 4 awaits rollouts 34 | controller: ledger 2 awaits trainer 66 rollouts 31"
    assert empty.split() == ["11", *"–––––––", "–"][:10]
    for title in ("reward", "where"):
        assert first[titles.index(title) - 1] == " " != first[titles.index(title)]  # columns begin under their titles
    for title in ("step", "held-out", "|Δlogp|", "policy", "tok/s"):
        end = titles.index(title) + len(title)
        assert first[end - 1] != " " and first[end : end + 1] == " "  # and end under them


def test_json_is_nothing_but_json() -> None:
    screen, stream = shown("json")
    screen.header(["task: spell"])
    screen.step({**STEP, "loss": math.nan})
    screen.evaluated(10, {"accuracy": 0.5, "n": 4})
    screen.note("done")
    screen.close()
    values = [json.loads(row) for row in stream.getvalue().splitlines()]
    assert [v["kind"] for v in values] == ["header", "step", "eval", "note"]
    assert values[1] == {"kind": "step", **STEP, "loss": None} and values[2]["step"] == 10


def test_quiet_says_nothing() -> None:
    screen, stream = shown("quiet")
    screen.header(["a"])
    screen.step(STEP)
    screen.note("b")
    screen.close()
    assert stream.getvalue() == ""


def test_the_bar_follows_rewards_beyond_zero_and_one() -> None:
    screen, stream = shown("plain")
    for reward in (0.5, -1.0, 3.0, 3.0):
        screen.step({"step": 1, "reward/mean": reward})
    bars = [row.count("#") for row in stream.getvalue().splitlines()[1:]]
    assert bars == [BAR // 2, 0, BAR, BAR]
    assert bar(math.nan, (0, 1)) == "–" and bar(None, (0, 1)) == "–"


@pytest.mark.parametrize(
    ("value", "text"), [(1.3e-6, "1e-6"), (0.0, "0"), (0.02, "2e-2"), (9.7e-5, "1e-4"), (math.nan, "–")]
)
def test_exponents(value: float, text: str) -> None:
    assert exponent(value) == text


def test_numbers() -> None:
    assert [thousands(x) for x in (0, 999, 9812, 2_500_000, None)] == ["0", "999", "9.8k", "2.5M", "–"]
    assert line(cells(STEP, (0, 1))).index("trainer: ") <= 80  # a terminal shows where its time went


def test_a_terminal_keeps_milestones_and_shows_the_present_step() -> None:
    stream = io.StringIO()
    screen = ProgressDisplay(100, stream, "live")
    assert screen._live is not None
    recorder = screen._live.console
    recorder.record, recorder.width = True, 130
    screen.header(["task: [spell]"])
    for step in range(1, 9):
        screen.step({**STEP, "step": float(step)})
    screen.evaluated(8, {"accuracy": 0.5, "n": 16})
    screen.close()
    text = recorder.export_text()
    assert "task: [spell]" in text and "held-out accuracy 0.500 on 16 tasks" in text
    kept = [int(m[1]) for m in re.finditer(r"  (\d+)  0\.50 #", text)]
    assert {1, 5} <= set(kept)


LIVE = """
from tidemill.observability.display import ProgressDisplay
with ProgressDisplay(4) as screen:
    screen.header(["task: spell"])
    for step in range(1, 5):
        screen.step({"step": step, "reward/mean": step / 4})
    screen.note("a sentence that is longer than the terminal is wide " * 4 + "and ends here")
"""


def test_in_a_real_terminal() -> None:
    """Through a pseudo-terminal: live, every milestone once, long notes whole, and the cursor given back."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", LIVE], stdout=theirs, stderr=subprocess.PIPE, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    seen = b""
    try:
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux says so when the other side is closed
                break
            if not part:
                break
            seen += part
    finally:
        os.close(ours)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    text = seen.decode()
    assert "\x1b[?25l" in text and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # hidden, then shown again
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    for step in range(1, 5):
        assert plain.count(f"{step}  {step / 4:.2f} ##") == 1
    assert "ends here" in plain and "4/4" in plain


def test_ascii_streams() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    screen = ProgressDisplay(10, stream, "plain")
    screen.step(STEP)
    screen.note("naïve – note")
    stream.flush()
    text = stream.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "|dlogp|" in text and "0.8 <=1" in text and "na?ve - note" in text


def test_a_reader_that_goes_away_does_not_stop_the_run(tmp_path: Path) -> None:
    code = (
        "from tidemill.observability.display import ProgressDisplay\n"
        "screen = ProgressDisplay(9, mode='plain')\n"
        "for step in range(20000): screen.step({'step': step})\n"
        f"open({str(tmp_path / 'reached')!r}, 'w').close()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(20) == 0 and errors == b"" and (tmp_path / "reached").exists()
