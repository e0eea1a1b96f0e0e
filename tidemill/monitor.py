"""What a run tells about itself: the controller's observer.

    rollouts, steps, versions, evaluations -> totals and step metrics -> sinks, display, trace, report

It keeps engine mismatch (lag 0) and staleness (lag > 0) apart, and changes nothing of what it watches.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tidemill.algorithms.mismatch import LogprobGap, Mismatch, lag_zero
from tidemill.breaker import Change
from tidemill.observability.display import Display
from tidemill.observability.memory import PeakMemory
from tidemill.observability.metrics import StepMetrics
from tidemill.observability.shares import shares
from tidemill.observability.sinks import Fanout
from tidemill.observability.trace import Trace
from tidemill.pool import EnginePool
from tidemill.protocols import PeerLost, Trainer
from tidemill.seeds import derive_seed
from tidemill.types import (
    TRUNCATED,
    Array,
    Group,
    InfraError,
    Metrics,
    Sample,
    Span,
    Telemetry,
    TrainResult,
    Unscorable,
    Version,
)

KINDS = {  # of the two pools' time; what is left is waiting
    "train": ("train", "apply", "forward", "snapshot"),  # "save" goes on beside them
    "generate": ("generate",),
    "sync": ("publish", "stage", "commit"),
}
CONTROLLER = "controller"
RATE_S = 10.0
MOST_REASONS = 100
PROBED_ROWS = 4  # of a batch, at each probe


def count(metrics: StepMetrics, group: Group, dropped: str | None) -> None:
    """What happened since the last step."""
    if dropped:
        metrics.add(f"dropped/{dropped}", 1)
    for t in group.trajectories:
        metrics.add("sampled_tokens", t.sampled)
        metrics.add("infra_errors", isinstance(t.outcome, InfraError))
        metrics.add("unscorable", isinstance(t.outcome, Unscorable))


def describe(metrics: StepMetrics, groups: Iterable[Group]) -> None:
    """What the policy does. Groups finish in bursts, so this looks at the latest batch's worth of them, dropped or not."""
    for t in (t for group in groups for t in group.trajectories):
        metrics.mean("reward/mean", t.reward)  # NaN where there is no score: not counted
        metrics.mean("length/mean", t.sampled)
        metrics.max("length/max", t.sampled)
        metrics.mean("truncated", t.finish in TRUNCATED)


@dataclass(slots=True)
class Totals:
    """Since this process began; the ledger knows the whole run."""

    tokens: int = 0
    trained_tokens: int = 0
    max_lag: int = 0
    lags: Counter[int] = field(default_factory=Counter)  # of groups, by their oldest token
    mismatch: Mismatch = field(default_factory=Mismatch)
    probe: LogprobGap = field(default_factory=LogprobGap)  # matched version, by score()
    probe_off: int = 0  # probes that met another version: not counted as matched
    versions: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)  # scored, unscorable, infra_errors
    reasons: Counter[str] = field(default_factory=Counter)  # why there is no score; the first MOST_REASONS kinds of it
    pauses: int = 0  # of admission, by the breaker
    paused_s: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)  # process -> peak bytes

    @property
    def matched(self) -> LogprobGap:
        """Engine against trainer on the same weights: lag-0 trajectories and probes together."""
        both = LogprobGap()
        both.merge(self.mismatch.matched)
        both.merge(self.probe)
        return both


