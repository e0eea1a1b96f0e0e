"""Aggregation of many values into one number per step and key."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from tidemill.core.types import Metrics


class StepMetrics:
    """Collects values during a step; `take` returns one flat dictionary and starts anew."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[float, float]] = {}  # key -> sum of weight * value, sum of weights
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}

    def mean(self, key: str, value: float | Iterable[float], weight: float = 1.0) -> None:
        """Add a value, or several of equal weight, to the mean under `key`. NaN is not counted."""
        for each in value if isinstance(value, Iterable) else (value,):
            if not math.isnan(each):
                total, weights = self._means.get(key, (0.0, 0.0))
                self._means[key] = (total + weight * float(each), weights + weight)

    def add(self, key: str, value: float) -> None:
        self._sums[key] = self._sums.get(key, 0.0) + value

    def max(self, key: str, value: float) -> None:
        self._maxima[key] = max(self._maxima.get(key, -math.inf), value)

    def take(self) -> Metrics:
        means = {key: total / weights for key, (total, weights) in self._means.items() if weights}
        taken = {**means, **self._sums, **self._maxima}
        assert len(taken) == len(means) + len(self._sums) + len(self._maxima), f"metrics collected in two ways: {taken}"
        self.__init__()
        return taken


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """The metrics as plain numbers for JSON, which has no NaN and no infinity: both become None."""
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in metrics.items()}
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in plain.items()}
