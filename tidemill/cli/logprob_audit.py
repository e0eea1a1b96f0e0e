"""Comparison of a run's recorded logprobs with the weights that it left on disk.

Only trajectories of a single version are replayed: under `keep`, a token of a later version was computed with KV of an
earlier one. A folder holds a version if its weights, in the serving dtype, or its adapter have that version's fingerprint,
whatever its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from tidemill.cli.logprob_sources import engine_of, logits_of, sample_of, trained
from tidemill.core.config import C, Config, build
from tidemill.core.errors import CheckpointError, PayloadLost
from tidemill.core.types import GREEDY, Array, Finish, Trajectory, Version
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.ledger.ledger import SqliteLedger
from tidemill.models.adapter_files import load_merged
from tidemill.models.adapter_update import folder_fingerprint
from tidemill.models.decoder import Decoder
from tidemill.models.served_weights import Contents
from tidemill.observability.diagnosis.causes import Cause, Evidence, Finding, Hypothesis, diagnose
from tidemill.observability.diagnosis.mismatch import ROUNDING, Limit, LogprobComparison
from tidemill.run.planner.plan import plan_of
from tidemill.run.recipe import RunConfig
from tidemill.run.storage.checkpoint_manifest import read_manifest
from tidemill.run.storage.run_folder import RunFolder
from tidemill.trainer.trainer_kinds import LoraSettings, TrainerSettings

ROWS = 64  # trajectories of each version
DIAGNOSED = 4  # differing trajectories to explain, each in every way that could
FITTED = 64  # tokens of a trajectory whose whole distribution is compared


@dataclass(frozen=True, slots=True)
class Stored:
    """Weights on disk, and the published versions with that fingerprint."""

    folder: Path
    versions: tuple[Version, ...]


@dataclass(slots=True)
class AuditRow:
    """A trajectory with its recomputed logprobs."""

    group: int
    place: int
    trajectory: Trajectory
    said: Array  # [T] the trainer's logprobs at the recorded version and temperature, over the recorded support
    whole: Array  # [T] the trainer's, over the whole vocabulary
    served: Array  # [T] an engine's, over the whole vocabulary

    def __str__(self) -> str:
        return f"group {self.group}, trajectory {self.place}"

    def add_to(self, trainer: LogprobComparison, engine: LogprobComparison) -> None:
        """Add the record against the trainer's logprobs, and against an engine's. The latter knows no support."""
        places = np.flatnonzero(self.trajectory.mask[1:]) + 1  # nothing predicts the first token
        recorded = self.trajectory.logprobs
        trainer.add(recorded[places], self.said[places], places, str(self))
        recorded = recorded if self.trajectory.support is None else self.whole
        engine.add(recorded[places], self.served[places], places, str(self))


@dataclass(slots=True)
class VersionReplay:
    """Differences of one version's trajectories, in nats."""

    version: Version
    folder: str
    trainer: LogprobComparison  # recorded against the trainer's
    engine: LogprobComparison  # recorded against an engine's
    off: int = 0  # trajectories that differ by more than rounding
    findings: Counter[str] = field(default_factory=Counter)  # causes of those that were explained
    first: str = ""  # the first trajectory that differs

    @property
    def trajectories(self) -> int:
        return self.trainer.rows


@dataclass(slots=True)
class Replay:
    dtype: str
    limit: Limit
    versions: list[VersionReplay] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)  # folders whose weights were never published
    elsewhere: int = 0  # trajectories of versions whose weights are not on disk, or of several
    given: int = 0  # trajectories that no version sampled: there is nothing to replay of them
    removed: int = 0  # by retention
    unreadable: int = 0  # the file is damaged or gone

    @property
    def replayed(self) -> int:
        return sum(each.trajectories for each in self.versions)

    @property
    def ok(self) -> bool:
        some = bool(self.replayed) or (self.given > 0 and not self.elsewhere + self.removed + self.unreadable)
        return some and not self.strangers and not any(each.off for each in self.versions)


async def replay(run: RunFolder, rows: int = ROWS) -> Replay:
    """Recompute up to `rows` trajectories of each version whose weights are on disk."""
    config = build(RunConfig, run.recipe())
    coarsest = plan_of(config).coarsest
    result = Replay(coarsest, ROUNDING[coarsest])
    with SqliteLedger(run.path, mode="read") as ledger:
        stored, result.strangers = _stored(run, ledger.versions(), config)
        chosen = _choose(ledger, stored, rows, result)
    for version, picked in chosen.items():
        if picked:
            where = next(each for each in stored if version in each.versions)
            result.versions.append(await _Replayer(config, stored, where, result.limit).of(version, picked))
    return result