class Monitor:
    def __init__(self, sinks: Fanout, display: Display, trace: Trace) -> None:
        self._sinks, self._display, self.trace = sinks, display, trace
        self._trainer: Trainer | None = None
        self._pool: EnginePool | None = None
        self._window, self.totals = StepMetrics(), Totals()
        self._recent: deque[Group] = deque(maxlen=1)  # the latest groups that were rolled out
        self._sampled: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])  # when, tokens so far
        self._accuracy: float | None = None
        self._version: Version | None = None
        self._last = time.monotonic()
        self._judging: list[Span] = []
        self._memory = PeakMemory()  # of this process

    def attach(self, trainer: Trainer, pool: EnginePool, judging: list[Span], batch: int) -> None:
        """The parts to ask for telemetry. judging: the rollouts' own spans, which this takes. batch: groups a step."""
        self._trainer, self._pool, self._judging, self._last = trainer, pool, judging, time.monotonic()
        self._recent = deque(maxlen=batch)

    def header(self, lines: Sequence[str]) -> None:
        self._display.header(lines)

    def admitted(self, group_id: int) -> None:
        pass

    def rolled_out(self, group: Group, dropped: str | None) -> None:
        count(self._window, group, dropped)
        self._recent.append(group)
        self.totals.tokens += sum(t.sampled for t in group.trajectories)
        self._judged(group)

    def _judged(self, group: Group) -> None:
        """Count the outcomes; the first one without a score is shown, of each kind."""
        for outcome in (t.outcome for t in group.trajectories):
            kind = "infra_errors" if isinstance(outcome, InfraError) else "scored"
            kind = "unscorable" if isinstance(outcome, Unscorable) else kind
            self.totals.outcomes[kind] += 1
            if isinstance(outcome, InfraError | Unscorable):
                if self.totals.outcomes[kind] == 1:
                    self._display.note(f"an attempt has no score and is not trained on ({kind}): {outcome.reason}")
                if outcome.reason in self.totals.reasons or len(self.totals.reasons) < MOST_REASONS:
                    self.totals.reasons[outcome.reason] += 1

    def judging(self, change: Change) -> None:
        """Admission pauses because judging fails, or goes on."""
        self._display.note(change.text)
        if change.kind == "paused":
            self._window.add("judging/pauses", 1)
            self.totals.pauses += 1
        else:
            self._window.add("judging/paused_s", change.seconds)
            self.totals.paused_s += change.seconds

    def published(self, version: Version) -> None:
        self._version = version
        self.totals.versions += 1

    def evaluated(self, step: int, results: Metrics) -> None:
        self._accuracy = results["accuracy"]
        self._sinks.log(step, {f"eval/{name}": value for name, value in results.items()})
        self._display.evaluated(step, results)

    async def probe(
        self, served: Version, samples: Sequence[Sample], logprobs: Sequence[Array], pool: EnginePool
    ) -> LogprobGap:
        """Score rows of the batch on an engine whose weights are those the trainer has just used (I1)."""
        found = LogprobGap()
        first = derive_seed("probe", served.step)
        for i in range(min(PROBED_ROWS, len(samples))):
            index = (first + i * 7919) % len(samples)
            sample = samples[index]
            scored = await pool.run(lambda e, s=sample: e.score(s.tokens, served.policy, s.temperature, 0))
            if scored.version != served:
                self.totals.probe_off += 1
            elif sample.mask.any():
                found.add(scored.logprobs[sample.mask], logprobs[index][sample.mask])
        self.totals.probe.merge(found)
        return found

    async def trained(
        self, step: int, groups: Sequence[Group], samples: Sequence[Sample], result: TrainResult, metrics: Metrics
    ) -> None:
        assert self._version is not None, "a step trains on what a published version sampled"
        gap, present = Mismatch(), lag_zero(groups, samples, self._version)
        for sample, logprobs, matched in zip(samples, result.logprobs, present, strict=True):
            gap.add(sample.logprobs, logprobs, sample.mask, matched)
        self.totals.mismatch.merge(gap)
        lags = [step - group.oldest for group in groups]
        self.totals.lags.update(lags)
        self.totals.max_lag = max(self.totals.max_lag, *lags)
        self.totals.trained_tokens += int(result.metrics["tokens"])
        describe(self._window, self._recent)
        matched, rolled_out = self.totals.matched, self._window.take()
        record = {
            "step": float(step + 1),
            **rolled_out,
            **{f"train/{name}": value for name, value in metrics.items()},
            **_means(result.metrics),
            **{f"mismatch/{name}": value for name, value in gap.metrics().items()},
            "lag/mean": float(np.mean(lags)),
            "lag/max": float(max(lags)),
            "version": float(self._version.step if self._version else -1),
        }
        if matched.tokens:
            found = matched.metrics()
            record |= {"mismatch/lag0_mean": found["logprob_gap"], "mismatch/lag0_p99": found["logprob_gap_p99"]}
        if self._accuracy is not None:
            record["eval/accuracy"] = self._accuracy
        record |= await self._times()
        self._sinks.log(step + 1, record)
        self._display.step(record)

    async def _times(self) -> Metrics:
        """Rates and shares since the last step, over all processes of the two pools."""
        assert self._trainer is not None and self._pool is not None
        telemetry = [await self._trainer.telemetry()]
        for engine in self._pool.engines:
            with contextlib.suppress(PeerLost):  # it is started again; what it did since the last step is not known
                telemetry.append(await engine.telemetry())
        begin, now = self._last, time.monotonic()
        self._last = now
        for each in telemetry:
            self._collect(each)
        self.trace.add(CONTROLLER, os.getpid(), self._judging)
        self._judging.clear()
        self.totals.memory[CONTROLLER] = self._memory.update()
        spent = shares({each.process: each.spans for each in telemetry}, begin, now, KINDS)["overall"]
        return {"throughput/tokens_per_s": self._rate(now), "time/step_s": now - begin} | {
            f"time/{k}": v for k, v in spent.items()
        }

    def _rate(self, now: float) -> float:
        """Sampled tokens per second, over the last `RATE_S` seconds."""
        self._sampled.append((now, self.totals.tokens))
        while len(self._sampled) > 2 and now - self._sampled[1][0] > RATE_S:
            self._sampled.popleft()
        (begin, before), (end, after) = self._sampled[0], self._sampled[-1]
        return (after - before) / max(end - begin, 1e-9)

    def _collect(self, telemetry: Telemetry) -> None:
        name = telemetry.process
        self.totals.memory[name] = max(self.totals.memory.get(name, 0), telemetry.memory_bytes)
        self.trace.collect(telemetry)

    def close(self) -> None:
        self._sinks.close()


def _means(sums: Metrics) -> Metrics:
    """A trainer's sums over tokens, as means under their names."""
    tokens = max(sums["tokens"], 1.0)
    means = {f"train/{name}": value / tokens for name, value in sums.items() if name != "tokens"}
    return means | {"train/tokens": sums["tokens"]}
