"""Time breakdown: each process's working time, and its waits by cause.

    trainer      train, sync,            waiting for: rollouts, engines (taking weights, checks), evaluation, ledger,
                                         controller, the reference where engines serve it
    engine-N     generate, sync, yield,  waiting for: reward, environment, evaluation, trainer
                 asleep (in the trainer's turn on one device)
    reference-N  score, yield,           waiting for: trainer
    controller   the phases of its `Timeline`

Only time marked `IDLE` counts as waiting; time without any mark is `other`. An idle trainer waits for the present phase
of the controller's loop. An idle engine waits for verifiers while a group is judged, and for environments while an
episode goes on. If neither is the case, the buffer is full, and the engine waits for the trainer. An engine yields while
it has work but something else uses its process, mostly the thread that receives calls. Shares are of the time that the
breakdown covers.

The last functions put it into few words. Several engines are averaged, and shares below 1 % are left out there;
metrics.jsonl and report.json have all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidemill.core.types import Span
from tidemill.observability.timeline import HANDOVER, IDLE, REST
from tidemill.observability.trace import Intervals, common, length, merged

TRAINER, CONTROLLER, REFERENCE = "trainer", "controller", "reference"
TRAIN, GENERATE, SYNC = (
    ("train", "apply", "forward", "snapshot"),
    ("generate",),
    ("publish", "stage", "commit", "prove", "sleep", "wake"),
)
CHECK, YIELD, ASLEEP = ("check",), ("yield",), ("asleep",)
WORK = ("generate", "train", "sync")
EPISODE, REWARD, EVALUATE = "episode", "reward", "evaluate"
WAITS = {"rollouts": "rollouts", "publication": "engines", "check": "engines"}  # phase of the controller's loop -> its peer
WAIT = "wait for "


@dataclass(slots=True)
class Account:
    """Seconds by process and kind, over any number of windows."""

    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    wall: dict[str, float] = field(default_factory=dict)  # seconds of those windows in which the process reported
    judged: float = 0.0  # seconds in which at least one group was being judged
    both: float = 0.0  # seconds in which the trainer trains while an engine generates
    starved: dict[str, float] = field(default_factory=dict)  # engines' seconds by kind, while the trainer waits for rollouts
    starved_s: float = 0.0  # how long it waits
    in_flight: float = 0.0  # groups times seconds, within that time

    def shares(self) -> dict[str, dict[str, float]]:
        return {name: {k: v / max(self.wall[name], 1e-12) for k, v in kinds.items()} for name, kinds in self.seconds.items()}

    def overall(self) -> dict[str, float]:
        """Mean shares of trainer and engines: train, generate, sync, all waits. The rest has no name."""
        pools = [kinds for name, kinds in self.shares().items() if name != CONTROLLER and not name.startswith(REFERENCE)]
        if not pools:
            return {}
        spent = {kind: sum(kinds.get(kind, 0.0) for kinds in pools) / len(pools) for kind in WORK}
        return spent | {"wait": sum(s for kinds in pools for kind, s in kinds.items() if kind.startswith(WAIT)) / len(pools)}

    def add(self, other: Account) -> None:
        for name, kinds in other.seconds.items():
            _add(self.seconds.setdefault(name, {}), kinds)
        _add(self.wall, other.wall)
        self.judged += other.judged
        self.both += other.both
        _add(self.starved, other.starved)
        self.starved_s += other.starved_s
        self.in_flight += other.in_flight


def account(
    begin: float, end: float, loop: Sequence[Span], beside: Sequence[Span], pools: Mapping[str, Sequence[Span]]
) -> Account:
    """The breakdown of [begin, end], from the spans of all processes.

    loop: the controller's `Timeline`. beside: episodes, judging and evaluations, one span per group. pools: the spans of
    trainer and engines by process.
    """
    window: Intervals = [(begin, end)]
    names = list(dict.fromkeys(span.name for span in loop))
    phases = {name: common(merged(loop, [name]), window) for name in names}
    going = {name: common(merged(beside, [name]), window) for name in (REWARD, EPISODE, EVALUATE)}
    found, engines = Account(judged=length(going[REWARD])), []
    scoring = merged([span for name, spans in pools.items() if name.startswith(REFERENCE) for span in spans], GENERATE)
    found.seconds[CONTROLLER] = _by_turns(window, phases)
    for name, spans in pools.items():
        idle = merged(spans, [IDLE])
        if name == TRAINER:
            work = {"train": merged(spans, TRAIN), "sync": merged(spans, SYNC), HANDOVER: merged(spans, [HANDOVER])}
            whom = _drives(phases, going, scoring)
        elif name.startswith(REFERENCE):
            work, whom = {"score": merged(spans, GENERATE)} | _between(spans), {TRAINER: window}
        else:
            work = {"generate": merged(spans, GENERATE), "sync": merged(spans, SYNC)} | _between(spans)
            whom = {"reward": going[REWARD], "environment": going[EPISODE], "evaluation": going[EVALUATE], TRAINER: window}
        kinds = work | {WAIT + peer: common(idle, times) for peer, times in whom.items()}
        found.seconds[name] = _by_turns(window, kinds)
        if name != TRAINER and not name.startswith(REFERENCE):
            engines.append(kinds)
    generating = [span for name, spans in pools.items() if not name.startswith((TRAINER, REFERENCE)) for span in spans]
    training = common(merged(pools.get(TRAINER, ()), TRAIN), window)
    found.both = length(common(training, merged(generating, GENERATE)))
    found.wall = dict.fromkeys(found.seconds, end - begin)
    starving = phases.get("rollouts", [])
    found.starved_s = length(starving)
    for kinds in engines:
        _add(found.starved, _by_turns(starving, kinds))
    found.in_flight = sum(length(common(starving, [(s.start, s.end)])) for s in beside if s.name in (EPISODE, REWARD))
    return found


def computed_by(pools: Mapping[str, Sequence[Span]], begin: float, end: float) -> dict[str, Intervals]:
    """When each engine computed within [begin, end], by its name."""
    engines = {name: spans for name, spans in pools.items() if not name.startswith((TRAINER, REFERENCE))}
    return {name: common(merged(spans, GENERATE), [(begin, end)]) for name, spans in engines.items()}


def _between(spans: Sequence[Span]) -> dict[str, Intervals]:
    """Intervals between an engine's steps in which it does not wait for work."""
    return {"check": merged(spans, CHECK), "yield": merged(spans, YIELD), "asleep": merged(spans, ASLEEP)}


