"""Comparison of two sides' logprobs of the same tokens: the gap, the verdict, the worst token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tidemill.core.types import Array
from tidemill.observability.diagnosis.mismatch import Limit, LogprobGap

SAME = Limit(most=1e-4)
"""Two computations of one float32 model: engine, trainer and `transformers`, in any of their paths."""

EXACT = Limit(most=0.0)


@dataclass(slots=True)
class LogprobComparison:
    """Two sides' logprobs (nats, or logits) of the same tokens, over several rows."""

    what: str  # source of the tokens: an engine's path, a version
    pair: str  # the sides, "engine - trainer"
    limit: Limit | None = None  # None: reported, without a verdict
    rows: int = 0
    gap: LogprobGap = field(default_factory=LogprobGap)
    worst: str = ""  # the row and place of the largest difference, and what each side said there
    _most: float = -1.0

    def add(self, ours: Array, theirs: Array, places: Array | None = None, name: str = "") -> None:
        """Add a row: both sides' values [n] of the same tokens. places: [n] of these in the row `name`."""
        self.rows += 1
        self.gap.add(ours, theirs)
        sizes = np.abs(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64))
        sizes[~np.isfinite(sizes)] = np.inf
        if sizes.size and sizes.max() > self._most:
            at = int(sizes.argmax())
            self._most = float(sizes[at])
            place = at if places is None else places[at]
            self.worst = f"{name or f'row {self.rows - 1}'}, at {place}: {ours[at]:.6g} against {theirs[at]:.6g}"

    @property
    def ok(self) -> bool:
        return self.limit is None or not (self.gap.not_finite or self.limit.exceeded(self.gap))

    @property
    def verdict(self) -> str:
        return "reported" if self.limit is None else "ok" if self.ok else "FAILED"

    def figures(self) -> dict[str, Any]:
        """The comparison as JSON data."""
        found = self.gap.metrics()
        names = {"mean": "logprob_gap", "p99": "logprob_gap_p99", "max": "logprob_gap_max"}
        sizes = {name: found[key] for name, key in names.items()}
        return {"tokens": self.gap.tokens, "not_finite": self.gap.not_finite, **sizes, "worst": self.worst or None}

    def __str__(self) -> str:
        return " / ".join(f"{self.figures()[name]:.1e}" for name in ("mean", "p99", "max"))
