"""The progress table: a step's metrics as cells, and cells as a line of limited width."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from tidemill.observability import time_breakdown

BAR = 10
HELD_OUT = ("accuracy", "preference_accuracy", "preference_loss", "loss")  # figures of an evaluation, the best known first
TITLES = ("step", "reward", "held-out", "len", "lag", "|Δlogp|", "policy", "tok/s", time_breakdown.TITLE)
WIDTHS = (5, 5 + BAR, 8, 5, 6, 7, 8, 6)  # widths of all columns but the last, which takes the rest
BETWEEN = 2
LEAST = 24  # columns for the last one; with fewer it is left out


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
        time_breakdown.column(metrics),
    )


def line(columns: Sequence[str], width: int) -> str:
    """Cells beside each other, at most `width` wide: numbers to the right, bar and last column to the left."""
    padded = [f"{c:<{w}}" if i == 1 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(columns, WIDTHS, strict=False))]
    text = (" " * BETWEEN).join(padded)
    if width - len(text) - BETWEEN >= LEAST:
        text += " " * BETWEEN + columns[-1]
    return cut(text.rstrip(), width)


def cut(text: str, width: int) -> str:
    """The text, cut to `width` with an ellipsis if it is longer."""
    return text if len(text) <= width else f"{text[: width - 1].rstrip()}…"


def held_out(results: Mapping[str, float]) -> str:
    """The figures of an evaluation as text, such as "accuracy 0.812, loss 0.310"."""
    found = {name.replace("_", " "): number(results.get(name), ".3f") for name in HELD_OUT if name in results}
    return ", ".join(f"{name} {figure}" for name, figure in found.items())


def unscored_in(results: Mapping[str, float | None]) -> int:
    """The attempts of an evaluation that have no score."""
    return int(sum(results.get(kind) or 0 for kind in ("infra_errors", "unscorable")))


def without_score(count: int, reason: str) -> str:
    """The end of a line on accuracy: "; 25 have no score: REASON", or nothing."""
    have = "1 has" if count == 1 else f"{count:,} have"
    return f"; {have} no score{f': {reason}' if reason else ''}" if count else ""


def bar(value: float | None, scale: tuple[float, float]) -> str:
    if not _known(value) or value is None:
        return "–"
    low, high = scale
    filled = round(BAR * (value - low) / (high - low))
    return f"{value:.2f} {'#' * max(0, min(BAR, filled))}"


def number(value: float | None, form: str) -> str:
    return format(value, form) if _known(value) and value is not None else "–"


def exponent(value: float | None) -> str:
    """A number as one digit and its power of ten, such as 1e-6."""
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


def _first(metrics: Mapping[str, float], names: Iterable[str]) -> float | None:
    return next((metrics[name] for name in names if name in metrics), None)


def _loss(metrics: Mapping[str, float]) -> str:
    """The loss, shown in the reward's column when nothing is sampled."""
    loss = None if "lag/mean" in metrics else _first(metrics, ("train/preference_loss", "train/loss"))
    return f"loss {number(loss, '.3f')}" if _known(loss) else "–"


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
