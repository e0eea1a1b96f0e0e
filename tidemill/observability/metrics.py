"""From many numbers to one per step (`StepMetrics`) and to one per run (`Distribution`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from tidemill.types import Array, Metrics


class StepMetrics:
    """Collects what happens during a step; `take` gives it as one flat dictionary and begins anew."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[float, float]] = {}  # key -> sum of weight * value, sum of weights
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}

    def mean(self, key: str, value: float | Iterable[float], weight: float = 1.0) -> None:
        """A value, or several of equal weight, into the mean under `key`. NaN is not counted: it says "no value"."""
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
        clash = (
            (means.keys() & self._sums.keys())
            | (means.keys() & self._maxima.keys())
            | (self._sums.keys() & self._maxima.keys())
        )
        assert not clash, f"metrics collected in two ways: {sorted(clash)}"
        taken = {**means, **self._sums, **self._maxima}
        self.__init__()
        return taken


class Distribution:
    """Count, mean, maximum (exact) and percentiles (to 2 %) of non-negative numbers, in constant memory.

    For |delta logp| over all tokens of a run. Bins are logarithmic from 1e-12 to 1e4; what is smaller counts as 0.
    """

    LOW, HIGH, PER_DECADE = (
        -12,
        4,
        60,
    )  # a bin is a factor of 10 ** (1 / 60) = 1.039 wide; its geometric middle is within 2 %

    def __init__(self) -> None:
        self._bins = np.zeros((self.HIGH - self.LOW) * self.PER_DECADE + 2, np.int64)
        self.count, self.total, self.max = 0, 0.0, 0.0

    def add(self, values: Array) -> None:
        """values: any shape, finite and >= 0."""
        values = np.asarray(values, np.float64).ravel()
        if not values.size:
            return
        if not np.isfinite(values).all() or values.min() < 0:
            raise ValueError("expected finite numbers >= 0")
        with np.errstate(divide="ignore"):
            place = np.floor((np.log10(values) - self.LOW) * self.PER_DECADE) + 1
        place = np.clip(place, 0, len(self._bins) - 1).astype(np.int64)
        self._bins += np.bincount(place, minlength=len(self._bins))
        self.count += values.size
        self.total += float(values.sum())
        self.max = max(self.max, float(values.max()))

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    def percentile(self, q: float) -> float:
        """The value that q percent of all numbers do not exceed; NaN when there is none."""
        if not self.count:
            return math.nan
        rank = max(1, math.ceil(q / 100 * self.count))
        place = int(np.searchsorted(np.cumsum(self._bins), rank))
        middle = 10 ** (self.LOW + (place - 0.5) / self.PER_DECADE)
        return 0.0 if place == 0 else min(middle, self.max)

    def summary(self) -> dict[str, float]:
        return {
            "mean": self.mean,
            "p50": self.percentile(50),
            "p99": self.percentile(99),
            "max": self.max,
            "count": self.count,
        }


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """For JSON, which knows no NaN and no infinity: these become None. NumPy scalars become plain numbers."""
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in metrics.items()}
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in plain.items()}