def _candidates(run: RunFolder, lora: LoraSettings | None, policy: str) -> Iterator[tuple[Path, int | None]]:
    """Folders of a policy's weights, and the step whose they should be; None: the last one's.

    lora: of adapters that were published alone. policy: "" where there is one."""
    first = run.initial if lora is None else lora.start and Path(lora.start).expanduser()
    if first and first.is_dir():
        yield first, 0
    for folder in sorted(run.checkpoints.glob("step-*")):
        try:
            yield folder / "trainer" / policy, read_manifest(folder).step
        except CheckpointError:
            continue  # unfinished, or set aside: no resume uses it
    final = run.final / policy if lora is None else run.final / f"{policy}-adapter" if policy else run.final_adapter
    if final.is_dir():
        yield final, None


def _stored(run: RunFolder, published: Sequence[Version], config: RunConfig) -> tuple[list[Stored], list[str]]:
    """Folders with weights of published versions, and complaints about folders without. Frozen policies sample none."""
    found, strangers = list[Stored](), list[str]()
    for policy in config.trained_policies:
        own = [version for version in published if version.policy == policy]
        _stored_of(run, config, policy, own, found, strangers)
    return found, strangers


def _stored_of(
    run: RunFolder,
    config: RunConfig,
    policy: str,
    published: Sequence[Version],
    found: list[Stored],
    strangers: list[str],
) -> None:
    """Add what `_stored` returns, of one policy."""
    dtype = getattr(torch, config.trainer.serving_dtype)
    last = max((version.step for version in published), default=0)
    lora = config.adapters.get(policy) if config.adapter_rank else None
    if lora and lora.start is None and run.initial.is_dir():  # a new adapter adds nothing
        found.append(Stored(run.initial, tuple(version for version in published if version.step == 0)))
    for folder, step in _candidates(run, lora, policy if config.policies else ""):
        own = folder_fingerprint(folder) if config.adapter_rank else Contents.of(_weights(config, folder), dtype).fingerprint
        versions = tuple(version for version in published if version.fingerprint == own)
        expected = [str(version) for version in published if version.step == (last if step is None else step)]
        if versions:
            found.append(Stored(folder, versions))
        elif expected:  # the run may have ended before it published a checkpoint's weights
            strangers.append(f"{folder} holds weights that were never published; {expected[-1]} was expected there")


def _lora(config: RunConfig) -> LoraSettings | None:
    return config.trainer.lora if isinstance(config.trainer, TrainerSettings) else None


def _weights(config: RunConfig, folder: Path) -> Decoder:
    """The model of a run's folder, as it is trained and served. Only the initial model is still to be quantised."""
    lora = _lora(config) if folder.name == RunFolder(folder.parent).initial.name else None
    return load_merged(folder, base_dtype="float32" if lora is None else lora.base_dtype)


def _choose(
    ledger: SqliteLedger, stored: Sequence[Stored], rows: int, result: Replay
) -> dict[Version, list[tuple[int, int, Trajectory]]]:
    """The latest trajectories of each stored version. Counts all others in `result`."""
    chosen: dict[Version, list[tuple[int, int, Trajectory]]] = {v: [] for each in stored for v in each.versions}
    steps = {version.step for version in chosen}
    for line in ledger.samples(order="recent", limit=2**62):
        result.given += line.finish == Finish.GIVEN
        if not line.sampled:
            continue
        if line.oldest != line.newest or line.oldest not in steps:
            result.elsewhere += 1
        elif line.gone:
            result.removed += 1
        elif any(len(picked) < rows for version, picked in chosen.items() if version.step == line.oldest):
            try:
                trajectory = ledger.load_trajectory(line.group_id, line.place)
            except PayloadLost:
                result.unreadable += 1
                continue
            if trajectory.sample == GREEDY:
                continue  # greedy tokens have no logprob
            whole = len(trajectory.sources) == 1 and trajectory.parent is None
            picked = chosen.get(trajectory.sources[0]) if whole else None
            if picked is None:
                result.elsewhere += 1  # of another incarnation, or what it was forked from may be of other weights
            elif len(picked) < rows:
                picked.append((line.group_id, line.place, trajectory))
    return chosen


def _native(kind: type[C], used: Config) -> C:
    """Native settings for the replay, also when the run used another kind of engine or trainer."""
    shared = {name: value for name, value in used.model_dump().items() if name in kind.model_fields and name != "kind"}
    return used if isinstance(used, kind) else kind.model_validate(shared)


