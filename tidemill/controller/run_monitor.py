"""The controller's observer: turns events into metrics, display, trace and report.

    rollouts, steps, versions, evaluations -> totals and step metrics -> sinks, display, trace, report

It keeps engine mismatch (lag 0) and staleness (lag > 0) apart, and changes nothing that it watches.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tidemill.controller.circuit_breaker import Change
from tidemill.controller.engine_pool import EnginePool
from tidemill.controller.evaluation import MOST_PARTS, Unscored
from tidemill.controller.policy_pools import Pool
from tidemill.core.episode_counts import counts_in
from tidemill.core.errors import PeerLost
from tidemill.core.interfaces import Engine, Trainer
from tidemill.core.outcomes import parts_of
from tidemill.core.seeding import derive_seed
from tidemill.core.types import (
    GREEDY,
    TRUNCATED,
    Array,
    Group,
    InfraError,
    Metrics,
    Sample,
    Span,
    Telemetry,
    TrainResult,
    Trajectory,
    Unscorable,
    Version,
)
from tidemill.observability.console import Display
from tidemill.observability.console_table import HELD_OUT
from tidemill.observability.diagnosis.cuts import Limit, limit_of, limits
from tidemill.observability.diagnosis.mismatch import LogprobGap, Mismatch, lag_zero
from tidemill.observability.diagnosis.symptoms import Symptoms
from tidemill.observability.engine_share import EngineUse
from tidemill.observability.metrics import StepMetrics
from tidemill.observability.process_memory import PeakMemory
from tidemill.observability.sinks import Fanout
from tidemill.observability.time_breakdown import CONTROLLER, EPISODE, EVALUATE, Account, account, computed_by
from tidemill.observability.timeline import IDLE, Beside, Timeline
from tidemill.observability.trace import Trace, merged

RATE_S = 10.0
ENGINE_S = 5.0  # deadline of the telemetry of an engine, or of the trainer
MOST_REASONS = 100
TAILS = frozenset({"encoded_alone", "text_differs"})  # of appended turns, see `models.turn_renderers`
COUNTED = {
    "prefix_cache/lost_tokens": "lost_tokens",
    "speculation/drafted_tokens": "drafted_tokens",
    "speculation/accepted_tokens": "accepted_tokens",
    "weights/sent_bytes": "published_bytes",
    "weights/whole_bytes": "published_whole_bytes",
}  # a step's metrics, and the processes' counters that they add up
PROBED_ROWS = 4  # rows of a batch that each probe scores


def count(metrics: StepMetrics, group: Group, dropped: str | None) -> None:
    """Add a finished group to the counts since the last step."""
    if dropped:
        metrics.add(f"dropped/{dropped}", 1)
    for t in group.trajectories:
        metrics.add("sampled_tokens", t.sampled)
        for name in TAILS & t.info.keys():
            metrics.add(f"chat/{name}", t.info[name])
    for t in group.ends:
        metrics.add("infra_errors", isinstance(t.outcome, InfraError))
        metrics.add("unscorable", isinstance(t.outcome, Unscorable))
        for name, number in counts_in(t.info).items():
            metrics.add(name, number)


def describe(metrics: StepMetrics, groups: Iterable[Group]) -> None:
    """Add the policy's lengths, rewards and truncations in these groups to a step's metrics."""
    by_env: dict[str, list[Trajectory]] = {}
    for env, rows in ((group.task.env, rows) for group in groups for rows in group.attempts):
        t, length = rows[-1], sum(int(row.learnt.sum()) for row in rows)
        if t.sample == GREEDY:
            continue
        if not length:  # it failed before its first reply, so it says nothing about the policy
            continue
        metrics.mean("length/mean", length)
        metrics.max("length/max", length)
        if t.given is None:  # a score that came with an offline reply is no reward of the policy
            if env:
                metrics.mean(f"reward/{env}", t.reward)
            metrics.mean("reward/mean", t.reward)  # NaN, which is not counted, where there is no score
            by_env.setdefault(env, []).append(t)
            metrics.mean("truncated", t.finish in TRUNCATED)
            if (limit := limit_of(t)) is not None:
                metrics.add(f"truncated/{limit[0]}", 1)
    for env, attempts in by_env.items():
        for part, values in parts_of(attempts, MOST_PARTS).items():
            if env or part != "mean":  # `reward/mean` is the whole reward
                metrics.mean(f"reward/{env}/{part}" if env else f"reward/{part}", values)


@dataclass(slots=True)
class Totals:
    """Totals since this process began; the ledger knows the whole run."""

    tokens: int = 0
    trained_tokens: int = 0
    max_lag: int = 0
    lags: Counter[int] = field(default_factory=Counter)  # groups by the lag of their oldest token
    mismatch: Mismatch = field(default_factory=Mismatch)
    probe: LogprobGap = field(default_factory=LogprobGap)  # matched version, by score()
    probe_off: int = 0  # probes that met another version: not counted as matched
    versions: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)  # scored, unscorable, infra_errors
    cut: Counter[Limit] = field(default_factory=Counter)  # attempts, by the limit that ended their last reply
    reasons: Counter[str] = field(default_factory=Counter)  # reasons for a missing score, the first MOST_REASONS of them
    counts: Counter[str] = field(default_factory=Counter)  # of tools, gateways, ...: see `core.episode_counts`
    refusals: Counter[str] = field(default_factory=Counter)  # why calls of agents were refused, the first MOST_REASONS
    pauses: int = 0  # of admission, by the breaker
    paused_s: float = 0.0
    paused_for: str = ""  # why judging failed, the latest time
    unscored: str = ""  # why held-out attempts have no score, the commonest reason in the latest evaluation
    memory: dict[str, int] = field(default_factory=dict)  # process -> peak bytes
    counters: dict[str, Metrics] = field(default_factory=dict)  # process -> what it has done since it began
    time: Account = field(default_factory=Account)
    symptoms: Symptoms = field(default_factory=Symptoms)

    @property
    def matched(self) -> LogprobGap:
        """Engine against trainer on the same weights: lag-0 trajectories and probes together."""
        both = LogprobGap()
        both.merge(self.mismatch.matched)
        both.merge(self.probe)
        return both


class Monitor:
    """Observer of one run: see the module."""

    def __init__(self, sinks: Fanout, display: Display, trace: Trace) -> None:
        self._sinks, self._display, self.trace = sinks, display, trace
        self._trainer: Trainer | None = None
        self._pools: Sequence[EnginePool] = ()
        self._window, self.totals = StepMetrics(), Totals()
        self._dropped: list[Group] = []  # since the latest step
        self._sampled: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])  # when, tokens so far
        self._held_out: Metrics = {}  # of the latest evaluation, for the steps after it
        self._versions: dict[int, dict[str, Version]] = {}  # by step and policy, those that no step has reported yet
        self._last = time.monotonic()
        self._later: dict[str, list[Span]] = {}  # by process, its spans after `_last`
        self.loop, self.beside = Timeline(), Beside()  # spans of this process: its steps; rollouts and evaluations
        self.engines = EngineUse()
        self._memory = PeakMemory()  # of this process
        self._figures: Callable[[], Metrics] = dict  # metrics of the task source

    def attach(self, trainer: Trainer, pools: Sequence[EnginePool], figures: Callable[[], Metrics] = dict) -> None:
        """Set the parts to ask for telemetry. figures: metrics of the task source, asked for once a step."""
        self._figures = figures
        self._trainer, self._pools, self._last = trainer, pools, time.monotonic()
        self._sampled = deque([(self._last, self.totals.tokens)])  # a warm-up has ended, and it sampled nothing
        self.loop.take()
        self.beside.take()
        self._later = {}

    def header(self, lines: Sequence[str]) -> None:
        self._display.header(lines)

    def rolled_out(self, group: Group, dropped: str | None) -> None:
        count(self._window, group, dropped)
        if dropped:
            self._dropped.append(group)
        self.totals.tokens += sum(t.sampled for t in group.trajectories)
        self._judged(group)

    def _judged(self, group: Group) -> None:
        """Count the outcomes, and show the first attempt without a score of each kind."""
        self.totals.cut.update(limits(t for t in group.ends if t.sample != GREEDY))
        for t in group.ends:
            self.totals.counts.update(counts_in(t.info))
        for outcome in (t.outcome for t in group.ends):
            kind = "infra_errors" if isinstance(outcome, InfraError) else "scored"
            kind = "unscorable" if isinstance(outcome, Unscorable) else kind
            self.totals.outcomes[kind] += 1
            if isinstance(outcome, InfraError | Unscorable):
                if self.totals.outcomes[kind] == 1:
                    self._display.note(f"an attempt has no score and is not trained on ({kind}): {outcome.reason}")
                if outcome.reason in self.totals.reasons or len(self.totals.reasons) < MOST_REASONS:
                    self.totals.reasons[outcome.reason] += 1

    def refused(self, why: str) -> None:
        """Keep why a call of an agent was refused."""
        if why in self.totals.refusals or len(self.totals.refusals) < MOST_REASONS:
            self.totals.refusals[why] += 1

    def judging(self, change: Change) -> None:
        """Record and show that admission pauses because judging fails, or resumes."""
        self._display.note(change.text)
        if change.kind == "paused":
            self._window.add("judging/pauses", 1)
            self.totals.pauses += 1
            self.totals.paused_for = change.reason
        elif change.kind == "resumed":
            self._window.add("judging/paused_s", change.seconds)
            self.totals.paused_s += change.seconds

    def published(self, version: Version) -> None:
        self._versions.setdefault(version.step, {})[version.policy] = version  # of the present incarnation
        self.totals.versions += 1

    def remember(self, results: Metrics) -> None:
        """Keep the latest evaluation's results for the steps until the next one."""
        self._held_out = {f"eval/{name}": results[name] for name in HELD_OUT if name in results}

    def unscored(self, found: Unscored) -> None:
        """Keep why attempts of an evaluation have no score, until `evaluated`."""
        self.totals.unscored = found.commonest

    def evaluated(self, step: int, results: Metrics) -> None:
        self.remember(results)
        self._sinks.log(step, {f"eval/{name}": value for name, value in results.items()})
        self._display.evaluated(step, results, self.totals.unscored)

    def saving(self, step: int) -> None:
        self._display.note(f"step {step} was the last one: its checkpoint is being written")

    async def probe(self, served: Version, samples: Sequence[Sample], logprobs: Sequence[Array], pool: Pool) -> LogprobGap:
        """Score rows of the batch on an engine whose weights are those the trainer has just used (I1)."""
        found = LogprobGap()
        first, own_rows = derive_seed("probe", served.step), [i for i, s in enumerate(samples) if s.policy == served.policy]
        for i in range(min(PROBED_ROWS, len(own_rows))):
            index = own_rows[(first + i * 7919) % len(own_rows)]
            sample = samples[index]
            if not sample.mask.any():
                continue  # no policy sampled it
            scored = await pool.run(lambda e, s=sample: e.score(s.tokens, served.policy, s.temperature, 0))
            if scored.version != served:
                self.totals.probe_off += 1
            else:
                own = logprobs[index]
                if sample.support is not None:  # an engine scores over the whole vocabulary
                    assert self._trainer is not None
                    (own,) = await self._trainer.forward([replace(sample, support=None)])
                found.add(scored.logprobs[sample.mask], own[sample.mask])
        self.totals.probe.merge(found)
        return found

    async def trained(
        self, step: int, groups: Sequence[Group], samples: Sequence[Sample], result: TrainResult, metrics: Metrics
    ) -> None:
        served = self._versions.pop(step)  # what engines served when it was trained; the next may be there already
        gap, present = Mismatch(), lag_zero(groups, samples, *served.values())
        for sample, logprobs, matched in zip(samples, result.logprobs, present, strict=True):
            gap.add(sample.logprobs, logprobs, sample.mask, matched)
        self.totals.mismatch.merge(gap)
        lags = [step - group.oldest for group in groups if group.oldest is not None]
        self.totals.lags.update(lags)
        self.totals.max_lag = max([self.totals.max_lag, *lags])
        self.totals.trained_tokens += int(result.metrics["tokens"])
        # Each group once: with its step, or with the step that followed when it was dropped. Else a policy whose groups are
        # dropped for being solved would not be seen to solve them.
        describe(self._window, [*groups, *self._dropped])
        self._dropped.clear()
        matched, rolled_out = self.totals.matched, self._window.take()
        record = {
            "step": float(step + 1),
            **rolled_out,
            **{f"train/{name}": value for name, value in metrics.items()},
            **_means(result.metrics),
            **{f"mismatch/{name}": value for name, value in gap.metrics().items()},
            **({"lag/mean": float(np.mean(lags)), "lag/max": float(max(lags))} if lags else {}),
            "version": float(step),
            **self._figures(),
        }
        if matched.tokens:
            found = matched.metrics()
            record |= {"mismatch/lag0_mean": found["logprob_gap"], "mismatch/lag0_p99": found["logprob_gap_p99"]}
        record |= self._held_out
        for warning in self.totals.symptoms.look(groups, record):
            self._display.note(f"warning: {warning}")
        record |= await self._times()
        if not self.totals.tokens:  # nothing is sampled at all
            record["throughput/tokens_per_s"] = record["train/tokens"] / max(record["time/step_s"], 1e-9)
        self._sinks.log(step + 1, record)
        self._display.step(record)

    async def _times(self) -> Metrics:
        """Throughput, and the breakdown of the time since the last step.

        The step's time ends before any process is asked, so that each reports all of it. Spans after that belong to the next
        step.
        """
        assert self._trainer is not None
        begin, now = self._last, time.monotonic()
        self._last = now
        loop, beside, rate = self.loop.take(), self.beside.take(), self._rate(now)
        engines = (engine for pool in self._pools for engine in pool.engines)
        told = await asyncio.gather(*map(self._of, (self._trainer, *engines)))
        telemetry = [each for each in told if each is not None]
        collected = list(map(self._collect, telemetry))
        pools = {each.process: [*self._later.get(each.process, ()), *each.spans] for each in telemetry}
        self._later |= {name: [span for span in spans if span.end > now] for name, spans in pools.items()}
        own = [Span(f"loop/{span.name}", span.start, span.end) for span in loop]
        self.trace.add(CONTROLLER, os.getpid(), [*own, *(span for span in beside if span.name != EPISODE)])
        self.totals.memory[CONTROLLER] = self._memory.update()
        step = account(begin, now, loop, beside, pools)
        self.totals.time.add(step)
        self.engines.report(now, computed_by(pools, begin, now), merged(beside, [EVALUATE]))
        overall = {f"time/{kind}": share for kind, share in step.overall().items()}
        each = {f"time/{name}/{k}": v for name, kinds in step.shares().items() for k, v in kinds.items() if v > 0}
        judged = {"time/reward": step.judged / max(now - begin, 1e-9)}
        sums = {name: sum(each[counter] for each in collected) for name, counter in COUNTED.items()}
        judged |= {name: amount for name, amount in sums.items() if amount}
        return {"throughput/tokens_per_s": rate, "time/step_s": now - begin, **overall, **judged, **each}

    @staticmethod
    async def _of(process: Engine | Trainer) -> Telemetry | None:
        """A process's telemetry, or None if it is lost or silent.

        Others deal with such a process. Its spans since the last step come later, or never.
        """
        try:
            return await asyncio.wait_for(process.telemetry(), ENGINE_S)
        except (PeerLost, TimeoutError):
            return None

    def _rate(self, now: float) -> float:
        """Sampled tokens a second over the last `RATE_S` seconds."""
        self._sampled.append((now, self.totals.tokens))
        while len(self._sampled) > 2 and now - self._sampled[1][0] > RATE_S:
            self._sampled.popleft()
        (begin, before), (end, after) = self._sampled[0], self._sampled[-1]
        return (after - before) / max(end - begin, 1e-9)

    def _collect(self, telemetry: Telemetry) -> Metrics:
        """Take a process's telemetry; returns what some of its counters have gone up by since the last one."""
        name = telemetry.process
        before = self.totals.counters.get(name, {})
        self.totals.memory[name] = max(self.totals.memory.get(name, 0), telemetry.memory_bytes)
        self.totals.counters[name] = telemetry.counters
        self.trace.add(name, telemetry.pid, [span for span in telemetry.spans if span.name != IDLE])
        # An engine that was replaced begins at 0.
        return {each: max(0.0, telemetry.counters.get(each, 0.0) - before.get(each, 0.0)) for each in COUNTED.values()}

    def close(self) -> None:
        self._sinks.close()


def _means(sums: Metrics) -> Metrics:
    """A trainer's sums over tokens as means, under their metrics' names."""
    tokens = max(sums["tokens"], 1.0)
    means = {f"train/{name}": value / tokens for name, value in sums.items() if name != "tokens"}
    return means | {"train/tokens": sums["tokens"]}
