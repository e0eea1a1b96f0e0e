"""Progress for people and for machines: one line a step.

    live    a terminal: the header, a line for each evaluation and each twentieth of the run, below them the present step
    plain   no terminal: the same columns, one plain line a step
    json    one JSON object a line: {"kind": "header" | "step" | "eval" | "note", ...}, and nothing else
    quiet   nothing

A column whose metric is missing shows a dash. `version` must be written only after every engine has answered with the
trainer's fingerprint: the display says "ok" beside it. A reader that went away (`| head`) silences the display, not the run.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO

from tidemill.observability.metrics import finite
from tidemill.observability.spent import where_time_went
from tidemill.types import Metrics

if TYPE_CHECKING:
    from rich.console import RenderableType

Mode = Literal["auto", "live", "plain", "json", "quiet"]
BAR = 10
HELD_OUT = ("accuracy", "preference_accuracy", "preference_loss", "loss")  # figures of an evaluation, the best known first
TITLES = ("step", "reward", "held-out", "len", "lag", "|Δlogp|", "policy", "tok/s", "where the step's time went, in %")
WIDTHS = (5, 5 + BAR, 8, 5, 6, 7, 8, 6, 1)


class Display(Protocol):
    def header(self, lines: Sequence[str]) -> None: ...
    def step(self, metrics: Metrics) -> None: ...
    def evaluated(self, step: int, results: Metrics) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class ProgressDisplay:
    """`Display` on a stream."""

    def __init__(self, total: int, stream: TextIO | None = None, mode: Mode = "auto") -> None:
        """total: steps of the run. stream: standard output unless given."""
        self._stream = sys.stdout if stream is None else stream
        self._total = total
        self._mode = mode if mode != "auto" else "live" if self._stream.isatty() else "plain"
        self._range = (0.0, 1.0)  # of rewards, for the bar
        self._titled = False
        self._live = _Live(self._stream, total) if self._mode == "live" else None

    def header(self, lines: Sequence[str]) -> None:
        """What is about to run, before the first step."""
        if self._mode == "json":
            self._say_json({"kind": "header", "lines": list(lines)})
        else:
            for line in lines:
                self._say(f"  {line}")

    def step(self, metrics: Metrics) -> None:
        """The metrics of a step that has ended; `step` among them counts from 1."""
        if self._mode == "json":
            self._say_json({"kind": "step", **finite(metrics)})
            return
        reward = metrics.get("reward/mean", math.nan)
        if math.isfinite(reward):
            self._range = (min(self._range[0], reward), max(self._range[1], reward))
        if not self._titled:
            self._titled = True
            self._say(line(TITLES).rstrip(), "bold", cut=True)
        text = line(cells(metrics, self._range)).rstrip()
        if self._live is None:
            self._say(text)
            return
        step = int(metrics.get("step", 0))
        self._attempt(lambda: self._live and self._live.show(step, self._fit(text), keep=self._milestone(step)))

    def evaluated(self, step: int, results: Metrics) -> None:
        """Held-out results of the weights after `step` steps."""
        if self._mode == "json":
            self._say_json({"kind": "eval", "step": step, **finite(results)})
            return
        own = {key.removesuffix("/accuracy"): value for key, value in results.items() if key.endswith("/accuracy")}
        each = ", ".join(f"{name} {number(value, '.3f')}" for name, value in own.items())
        figures, n = held_out(results) or "accuracy –", number(results.get("n"), ".0f")
        self._say(f"{step:>{WIDTHS[0]}}  held-out {figures} on {n} tasks{f' ({each})' if each else ''}", "green")

    def note(self, text: str) -> None:
        """A sentence that must be seen: a resume, a sink that was switched off, how the run ended."""
        if self._mode == "json":
            self._say_json({"kind": "note", "text": text})
        else:
            self._say(f"  {text}")

    def close(self) -> None:
        """Leave the terminal as it was found. Needed whenever the run ends, however it ends."""
        if self._live is not None:
            self._attempt(self._live.close)

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _milestone(self, step: int) -> bool:
        return step in (1, self._total) or step % max(1, self._total // 20) == 0

    def _say_json(self, value: dict[str, Any]) -> None:
        self._attempt(lambda: print(json.dumps(value, allow_nan=False), file=self._stream, flush=True))

    def _say(self, text: str, style: str = "", *, cut: bool = False) -> None:
        if self._live is not None:
            self._attempt(lambda: self._live and self._live.say(self._fit(text), style, cut=cut))
        else:
            self._attempt(lambda: print(self._fit(text), file=self._stream, flush=True))

    def _fit(self, text: str) -> str:
        """Text in what the stream can write: a terminal in the C locale knows ASCII only."""
        encoding = self._stream.encoding or "utf-8"  # a StringIO has none, and takes anything
        return (
            text.replace("Δ", "d").replace("–", "-").replace("≤", "<=").encode(encoding, "replace").decode(encoding)
            if not _can(encoding)
            else text
        )

    def _attempt(self, write: Callable[[], object]) -> None:
        if self._mode == "quiet":
            return
        try:
            write()
        except BrokenPipeError:
            self._mode, self._live = "quiet", None
            if self._stream is sys.stdout:  # so that the interpreter's own flush at exit has somewhere to go
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Live:
    """A terminal: finished lines scroll away above, the present step and the run's progress stay below."""

    def __init__(self, stream: TextIO, total: int) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self.console = Console(file=stream, highlight=False, force_terminal=True)
        self._present = ""
        elapsed, left = TimeElapsedColumn(), TimeRemainingColumn()
        self._progress = Progress(
            *(TextColumn("  "), BarColumn(40), MofNCompleteColumn(), TextColumn("steps"), elapsed),
            *(TextColumn("left"), left),
            console=self.console,
        )
        self._task = self._progress.add_task("", total=total)
        self._live = Live(self._render(), console=self.console, refresh_per_second=4, transient=True)
        self._started = False

    def show(self, step: int, text: str, *, keep: bool) -> None:
        if not self._started:
            self._started = True
            self._live.start()
        self._progress.update(self._task, completed=step)
        self._present = "" if keep else text
        self._live.update(self._render())
        if keep:
            self.say(text, cut=True)

    def say(self, text: str, style: str = "", *, cut: bool = False) -> None:
        """cut: a line of the table, which ends at the terminal's edge; anything else wraps."""
        overflow = "ellipsis" if cut else "fold"
        self.console.print(text, style=style or None, markup=False, overflow=overflow, no_wrap=cut)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        present = Text(self._present, style="cyan", overflow="ellipsis", no_wrap=True)
        return Group(present, self._progress) if self._present else self._progress


