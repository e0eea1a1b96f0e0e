"""Verifies that engines and trainer agree on what the present weights sampled (I1).

    a step's rows that version v sampled whole  ->  engine's logprobs, trainer's under v  ->  gross?  ->  PolicyMismatch

If they do not agree, there is no gradient step. Fingerprints show that both hold the same weights; this check shows that
both compute the same from them. The limits are far from rounding. Rows of older versions are expected to differ and do not
count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tidemill.core.errors import PolicyMismatch
from tidemill.core.interfaces import Trainer
from tidemill.core.types import Array, Group, Sample, Version
from tidemill.observability.diagnosis.causes import Cause, Evidence, Hypothesis, diagnose
from tidemill.observability.diagnosis.mismatch import GROSS, ROUNDING, LogprobGap, lag_zero

TEMPERATURES = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5)  # tried in turn to name a cause
_LOOKED_AT = 16  # rows


class Agreement:
    """The check of a step's rows, called before the update."""

    def __init__(self, trainer: Trainer, dtype: str) -> None:
        """Check against `trainer`, within the limits of `dtype`.

        dtype: the coarsest one that trainer or engines compute in.
        """
        self._trainer, self._dtype = trainer, dtype

    async def __call__(
        self, served: Version, groups: Sequence[Group], samples: Sequence[Sample], logprobs: Sequence[Array]
    ) -> None:
        """Raise PolicyMismatch if engines and trainer grossly disagree on what `served` sampled.

        logprobs: the trainer's for each of `samples`, float32 [T].
        """
        rows = [
            (sample, np.where(sample.mask, values, np.nan))
            for sample, values, present in zip(samples, logprobs, lag_zero(groups, samples, served), strict=True)
            if present and sample.mask.any()
        ]
        if not rows:
            return
        gap = Evidence.joined([Evidence(s.logprobs, s.mask, values) for s, values in rows]).gap
        if GROSS[self._dtype].exceeded(gap):
            cause = await self._cause(rows[:_LOOKED_AT])
            self._refuse(served, gap, "of what they sampled", f" The likely cause: {cause}.")

    def check_probe(self, served: Version, gap: LogprobGap) -> None:
        """Raise PolicyMismatch if the gap of rows that an engine scored with these weights is gross."""
        self._refuse(served, gap, "of rows they were asked to score", "")

    def _refuse(self, served: Version, gap: LogprobGap, what: str, cause: str) -> None:
        if fault := GROSS[self._dtype].exceeded(gap):
            raise PolicyMismatch(
                f"{served}: engines and trainer hold the same weights and disagree on the logprobs {what}: {fault} "
                f"({gap.tokens} tokens, {self._dtype}).{cause} No step was taken; `tidemill parity` on the run looks closer"
            )

    async def _cause(self, rows: Sequence[tuple[Sample, Array]]) -> str:
        evidence = Evidence.joined([Evidence(s.logprobs, s.mask, values) for s, values in rows])
        for temperature in TEMPERATURES:
            values = await self._trainer.forward([replace(s, temperature=temperature) for s, _ in rows])
            name = f"the engines sampled at temperature {temperature}"
            evidence.others.append(Hypothesis(Cause.TEMPERATURE, name, np.concatenate(values)))
        finding = diagnose(evidence, ROUNDING[self._dtype])
        known = finding is not None and finding.cause is not Cause.UNKNOWN
        return str(finding) if known else "unknown (stale weights, or another model, would look like this)"
