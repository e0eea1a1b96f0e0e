"""Progress display of a run: one line per step, for a terminal, a pipe or a program.

    live    a terminal: the header, a line for each evaluation and each twentieth of the run, below them the present step
    plain   no terminal: the same lines without colour, and at least one every ten seconds
    json    one JSON object a line: {"kind": "header" | "step" | "eval" | "note", ...}, and nothing else
    quiet   nothing

A line is at most as wide as the terminal, or 120 characters without one. When steps are left out, the display says so;
all of them are in metrics.jsonl. A column whose metric is missing shows a dash. The metric `version` may be set only
after every engine has answered with the trainer's fingerprint: the display shows "ok" beside it. A stream that fails
silences the display, not the run.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO

from tidemill.core.types import Metrics
from tidemill.observability.console_table import TITLES, WIDTHS, cells, held_out, line, number, unscored_in, without_score
from tidemill.observability.metrics import finite
from tidemill.observability.safe_text import DEGRADE, paragraphs
from tidemill.observability.time_breakdown import lines, processes

if TYPE_CHECKING:
    from rich.console import RenderableType

Mode = Literal["auto", "live", "plain", "json", "quiet"]
PLAIN_WIDTH = 120
LINES = 20  # step lines that a run leaves on a terminal, at most
QUIET_S = 10.0  # longest silence of a plain display while steps end
LABEL = 9  # columns of a label and its separator
_LABELLED = re.compile(r"([a-z-]{2,8}): (?=\S)")
_ROUND = (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500)
Style = Literal["", "bold", "dim", "green", "yellow", "cyan"]


class Display(Protocol):
    def header(self, lines: Sequence[str]) -> None: ...
    def step(self, metrics: Metrics) -> None: ...
    def evaluated(self, step: int, results: Metrics, unscored: str = "") -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class ProgressDisplay:
    """`Display` on a stream."""

    def __init__(
        self, total: int, stream: TextIO | None = None, mode: Mode = "auto", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """total: steps of the run. stream: standard output unless given."""
        given = sys.stdout if stream is None else stream
        self._stream: TextIO | None = given
        self._total, self._clock, self._shown_at = total, clock, -math.inf
        self._mode = mode if mode != "auto" else _mode_of(given)
        self._every = spacing(total)
        self._range = (0.0, 1.0)  # of rewards, for the bar
        self._titled = False
        self._plain_width = _width_of(given)
        self._live = _Live(given, total) if self._mode == "live" else None

    def header(self, lines: Sequence[str]) -> None:
        """Show the run's description before the first step."""
        if self._mode == "json":
            self._say_json({"kind": "header", "lines": list(lines)})
        else:
            for text in lines:
                self._say(text)

    def step(self, metrics: Metrics) -> None:
        """Show the metrics of a step that has ended; `step` among them counts from 1."""
        if self._mode == "json":
            self._say_json({"kind": "step", **finite(metrics)})
            return
        reward = metrics.get("reward/mean", math.nan)
        if math.isfinite(reward):
            self._range = (min(self._range[0], reward), max(self._range[1], reward))
        if not self._titled:
            self._titled = True
            self._print_titles()
        step, text = int(metrics.get("step", 0)), line(cells(metrics, self._range), self._width)
        keep = step in (1, self._total) or step % self._every == 0
        if self._live is None:
            if keep or self._clock() - self._shown_at >= QUIET_S:
                self._shown_at = self._clock()
                self._print(text)
            return
        spent = [f"{name}: {said}" for name, said in lines(processes(metrics))]
        self._attempt(lambda: self._live and self._live.show(step, self._fit(text), spent, keep=keep))

    def evaluated(self, step: int, results: Metrics, unscored: str = "") -> None:
        """Show the held-out results of the weights after `step` steps. unscored: why attempts have no score."""
        if self._mode == "json":
            self._say_json({"kind": "eval", "step": step, **finite(results), **({"unscored": unscored} if unscored else {})})
            return
        own = {key.removesuffix("/accuracy"): value for key, value in results.items() if key.endswith("/accuracy")}
        each = ", ".join(f"{name} {number(value, '.3f')}" for name, value in own.items())
        figures, n = held_out(results) or "accuracy –", number(results.get("n"), ".0f")
        said = f"held-out {figures} on {n} tasks{f' ({each})' if each else ''}"
        missing = without_score(unscored_in(results), unscored)
        indent = " " * (WIDTHS[0] + 2)
        first, *rest = paragraphs(said + missing, self._width, indent, "")
        for text in (f"{step:>{WIDTHS[0]}}{first[WIDTHS[0] :]}", *rest):
            self._print(text, "yellow" if missing else "green")

    def note(self, text: str) -> None:
        """Show an important sentence: a resume, a sink switched off, how the run ended."""
        if self._mode == "json":
            self._say_json({"kind": "note", "text": text})
        else:
            self._say(text, "yellow" if text.startswith(("warning", "an attempt has no score")) else "")

    def close(self) -> None:
        """Leave the terminal as it was found. Must be called however the run ends."""
        if self._live is not None:
            self._attempt(self._live.close)

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _width(self) -> int:
        return self._plain_width if self._live is None else self._live.console.width

    def _print_titles(self) -> None:
        if self._every > 1:
            often = "" if self._live else f", or one in {QUIET_S:.0f} s if that comes first"
            self._say(f"steps: every {ordinal(self._every)} is shown{often}; metrics.jsonl has all", "dim")
        self._print(line(TITLES, self._width), "bold")

    def _say_json(self, value: dict[str, Any]) -> None:
        self._attempt(lambda: print(json.dumps(value, allow_nan=False), file=self._stream, flush=True))

    def _say(self, text: str, style: Style = "") -> None:
        """Print a paragraph, wrapped. A leading word with a colon is a label, in a column of its own."""
        label = found[1] if (found := _LABELLED.match(text)) else ""
        said = text[len(label) + 2 :] if label else text
        first, *rest = paragraphs(said, self._width, " " * (LABEL + 2 if label else 2), "" if label else "  ")
        for each in (f"  {label:<{LABEL}}{first[LABEL + 2 :]}" if label else first, *rest):
            self._print(each, style)

    def _print(self, text: str, style: Style = "") -> None:
        """Print one line as it is."""
        if self._live is not None:
            self._attempt(lambda: self._live and self._live.say(self._fit(text), style))
        else:
            self._attempt(lambda: print(self._fit(text), file=self._stream, flush=True))

    def _fit(self, text: str) -> str:
        """The text in characters that the stream can encode: the C locale has only ASCII."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"  # a StringIO has none, and takes anything
        return text.encode(encoding, DEGRADE).decode(encoding)

    def _attempt(self, write: Callable[[], object]) -> None:
        if self._mode == "quiet":
            return
        try:
            write()
        except (OSError, ValueError) as error:  # a ValueError: the stream is closed
            self._mode, self._live = "quiet", None
            if self._stream is sys.stdout and isinstance(error, BrokenPipeError):
                # so that the interpreter's own flush at exit has somewhere to go
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Live:
    """Display on a terminal: finished lines scroll away above the present step and the progress bar."""

    def __init__(self, stream: TextIO, total: int) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self.console = Console(file=stream, highlight=False, force_terminal=True)
        self._present, self._spent = "", list[str]()
        elapsed, left = TimeElapsedColumn(), TimeRemainingColumn()
        progress = BarColumn(24, complete_style="green", finished_style="green")
        self._progress = Progress(
            *(TextColumn(" "), progress, MofNCompleteColumn(), TextColumn("steps"), elapsed),
            *(TextColumn("left"), left),
            console=self.console,
        )
        self._task = self._progress.add_task("", total=total)
        self._live = Live(self._render(), console=self.console, refresh_per_second=4, transient=True)
        self._started = False

    def show(self, step: int, text: str, spent: list[str], *, keep: bool) -> None:
        """Show a step and the progress. spent: one line per process on where the step's time went."""
        if not self._started:
            self._started = True
            self._live.start()
        self._progress.update(self._task, completed=step)
        self._present, self._spent = "" if keep else text, spent
        self._live.update(self._render())
        if keep:
            self.say(text)

    def say(self, text: str, style: str = "") -> None:
        """Print one line; a word longer than the terminal is wide goes on in the next."""
        self.console.print(text, style=style or None, markup=False, overflow="ignore", no_wrap=True, crop=False)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        present = [Text(self._present, style="cyan", overflow="ellipsis", no_wrap=True)] if self._present else []
        spent = [Text(f"  {text}", style="dim", overflow="ellipsis", no_wrap=True) for text in self._spent]
        return Group(*present, self._progress, *spent)


def spacing(total: int) -> int:
    """The interval, a round number of steps, at which step lines are kept."""
    return next((each for each in _ROUND if total <= each * LINES), -(-total // LINES))


def ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


def _mode_of(stream: TextIO | None) -> Mode:
    """The mode for a stream: live on a terminal that can move its cursor, quiet without a stream."""
    if stream is None or getattr(stream, "closed", False):
        return "quiet"
    return "live" if stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "") else "plain"


def _width_of(stream: TextIO | None) -> int:
    """The width of a terminal without live display; `PLAIN_WIDTH` for a pipe or a file."""
    try:
        return (os.get_terminal_size(stream.fileno()).columns if stream is not None else 0) or PLAIN_WIDTH
    except (OSError, ValueError):
        return PLAIN_WIDTH