def cells(metrics: Mapping[str, float], scale: tuple[float, float]) -> tuple[str, ...]:
    """A step's columns, in the order of TITLES. scale: the rewards at the bar's two ends."""
    version, mean_lag, max_lag = (metrics.get(k) for k in ("version", "lag/mean", "lag/max"))
    lag = number(mean_lag, ".1f") + (f" ≤{max_lag:.0f}" if _known(max_lag) else "")
    return (
        number(metrics.get("step"), ".0f"),
        bar(metrics.get("reward/mean"), scale) if "reward/mean" in metrics else _loss(metrics),
        number(_first(metrics, [f"eval/{name}" for name in HELD_OUT]), ".2f"),
        number(metrics.get("length/mean"), ".1f"),
        lag,
        exponent(metrics.get("mismatch/lag0_mean")),
        f"v{version:.0f} ok" if _known(version) and version is not None else "–",
        thousands(metrics.get("throughput/tokens_per_s")),
        where_time_went(metrics),
    )


def held_out(results: Mapping[str, float]) -> str:
    """What an evaluation found, in words."""
    found = {name.replace("_", " "): number(results.get(name), ".3f") for name in HELD_OUT if name in results}
    return ", ".join(f"{name} {figure}" for name, figure in found.items())


def _first(metrics: Mapping[str, float], names: Iterable[str]) -> float | None:
    return next((metrics[name] for name in names if name in metrics), None)


def _loss(metrics: Mapping[str, float]) -> str:
    """In place of a reward, where nothing is sampled, so that nothing has a lag."""
    loss = None if "lag/mean" in metrics else _first(metrics, ("train/preference_loss", "train/loss"))
    return f"loss {number(loss, '.3f')}" if _known(loss) else "–"


def line(columns: Iterable[str]) -> str:
    """Columns beside each other: numbers to the right, the bar and what follows the last number to the left."""
    left = {1, len(WIDTHS) - 1}
    padded = (f"{c:<{w}}" if i in left else f"{c:>{w}}" for i, (c, w) in enumerate(zip(columns, WIDTHS, strict=True)))
    return "  ".join(padded)


def bar(value: float | None, scale: tuple[float, float]) -> str:
    if not _known(value) or value is None:
        return "–"
    low, high = scale
    filled = round(BAR * (value - low) / (high - low))
    return f"{value:.2f} {'#' * max(0, min(BAR, filled))}"


def number(value: float | None, form: str) -> str:
    return format(value, form) if _known(value) and value is not None else "–"


def exponent(value: float | None) -> str:
    """One digit and its power of ten: 1e-6."""
    if not _known(value) or value is None:
        return "–"
    if value == 0:
        return "0"
    digit, power = f"{value:.0e}".split("e")
    return f"{digit}e{int(power)}"


def thousands(value: float | None) -> str:
    if not _known(value) or value is None:
        return "–"
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _can(encoding: str) -> bool:
    try:
        "Δ–≤".encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
