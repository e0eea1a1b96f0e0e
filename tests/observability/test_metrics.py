"""Step metrics, memory, settings."""

from __future__ import annotations

import math
import mmap

import numpy as np
import pytest

from tidemill.core.config import build
from tidemill.core.errors import ConfigError
from tidemill.observability import process_memory
from tidemill.observability.metrics import StepMetrics, finite
from tidemill.observability.observability_settings import LogSettings
from tidemill.observability.process_memory import PeakMemory, max_resident_bytes, memory_bytes, pss_bytes


def test_a_step_is_collected_and_begun_anew() -> None:
    step = StepMetrics()
    step.mean("reward/mean", [0.0, 1.0, math.nan])
    step.mean("loss", 2.0, weight=3)
    step.mean("loss", 6.0, weight=1)
    step.mean("nothing", math.nan)
    step.add("tokens", 5)
    step.add("tokens", 7)
    step.max("lag/max", 1)
    step.max("lag/max", 0)
    assert step.take() == {"reward/mean": 0.5, "loss": 3.0, "tokens": 12, "lag/max": 1}
    assert step.take() == {}
    step.add("x", 1)
    step.max("x", 1)
    with pytest.raises(AssertionError, match="in two ways"):
        step.take()


def test_finite() -> None:
    got = finite({"a": math.nan, "b": -math.inf, "c": np.float32(0.5), "d": 3, "e": np.float64("nan")})
    assert got == {"a": None, "b": None, "c": 0.5, "d": 3, "e": None}


def test_memory_grows_with_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeakMemory, "EVERY_S", 0.0)
    peak = PeakMemory()
    before = peak.update()
    held = mmap.mmap(-1, 32 << 20)  # fresh pages: what an allocator hands out may have been resident before
    held.write(b"x" * len(held))
    during = peak.update()
    assert during - before > 24 << 20
    held.close()
    assert peak.update() >= during
    monkeypatch.setattr(process_memory, "pss_bytes", lambda: None)
    assert memory_bytes() == max_resident_bytes() >= during // 2
    pss = pss_bytes()
    assert pss is None or 1 << 20 < pss <= 2 * max_resident_bytes()


def test_settings() -> None:
    assert build(LogSettings, {"sinks": ["tensorboard", "wandb"]}).sinks == ("tensorboard", "wandb")
    for tree in (
        {"sinks": ["tensorboad"]},
        {"sinks": ["wandb", "wandb"]},
        {"project": ""},
        {"trace_events": 10},
        {"trase": True},
    ):
        with pytest.raises(ConfigError):
            build(LogSettings, tree)
