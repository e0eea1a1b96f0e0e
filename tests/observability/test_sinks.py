"""Sinks: metrics.jsonl survives kills, extras are checked at the start, and a sink that fails harms nobody."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tidemill.core.errors import ConfigError
from tidemill.observability.observability_settings import LogSettings
from tidemill.observability.sinks import Fanout, JsonlSink, TensorBoardSink, UserSink, WandbSink, open_sinks


class Broken:
    def __init__(self) -> None:
        self.calls = 0

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.calls += 1
        raise ZeroDivisionError("no network")

    def close(self) -> None:
        raise AssertionError("a sink that was switched off is not closed again")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_is_flushed_and_appended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.log(1, {"reward/mean": 0.5, "bad": math.nan, "numpy": np.float32(2)})
    (first,) = lines(path)  # readable at once, while the sink is open
    assert first["time"] > 1e9 and {k: v for k, v in first.items() if k != "time"} == {
        "step": 1,
        "reward/mean": 0.5,
        "bad": None,
        "numpy": 2.0,
    }
    sink.close()
    again = JsonlSink(path)
    again.log(2, {"x": 1})
    again.close()
    assert [line["step"] for line in lines(path)] == [1, 2]


@pytest.mark.parametrize("torn", ['{"step": 3, "rew', "x" * 200_000])
def test_a_torn_line_is_cut(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + torn)
    JsonlSink(path).log(3, {})
    assert [line["step"] for line in lines(path)] == [1, 2, 3]
    path.write_text(torn)
    JsonlSink(path).log(4, {})
    assert [line["step"] for line in lines(path)] == [4]


def test_a_broken_sink_is_reported_once_and_switched_off(tmp_path: Path) -> None:
    broken, seen, said = Broken(), [], []
    fanout = Fanout([broken, UserSink(lambda step, metrics: seen.append((step, metrics)))], said.append)
    for step in range(3):
        fanout.log(step, {"a": step})
    fanout.close()
    assert broken.calls == 1 and [s for s, _ in seen] == [0, 1, 2]
    assert said == ["Broken failed at step 0 and is switched off; the run goes on: ZeroDivisionError: no network"]
    with pytest.warns(RuntimeWarning, match="Broken failed at step 0"):
        Fanout([Broken()]).log(0, {})


def test_an_interrupt_is_not_swallowed() -> None:
    def interrupt(step: int, metrics: dict[str, float]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Fanout([UserSink(interrupt)]).log(0, {})


def test_a_callback_cannot_change_what_others_see() -> None:
    seen = []
    Fanout([UserSink(lambda s, m: m.clear()), UserSink(lambda s, m: seen.append(m))]).log(0, {"a": 1.0})
    assert seen == [{"a": 1.0}]


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_missing_package_is_told_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    with pytest.raises(ConfigError, match=f"`pip install {package}`"):
        open_sinks(LogSettings(sinks=(package,)), tmp_path)


def test_tensorboard_writes_what_its_own_reader_reads(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    sinks = open_sinks(LogSettings(sinks=("tensorboard",)), tmp_path)
    sinks.log(1, {"reward/mean": 0.25, "bad": math.nan})
    sinks.log(2, {"reward/mean": 0.5})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()  # before it is closed: it was flushed
    found = [(e.step, make_ndarray(e.tensor_proto).item()) for e in reader.Tensors("reward/mean")]
    assert found == [(1, 0.25), (2, 0.5)]
    sinks.close()
    assert len(lines(tmp_path / "metrics.jsonl")) == 2


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = WandbSink("tidemill", "run", tmp_path, {"steps": 3})
    sink.log(1, {"reward/mean": 0.5})
    sink.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_sinks_load_no_torch() -> None:
    code = (
        "import sys, tidemill.observability.sinks, tidemill.observability.console, tidemill.observability.trace\n"
        "from tidemill.observability.sinks import TensorBoardSink\n"
        "print([m for m in ('torch', 'transformers', 'tensorboard', 'wandb', 'rich') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.strip() == "[]"
    assert TensorBoardSink
