"""Step metrics, the run-long distribution, memory, settings."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tidemill.config import ConfigError, build
from tidemill.observability import memory
from tidemill.observability.memory import PeakMemory, max_resident_bytes, memory_bytes, pss_bytes
from tidemill.observability.metrics import Distribution, StepMetrics, finite
from tidemill.observability.settings import LogSettings


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


@pytest.mark.parametrize("scale", [1e-9, 1e-5, 1.0, 10.0])
def test_percentiles_are_within_two_percent(scale: float) -> None:
    values = np.random.default_rng(0).lognormal(0, 1.5, 20_000) * scale
    d = Distribution()
    for part in np.array_split(values, 7):
        d.add(part.reshape(-1, 1).astype(np.float64))
    for q in (1, 50, 99, 99.9):
        exact = np.sort(values)[max(1, math.ceil(q / 100 * len(values))) - 1]
        assert d.percentile(q) == pytest.approx(exact, rel=0.02)
    assert d.mean == pytest.approx(values.mean()) and d.max == values.max() and d.count == 20_000
    assert d.summary()["p99"] == d.percentile(99)


def test_zeros_empties_and_extremes() -> None:
    d = Distribution()
    d.add(np.array([]))
    assert math.isnan(d.mean) and math.isnan(d.percentile(99)) and d.count == 0
    d.add(np.array([0.0] * 99 + [2.0], np.float32))
    assert d.percentile(99) == 0 and d.percentile(100) == pytest.approx(2, rel=0.02) and d.percentile(100) <= d.max
    d.add(np.array([1e-30, 1e30]))
    assert d.max == 1e30 and d.count == 102
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="finite numbers >= 0"):
            d.add(np.array([bad]))
    assert d.count == 102


def test_finite() -> None:
    got = finite({"a": math.nan, "b": -math.inf, "c": np.float32(0.5), "d": 3, "e": np.float64("nan")})
    assert got == {"a": None, "b": None, "c": 0.5, "d": 3, "e": None}


def test_memory_grows_with_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = PeakMemory()
    before = peak.update()
    held = np.ones(32 << 20, np.uint8)
    during = peak.update()
    assert during - before > 24 << 20
    del held
    assert peak.update() >= during
    monkeypatch.setattr(memory, "pss_bytes", lambda: None)
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
