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

from tidemill.observability import console
from tidemill.observability.console import Display, ProgressDisplay, ordinal, spacing
from tidemill.observability.console_table import BAR, bar, cells, exponent, line, thousands

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


def shown(mode: console.Mode, total: int = 100) -> tuple[ProgressDisplay, io.StringIO]:
    stream = io.StringIO()
    return ProgressDisplay(total, stream, mode), stream


def test_held_out_attempts_without_a_score_are_told_of_with_the_commonest_reason() -> None:
    results = {"accuracy": 0.0, "n": 25.0, "infra_errors": 24.0, "unscorable": 1.0}
    screen, stream = shown("auto")
    screen.evaluated(0, results, "the agent is late")
    screen.evaluated(1, results | {"infra_errors": 0.0})
    screen.evaluated(2, results | {"infra_errors": 0.0, "unscorable": 0.0})
    assert stream.getvalue().splitlines() == [
        "    0  held-out accuracy 0.000 on 25 tasks; 25 have no score: the agent is late",
        "    1  held-out accuracy 0.000 on 25 tasks; 1 has no score",
        "    2  held-out accuracy 0.000 on 25 tasks",
    ]
    screen, stream = shown("json")
    screen.evaluated(0, results, "late")
    assert json.loads(stream.getvalue())["unscored"] == "late"


def test_a_plain_line() -> None:
    screen, stream = shown("auto")  # a StringIO is no terminal
    as_protocol: Display = screen
    as_protocol.header(["task: spell, 9 tasks", "no label here: or is there"])
    screen.step(STEP)
    screen.evaluated(10, {"accuracy": 0.71875, "n": 128.0, "a/accuracy": 0.5, "b/accuracy": 1.0})
    screen.note("done")
    screen.close()
    task, other, often, titles, first, held_out, note = stream.getvalue().splitlines()
    assert (task, other, note) == ("  task     spell, 9 tasks", "  no label here: or is there", "  done")
    assert held_out == "   10  held-out accuracy 0.719 on 128 tasks (a 0.500, b 1.000)"
    assert often == "  steps    every 5th is shown, or one in 10 s if that comes first; metrics.jsonl has all"
    assert titles.split() == [
        *("step", "reward", "held-out", "len", "lag", "|Δlogp|", "policy", "tok/s"),
        *("busy", "(longest", "wait),", "%"),
    ]
    assert " ".join(first.split()) == "10 0.50 ##### 0.66 6.1 0.8 ≤1 1e-6 v10 ok 9.8k train 62 (rollouts 34)"
    for title in ("reward", "busy"):
        assert first[titles.index(title) - 1] == " " != first[titles.index(title)]  # columns begin under their titles
    for title in ("step", "held-out", "|Δlogp|", "policy", "tok/s"):
        end = titles.index(title) + len(title)
        assert first[end - 1] != " " and first[end : end + 1] == " "  # and end under them


def test_what_is_missing_is_a_dash() -> None:
    assert line(cells({"step": 11.0}, (0, 1)), 120).split() == ["11", *"––––––––"]


@pytest.mark.parametrize("width", [40, 74, 80, 99, 100, 120, 200])
def test_a_line_is_no_wider_than_it_may_be(width: int) -> None:
    worst = {
        **{"step": 99999.0, "reward/mean": -1000.25, "eval/accuracy": 1.0, "length/mean": 131072.0, "lag/mean": 100.0},
        **{"lag/max": 128.0, "mismatch/lag0_mean": 1e-10, "version": 99998.0, "throughput/tokens_per_s": 123_456_789.0},
        **{"time/trainer/train": 0.1, "time/trainer/wait for evaluation": 0.9},
        **{"time/engine-0/generate": 0.1, "time/engine-0/wait for environment": 0.9},
    }
    text = line(cells(worst, (-2000, 1)), width)
    assert len(text) <= width and text.startswith("99999  -1000.25")
    usual = line(cells(STEP, (0, 1)), width)
    assert len(usual) <= width and ("train 62" in usual) is (width >= 100)


def test_lines_without_a_terminal_have_120_characters_at_most() -> None:
    screen, stream = shown("plain", 400)
    screen.header([f"task: {'a long name ' * 20}", "x" * 118])
    screen.note("warning: " + "word " * 60)
    screen.note("one \x1b[31mred\x07 line\nand another")  # a model's text may be in it
    results = {f"env{i}/accuracy": 0.5 for i in range(30)}
    screen.evaluated(7, {"accuracy": 0.5, "n": 1.0, **results})
    for step in range(1, 9):
        screen.step({**STEP, "step": float(step), "time/engine-0/generate": 0.8, "time/engine-0/wait for environment": 0.2})
    text = stream.getvalue()
    assert 110 < max(map(len, text.splitlines())) <= 120 and "\x1b" not in text and "␛[31mred␇ line\n" in text
    assert text.count("env29 0.500") == 1


