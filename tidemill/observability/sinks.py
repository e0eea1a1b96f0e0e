"""Sinks for metrics: metrics.jsonl always, TensorBoard, W&B and callbacks on request.

A missing package is a ConfigError at the start, with the command that installs it. Whatever a sink raises later is
reported once, that sink is switched off, and the run goes on.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tidemill.core.errors import ConfigError
from tidemill.core.interfaces import Sink
from tidemill.core.types import Metrics
from tidemill.observability.metrics import finite
from tidemill.observability.observability_settings import LogSettings

Callback = Callable[[int, Metrics], None]


class JsonlSink:
    """Writes metrics.jsonl, one JSON object per call; NaN and infinity become null.

    An object is {"step": .., "time": seconds since 1970, metrics}. The sink appends, so that a resumed run goes on in
    the same file: if a key has two values at one step, the later one counts.
    """

    def __init__(self, path: str | Path) -> None:
        _cut_torn_line(Path(path))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()

    def log(self, step: int, metrics: Metrics) -> None:
        line = {"step": step, "time": round(time.time(), 3), **finite(metrics)}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Writes scalars for `tensorboard --logdir FOLDER`, by TensorBoard's own writer, without torch."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from tensorboard.summary import Writer
        except ImportError:
            raise ConfigError(_missing("tensorboard")) from None
        self._writer = Writer(str(folder))

    def log(self, step: int, metrics: Metrics) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Logs to Weights & Biases, from the first step on: a missing account or network stops nothing."""

    def __init__(self, project: str, name: str, folder: str | Path, config: dict[str, Any]) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ConfigError(_missing("wandb")) from None
        self._wandb, self._run = wandb, None
        self._options: dict[str, Any] = {"project": project, "name": name, "dir": str(folder), "config": config}

    def log(self, step: int, metrics: Metrics) -> None:
        if self._run is None:
            settings = self._wandb.Settings(init_timeout=30, console="off")  # it would wrap the terminal we draw on
            self._run = self._wandb.init(**self._options, settings=settings)
            self._run.define_metric("*", step_metric="step")  # its own counter refuses an evaluation that comes late
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class UserSink:
    """Calls a user's function with (step, metrics)."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback

    def log(self, step: int, metrics: Metrics) -> None:
        self._callback(step, dict(metrics))

    def close(self) -> None:
        pass


class Fanout:
    """Several sinks as one. A sink that raises is reported once and switched off."""

    def __init__(self, sinks: Sequence[Sink], report: Callable[[str], None] | None = None) -> None:
        """report: gets the sentence about a sink that failed; by default it becomes a RuntimeWarning."""
        self._sinks = list(sinks)
        self._report = report or _warn

    def log(self, step: int, metrics: Metrics) -> None:
        for sink in list(self._sinks):
            self._attempt(sink, lambda sink=sink: sink.log(step, metrics), f"at step {step}")

    def close(self) -> None:
        for sink in list(self._sinks):
            self._attempt(sink, sink.close, "when it was closed")
        self._sinks.clear()

    def _attempt(self, sink: Sink, call: Callable[[], None], when: str) -> None:
        try:
            call()
        except Exception as error:  # whatever the user's or another library's code raises is not worth a run
            self._sinks.remove(sink)
            name = type(sink).__name__
            self._report(f"{name} failed {when} and is switched off; the run goes on: {type(error).__name__}: {error}")


def open_sinks(
    settings: LogSettings,
    folder: str | Path,
    *,
    config: dict[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    report: Callable[[str], None] | None = None,
) -> Fanout:
    """The sink of a run: metrics.jsonl, the sinks in the settings, and the user's callbacks."""
    folder = Path(folder)
    sinks: list[Sink] = [JsonlSink(folder / "metrics.jsonl")]
    for name in settings.sinks:
        if name == "tensorboard":
            sinks.append(TensorBoardSink(folder / "tensorboard"))
        else:
            sinks.append(WandbSink(settings.project, folder.resolve().name, folder, config or {}))
    return Fanout([*sinks, *map(UserSink, callbacks)], report)


def _cut_torn_line(path: Path) -> None:
    """Remove the incomplete last line that a killed run may have left."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        while position:
            start = max(0, position - 65_536)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position != end:
            file.truncate(position)


def _missing(package: str) -> str:
    return f"the sink {package!r} needs a package that is not installed: `pip install {package}`, or leave it out of `sinks`"


def _warn(sentence: str) -> None:
    warnings.warn(sentence, RuntimeWarning, stacklevel=4)
