"""Logprob gap between engine and trainer, on the tokens that the engine sampled.

Two causes that users confuse are kept apart. Lag 0: every sampled token comes from the weights that the trainer holds,
so a difference is numerical (kernels, precision, a mixed KV). Lag > 0: the weights themselves have moved on.
Accumulators merge, and their memory does not grow: quantiles come from a log-spaced histogram and are exact to a factor
of `BIN_RATIO`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tidemill.core.types import Array, Group, Metrics, Sample, Version

_LOW, _DECADES, _PER_DECADE = 1e-9, 11, 100  # |delta| from 1e-9 to 100 nats; smaller ones count as 0
BIN_RATIO = 10 ** (1 / _PER_DECADE)
_EDGES = _LOW * BIN_RATIO ** np.arange(_DECADES * _PER_DECADE + 1)
_CLAMP = 20.0  # bound of the log ratio before exp()


@dataclass(slots=True)
class LogprobGap:
    """Statistics of delta = trainer logprob - behaviour logprob, in nats, over sampled tokens."""

    tokens: int = 0
    not_finite: int = 0  # tokens left out because one of the two was NaN or infinite: never expected
    maximum: float = 0.0  # of |delta|
    _sums: Array = field(default_factory=lambda: np.zeros(5))  # |delta|, -delta, exp(delta) - 1 - delta, w, w^2
    _bins: Array = field(default_factory=lambda: np.zeros(len(_EDGES) + 1, np.int64))

    def add(self, behaviour: Array, trainer: Array) -> None:
        """Add the two logprobs [n] of the same sampled tokens."""
        delta = np.asarray(trainer, np.float64) - np.asarray(behaviour, np.float64)
        finite = np.isfinite(delta)
        self.not_finite += int((~finite).sum())
        delta = delta[finite]
        if not delta.size:
            return
        size, bounded = np.abs(delta), delta.clip(-_CLAMP, _CLAMP)
        weight = np.exp(bounded)
        self.tokens += delta.size
        self.maximum = max(self.maximum, float(size.max()))
        terms = (size, -delta, np.expm1(bounded) - bounded, weight, weight**2)
        self._sums += np.array([term.sum() for term in terms])
        self._bins += np.bincount(np.searchsorted(_EDGES, size, side="right"), minlength=len(self._bins))

    def merge(self, other: LogprobGap) -> None:
        self.tokens += other.tokens
        self.not_finite += other.not_finite
        self.maximum = max(self.maximum, other.maximum)
        self._sums += other._sums
        self._bins += other._bins

    def quantile(self, q: float) -> float:
        """The q-quantile of |delta| over tokens, in nats, too large by at most the factor BIN_RATIO."""
        if not self.tokens:
            return 0.0
        rank = max(int(np.ceil(q * self.tokens)), 1)
        index = int(np.searchsorted(np.cumsum(self._bins), rank))
        return min(float(_EDGES[index]), self.maximum) if 0 < index < len(_EDGES) else (self.maximum if index else 0.0)

    def metrics(self) -> Metrics:
        """Means over tokens, in nats. k1, k3: KL(behaviour || trainer); ess: effective share of tokens."""
        n = max(self.tokens, 1)
        absolute, k1, k3, w, w2 = self._sums.tolist()
        return {
            "tokens": float(self.tokens),
            "not_finite": float(self.not_finite),
            "logprob_gap": absolute / n,
            "logprob_gap_p99": self.quantile(0.99),
            "logprob_gap_max": self.maximum,
            "kl_k1": k1 / n,
            "kl_k3": k3 / n,
            "ess": w * w / (n * w2) if w2 else 1.0,
        }


@dataclass(slots=True)
class Mismatch:
    """The gap of trajectories of the present weights (`matched`) and of older ones (`lagged`)."""

    matched: LogprobGap = field(default_factory=LogprobGap)
    lagged: LogprobGap = field(default_factory=LogprobGap)

    def add(self, behaviour: Array, trainer: Array, mask: Array, matched: bool) -> None:
        """Add a row's logprobs and mask [T]. matched: the trainer's present weights sampled all of it."""
        if not mask.any():
            return
        (self.matched if matched else self.lagged).add(behaviour[mask], trainer[mask])

    def merge(self, other: Mismatch) -> None:
        self.matched.merge(other.matched)
        self.lagged.merge(other.lagged)

    def metrics(self) -> Metrics:
        """`LogprobGap.metrics` under "lag0/" and "lagged/"; a kind without tokens is left out."""
        kinds = {"lag0/": self.matched, "lagged/": self.lagged}
        return {p + k: v for p, gap in kinds.items() if gap.tokens or gap.not_finite for k, v in gap.metrics().items()}


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest |delta| (nats) that rounding alone can cause."""

    mean: float = math.inf
    p99: float = math.inf
    most: float = math.inf  # of any token
    tokens: int = 1  # with fewer of them, one outlier would decide

    def exceeded(self, gap: LogprobGap) -> str:
        """A sentence on the figure that is too large; "" if none is."""
        found = gap.metrics()
        limits = {"mean": ("logprob_gap", self.mean), "p99": ("logprob_gap_p99", self.p99)}
        for name, (figure, limit) in (limits | {"largest": ("logprob_gap_max", self.most)}).items():
            if gap.tokens >= self.tokens and found[figure] > limit:
                return f"{name} |difference| {found[figure]:.1e} nats, at most {limit:.0e} is rounding"
        return ""


ROUNDING = {"float32": Limit(1e-5, 1e-4), "bfloat16": Limit(2e-2, 2e-1)}
"""Limits by the coarsest dtype in use. Measured: float32 mean 1.5e-7, maximum 1.8e-5; bfloat16 mean 2.9e-3, p99 3.3e-2."""

GROSS = {"float32": Limit(3e-4, 1e-2), "bfloat16": Limit(1e-1, 1.0, tokens=64)}
"""Beyond these limits, the distribution that was sampled is not the one that is trained."""


def lag_zero(groups: Sequence[Group], samples: Sequence[Sample], *versions: Version) -> list[bool]:
    """For each sample: True if exactly this version sampled all that its attempt has of the sample's policy.

    versions: one for each policy, of its present incarnation. A sample of a group that is not in `groups` gets False.
    """
    present, matched = [(version,) for version in versions], dict[tuple[int, int, str], bool]()
    for key, sources in (((g.id, t.sample, t.policy), t.sources) for g in groups for t in g.trajectories):
        matched[key] = matched.get(key, True) and sources in present
    return [matched.get((s.group, s.attempt, s.policy), False) for s in samples]


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