def _drives(phases: Mapping[str, Intervals], going: Mapping[str, Intervals], scoring: Intervals) -> dict[str, Intervals]:
    """Intervals in which an idle trainer waits, by the peer it waits for."""
    whom = {"evaluation": common(going[EVALUATE], phases.get("publication", [])), REFERENCE: scoring}
    for phase, times in phases.items():
        peer = "ledger" if phase == "ledger" else WAITS.get(phase, CONTROLLER)
        whom[peer] = _union(whom.get(peer, []), times)
    return whom


def _by_turns(window: Intervals, kinds: Mapping[str, Intervals]) -> dict[str, float]:
    """Seconds of the window by kind: the first kind that an instant belongs to, or `REST`."""
    result: dict[str, float] = {}
    taken: Intervals = []
    covered = 0.0
    for kind, times in kinds.items():
        taken = _union(taken, common(times, window))
        result[kind] = length(taken) - covered
        covered = length(taken)
    result[REST] = result.get(REST, 0.0) + length(window) - covered
    return result


def _union(a: Intervals, b: Intervals) -> Intervals:
    return merged([Span("", *times) for times in (*a, *b)])


def _add(into: dict[str, float], more: Mapping[str, float]) -> None:
    for key, value in more.items():
        into[key] = into.get(key, 0.0) + value


LITTLE = 0.01
MOST = 4  # shares of a process that a line shows
SHORT = {"environment": "env"}  # in the column, which has 44 characters
TITLE = "busy (longest wait), %"
Shares = dict[str, float]


def column(metrics: Mapping[str, float]) -> str:
    """The cell for one step, from its metrics `time/PROCESS/KIND`; a dash if there are none."""
    found = pooled(processes(metrics))
    parts = []
    for name, does, short in ((TRAINER, "train", "train"), ("engine", "generate", "gen")):
        if (shares := found.get(name)) is None:
            continue
        whom, most = max(_waits(shares).items(), key=lambda each: each[1], default=("", 0.0))
        wait = f" ({SHORT.get(whom, whom)} {100 * most:.0f})" if most >= LITTLE else ""
        parts.append(f"{short} {100 * shares.get(does, 0.0):.0f}{wait}")
    return "  ".join(parts) or "–"


def lines(found: Mapping[str, Shares], most: int = MOST, controller: bool = False) -> list[tuple[str, str]]:
    """(process, its largest shares as text). controller: include the one that drives the others."""
    said = []
    for name, shares in pooled(found).items():
        if name != CONTROLLER or controller:
            kinds = _driven(shares) if name == CONTROLLER else shares
            largest = sorted(kinds.items(), key=lambda each: -each[1])[:most]
            said.append((name, ", ".join(f"{_worded(kind)} {share:.0%}" for kind, share in largest if share >= LITTLE)))
    return [(name, text) for name, text in said if text]


def pooled(found: Mapping[str, Shares]) -> dict[str, Shares]:
    """Mean shares by group of processes: trainer, engines, reference engines, then controller."""
    alike: dict[str, list[Shares]] = {}
    for process, shares in found.items():
        alike.setdefault(process.rstrip("0123456789").rstrip("-"), []).append(shares)
    order = sorted(alike, key=lambda name: (name == CONTROLLER, name.startswith(REFERENCE), name != TRAINER))
    return {name: _mean(alike[name]) for name in order}


def processes(metrics: Mapping[str, float]) -> dict[str, Shares]:
    """Shares of a step by process and kind, from the step's metrics."""
    found: dict[str, Shares] = {}
    for key, value in metrics.items():
        if key.startswith("time/") and key.count("/") == 2:
            _, process, kind = key.split("/")
            found.setdefault(process, {})[kind] = value
    return found


def _waits(shares: Shares) -> Shares:
    return {kind.removeprefix(WAIT): share for kind, share in shares.items() if kind.startswith(WAIT)}


def _driven(shares: Shares) -> Shares:
    """The controller's shares, with its phases renamed to the peers that it waits for."""
    peers, found = {**WAITS, "train": TRAINER}, dict[str, float]()
    for kind, share in shares.items():
        name = f"{WAIT}{peers[kind]}" if kind in peers else kind
        found[name] = found.get(name, 0.0) + share
    return found


def _worded(kind: str) -> str:
    return f"awaits {kind.removeprefix(WAIT)}" if kind.startswith(WAIT) else "unnamed" if kind == REST else kind


def _mean(of: list[Shares]) -> Shares:
    kinds = dict.fromkeys(kind for shares in of for kind in shares)
    return {kind: sum(shares.get(kind, 0.0) for shares in of) / len(of) for kind in kinds}
