"""Where each process's time went, and for whom it waited.

    trainer      train, sync,     waiting for: rollouts, engines (taking weights, checks), evaluation, ledger, controller,
                                  the reference where engines serve it
    engine-N     generate, sync,  waiting for: reward, environment, trainer
    reference-N  score,           waiting for: trainer
    controller   what its loop of steps does: the phases of `Timeline`

A trainer waits for what the loop of steps is at, which drives it. An engine that has nothing to compute waits for verifiers
while a group is judged, for environments while an episode goes on; while neither is, the buffer holds all that may be in
flight, and the engine waits for the trainer to take it. Shares of a process add up to 1; `other` is what has no name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidemill.observability.timeline import REST
from tidemill.observability.trace import Intervals, common, length, merged
from tidemill.types import Span

TRAINER, CONTROLLER, REFERENCE = "trainer", "controller", "reference"
TRAIN, GENERATE, SYNC = ("train", "apply", "forward", "snapshot"), ("generate",), ("publish", "stage", "commit")
WORK = ("generate", "train", "sync")
EPISODE, REWARD, EVALUATE = "episode", "reward", "evaluate"
WAITS = {"rollouts": "rollouts", "publication": "engines", "check": "engines", "ledger": "ledger"}  # phase -> for whom
WAIT = "wait for "


@dataclass(slots=True)
class Account:
    """Seconds by process and kind, over any number of windows."""

    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    starved: dict[str, float] = field(default_factory=dict)  # what engines do while the trainer waits for rollouts, each
    starved_s: float = 0.0  # how long it waits
    in_flight: float = 0.0  # groups times seconds, of that time

    def shares(self) -> dict[str, dict[str, float]]:
        totals = {name: max(sum(kinds.values()), 1e-12) for name, kinds in self.seconds.items()}
        return {name: {k: v / totals[name] for k, v in kinds.items()} for name, kinds in self.seconds.items()}

    def overall(self) -> dict[str, float]:
        """Of trainer and engines together: what they train, generate and sync, and what is left, to wait."""
        pools = [kinds for name, kinds in self.shares().items() if name != CONTROLLER and not name.startswith(REFERENCE)]
        spent = {kind: sum(kinds.get(kind, 0.0) for kinds in pools) / len(pools) for kind in WORK} if pools else {}
        return spent | {"wait": 1 - sum(spent.values())} if spent else {}

    def add(self, other: Account) -> None:
        for name, kinds in other.seconds.items():
            _add(self.seconds.setdefault(name, {}), kinds)
        _add(self.starved, other.starved)
        self.starved_s += other.starved_s
        self.in_flight += other.in_flight


def account(
    begin: float, end: float, loop: Sequence[Span], beside: Sequence[Span], pools: Mapping[str, Sequence[Span]]
) -> Account:
    """Of [begin, end]. loop: the controller's `Timeline`. beside: episodes, judging and evaluations, one span a group each.
    pools: the spans of trainer and engines by process."""
    window: Intervals = [(begin, end)]
    names = list(dict.fromkeys(span.name for span in loop))
    phases = {name: common(merged(loop, [name]), window) for name in names}
    going = {name: common(merged(beside, [name]), window) for name in (REWARD, EPISODE, EVALUATE)}
    found, engines = Account(), []
    scoring = merged([span for name, spans in pools.items() if name.startswith(REFERENCE) for span in spans], GENERATE)
    found.seconds[CONTROLLER] = _by_turns(window, phases)
    for name, spans in pools.items():
        if name.startswith(REFERENCE):
            found.seconds[name] = _by_turns(window, {"score": merged(spans, GENERATE), WAIT + TRAINER: window})
            continue
        work = {"train": merged(spans, TRAIN)} if name == TRAINER else {"generate": merged(spans, GENERATE)}
        work["sync"] = merged(spans, SYNC)
        if name == TRAINER:
            whom: dict[str, Intervals] = {WAIT + "evaluation": common(going[EVALUATE], phases.get("publication", []))}
            whom |= {WAIT + REFERENCE: common(scoring, window)} if scoring else {}
            for phase, times in phases.items():
                key = WAIT + WAITS.get(phase, CONTROLLER) if phase != REST else REST
                whom[key] = _union(whom.get(key, []), times)
        else:
            whom = {WAIT + "reward": going[REWARD], WAIT + "environment": going[EPISODE], WAIT + TRAINER: window}
            engines.append(work | whom)
        found.seconds[name] = _by_turns(window, work | whom)
    starving = phases.get("rollouts", [])
    found.starved_s = length(starving)
    for kinds in engines:
        _add(found.starved, _by_turns(starving, kinds))
    found.in_flight = sum(length(common(starving, [(s.start, s.end)])) for s in beside if s.name in (EPISODE, REWARD))
    return found


def _by_turns(window: Intervals, kinds: Mapping[str, Intervals]) -> dict[str, float]:
    """Seconds of the window by kind; an instant of several belongs to the first of them, one of none to `REST`."""
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
