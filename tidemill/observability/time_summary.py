"""The time breakdown in a few words: a table column, and a line per process.

    column    train 62 (rollouts 30)  gen 80 (trainer 15)    the trainer's work and its longest wait, and the engines'
    lines     trainer: train 62%, awaits rollouts 30%, ...    a line for each process, the largest shares first

Several engines are averaged. Shares below 1 % are left out; metrics.jsonl and report.json have all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.observability.time_breakdown import CONTROLLER, REFERENCE, TRAINER, WAIT, WAITS
from tidemill.observability.timeline import REST

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