class _Replayer:
    def __init__(self, config: RunConfig, stored: Sequence[Stored], where: Stored, limit: Limit) -> None:
        self._config, self._stored, self._where, self._limit = config, stored, where, limit
        self._decoder = _weights(config, where.folder)

    async def of(self, version: Version, picked: Sequence[tuple[int, int, Trajectory]]) -> VersionReplay:
        trajectories = [t for *_, t in picked]
        said = await self._trained(self._decoder, trajectories)
        whole = said
        if any(t.support is not None for t in trajectories):
            whole = await self._trained(self._decoder, [replace(t, support=None) for t in trajectories])
        served = await self._served(trajectories)
        rows = [AuditRow(*which, *each) for which, *each in zip(picked, said, whole, served, strict=True)]
        result = VersionReplay(version, str(self._where.folder), *_comparisons(str(version), self._limit))
        for row in rows:
            row.add_to(result.trainer, result.engine)
        off = self._off(rows, result)
        result.off = len(off)
        for row in off[:DIAGNOSED]:
            result.findings[str(await self._explain(row, version))] += 1
        if off:
            result.first = str(off[0])
        return result

    def _off(self, rows: Sequence[AuditRow], result: VersionReplay) -> list[AuditRow]:
        """The rows that differ. A short one may by chance, unless all together do."""
        together = result.trainer.ok and result.engine.ok
        slack = 4.0 if together and plan_of(self._config).coarsest != "float32" else 1.0
        limit = Limit(self._limit.mean * slack, self._limit.p99 * slack)
        found = []
        for row in rows:
            own = _comparisons("", limit)
            row.add_to(*own)
            if _evidence(row).strays or not all(each.ok for each in own):
                found.append(row)
        return found

    async def _trained(self, decoder: Decoder, trajectories: Sequence[Trajectory], dtype: str | None = None) -> list[Array]:
        """The trainer's logprobs, [T] for each trajectory, of every token but the first."""
        settings = _native(TrainerSettings, self._config.trainer).model_copy(update={"dtype": dtype} if dtype else {})
        return await trained(
            decoder, settings, [sample_of(t.tokens, t.mask, t.temperature, t.support) for t in trajectories]
        )

    async def _served(self, trajectories: Sequence[Trajectory]) -> list[Array]:
        settings = _native(EngineSettings, self._config.engine)
        decoder = _weights(self._config, self._where.folder).to(getattr(torch, self._config.trainer.serving_dtype))
        async with engine_of(decoder, settings) as engine:
            return [(await engine.score(t.tokens, "policy", t.temperature, 0)).logprobs for t in trajectories]

    async def _explain(self, row: AuditRow, version: Version) -> Finding:
        evidence = _evidence(row)
        if finding := diagnose(evidence, self._limit):
            if finding.cause is not Cause.UNKNOWN:
                return finding
        else:
            return Finding(Cause.UNKNOWN, "the trainer agrees with the record, an engine does not")
        evidence.others = [*self._by_distribution(row), *await self._by_weights(row, version)]
        evidence.low = (await self._trained(self._decoder, [row.trajectory], "bfloat16"))[0]
        finding = diagnose(evidence, self._limit)
        assert finding is not None
        return finding

    def _by_distribution(self, row: AuditRow) -> Iterator[Hypothesis]:
        trajectory = row.trajectory
        sampled = np.flatnonzero(trajectory.mask)
        where = sampled[sampled > 0][:FITTED]
        if not where.size:
            return
        logits = logits_of(self._decoder, trajectory.tokens, where - 1).astype(np.float64)
        targets, recorded = trajectory.tokens[where].astype(np.int64), trajectory.logprobs[where]
        if trajectory.support is not None:
            yield Hypothesis(Cause.TRUNCATED, "over the whole vocabulary, not the support that was kept", row.whole)
        fitted = fit_temperature(logits, targets, recorded)
        values = _at(logits, targets, fitted)
        detail = f"sampled at {fitted:.3g}, recorded as {trajectory.temperature:.3g}"
        yield Hypothesis(Cause.TEMPERATURE, detail, _placed(values, where, trajectory))

    async def _by_weights(self, row: AuditRow, version: Version) -> list[Hypothesis]:
        found = []
        for other in self._stored:
            if version not in other.versions:
                values = await self._trained(_weights(self._config, other.folder), [row.trajectory])
                found.append(Hypothesis(Cause.STALE, f"those of {other.versions[0]} fit, not of {version}", values[0]))
        return found


def fit_temperature(logits: Array, targets: Array, recorded: Array) -> float:
    """The temperature at which logits [n, V] best fit recorded logprobs [n], to nine digits."""
    low, high = 0.1, 10.0
    while high / low > 1 + 1e-9:
        tried = np.geomspace(low, high, 11)
        best = int(np.argmin([np.abs(_at(logits, targets, each) - recorded).mean() for each in tried]))
        low, high = tried[max(best - 1, 0)], tried[min(best + 1, len(tried) - 1)]
    return float(low + high) / 2


def _at(logits: Array, targets: Array, temperature: float) -> Array:
    return torch.from_numpy(logits / temperature).log_softmax(-1).numpy()[np.arange(len(targets)), targets]


def _placed(values: Array, where: Array, trajectory: Trajectory) -> Array:
    """Values at `where` in a row [T], NaN elsewhere."""
    row = np.full(len(trajectory.tokens), np.nan)
    row[where] = values
    return row


def _comparisons(what: str, limit: Limit) -> tuple[LogprobComparison, LogprobComparison]:
    return LogprobComparison(what, "recorded - trainer", limit), LogprobComparison(what, "recorded - engine", limit)


def _evidence(row: AuditRow) -> Evidence:
    return Evidence(row.trajectory.logprobs, row.trajectory.mask, row.said)