def test_steps_that_are_left_out() -> None:
    """A twentieth is kept, by a round number; and one at least in ten seconds, where no terminal shows the present one."""
    now = [0.0]
    stream = io.StringIO()
    screen = ProgressDisplay(400, stream, "plain", clock=lambda: now[0])
    for step in range(1, 401):
        now[0] += 4 if 100 < step <= 110 else 0.01
        screen.step({"step": float(step)})
    kept = [int(row.split()[0]) for row in stream.getvalue().splitlines()[2:]]
    assert kept == [1, 20, 40, 60, 80, 100, 103, 106, 109, *range(120, 401, 20)]
    assert [spacing(n) for n in (1, 20, 21, 40, 100, 137, 400, 1000, 30_000)] == [1, 1, 2, 2, 5, 10, 20, 50, 1500]
    assert [ordinal(n) for n in (2, 3, 5, 11, 12, 21, 50)] == ["2nd", "3rd", "5th", "11th", "12th", "21st", "50th"]
    screen, stream = shown("plain", 20)
    screen.step({"step": 1.0})
    assert "is shown" not in stream.getvalue()  # of few steps none is left out


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
    bars = [row.count("#") for row in stream.getvalue().splitlines()[2:]]
    assert bars == [BAR // 2, 0, BAR, BAR]
    assert bar(math.nan, (0, 1)) == "–" and bar(None, (0, 1)) == "–"


@pytest.mark.parametrize(
    ("value", "text"), [(1.3e-6, "1e-6"), (0.0, "0"), (0.02, "2e-2"), (9.7e-5, "1e-4"), (math.nan, "–")]
)
def test_exponents(value: float, text: str) -> None:
    assert exponent(value) == text


def test_numbers() -> None:
    assert [thousands(x) for x in (0, 999, 9812, 2_500_000, None)] == ["0", "999", "9.8k", "2.5M", "–"]


def test_a_terminal_keeps_milestones_and_shows_the_present_step() -> None:
    stream = io.StringIO()
    screen = ProgressDisplay(100, stream, "live")
    assert screen._live is not None
    recorder = screen._live.console
    recorder.record, recorder.width = True, 80
    screen.header(["task: [spell]"])
    for step in range(1, 9):
        screen.step({**STEP, "step": float(step)})
    screen.evaluated(8, {"accuracy": 0.5, "n": 16})
    screen.close()
    text = recorder.export_text()
    assert "task     [spell]" in text and "held-out accuracy 0.500 on 16 tasks" in text
    kept = [int(m[1]) for m in re.finditer(r"  (\d+)  0\.50 #", text)]
    assert {1, 5} <= set(kept)


LIVE = """
from tidemill.observability.console import ProgressDisplay
with ProgressDisplay(4) as screen:
    screen.header(["task: spell"])
    for step in range(1, 5):
        screen.step({"step": step, "reward/mean": step / 4})
    screen.note("a sentence that is longer than the terminal is wide " * 4 + "and ends here")
"""


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_in_a_real_terminal(term: str) -> None:
    """Through a pseudo-terminal: live, every milestone once, long notes whole, and the cursor given back. One that cannot
    move its cursor gets plain lines."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", LIVE], stdout=theirs, stderr=subprocess.PIPE, env={**os.environ, "TERM": term}
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
    if term == "dumb":
        assert "\x1b" not in text and text.count(" ##") == 4
        return
    assert "\x1b[?25l" in text and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # hidden, then shown again
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    for step in range(1, 5):
        assert plain.count(f"{step}  {step / 4:.2f} ##") == 1
    assert "ends here" in plain and "4/4" in plain


def test_ascii_streams() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    screen = ProgressDisplay(10, stream, "plain")
    screen.step(STEP)
    screen.note("naïve – note → 漢")
    stream.flush()
    text = stream.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "|dlogp|" in text and "0.8 <=1" in text and "na?ve - note -> ?" in text


def test_a_reader_that_goes_away_does_not_stop_the_run(tmp_path: Path) -> None:
    code = (
        "from tidemill.observability.console import ProgressDisplay\n"
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


def test_a_stream_that_is_closed_or_full_does_not_stop_the_run() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    for mode in ("plain", "json", "live"):
        screen = ProgressDisplay(3, Full(), mode)
        screen.header(["task: a"])
        for step in range(1, 4):
            screen.step({**STEP, "step": float(step)})
        screen.close()
    gone = io.StringIO()
    screen = ProgressDisplay(3, gone, "plain")
    gone.close()
    screen.step(STEP)
    screen.note("x")
    ProgressDisplay(3, gone).note("x")  # closed from the beginning
