"""Where the time of one step went, in one line: what each process did, then for whom it waited.

    trainer: train 62 sync 4 awaits rollouts 30 | engine: generate 80 awaits trainer 15 | controller: ... | reward: judging 6

All in percent of the step's time, from the metrics `time/PROCESS/KIND`; what is below 1 % is left out. The trainer comes
first, because a terminal cuts the line at its edge. Several engines are pooled: the mean of them. The controller waits for
what it drives; a reward's judging goes on beside all of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tidemill.observability.account import CONTROLLER, REFERENCE, TRAINER, WAIT, WAITS
from tidemill.observability.timeline import REST

LITTLE = 0.01
Shares = dict[str, float]


def where_time_went(metrics: Mapping[str, float]) -> str:
    """A dash where nothing is known."""
    found: dict[str, list[Shares]] = {}
    for process, shares in processes(metrics).items():
        found.setdefault(process.rstrip("0123456789").rstrip("-"), []).append(shares)
    order = sorted(found, key=lambda name: (name == CONTROLLER, name.startswith(REFERENCE), name != TRAINER))
    parts = [_said(f"{name}s" if len(found[name]) > 1 else name, _mean(found[name]), name == CONTROLLER) for name in order]
    if (judging := metrics.get("time/reward", 0.0)) >= LITTLE:
        parts.append(f"reward: judging {100 * judging:.0f}")
    return " | ".join(parts) or "–"


def processes(metrics: Mapping[str, float]) -> dict[str, Shares]:
    """Shares of the step by process and kind, from a step's metrics."""
    found: dict[str, Shares] = {}
    for key, value in metrics.items():
        if key.startswith("time/") and key.count("/") == 2:
            _, process, kind = key.split("/")
            found.setdefault(process, {})[kind] = value
    return found


def _said(name: str, shares: Shares, drives: bool) -> str:
    work = {kind: share for kind, share in shares.items() if not kind.startswith(WAIT) and kind != REST}
    waits = {kind.removeprefix(WAIT): share for kind, share in shares.items() if kind.startswith(WAIT)}
    if drives:  # its phases are named by what it waits for
        peers = {**WAITS, "train": TRAINER}
        for phase in peers.keys() & work.keys():
            waits[peers[phase]] = waits.get(peers[phase], 0.0) + work.pop(phase)
    done, awaited = _listed(work.items()), _listed(sorted(waits.items(), key=lambda each: -each[1]))
    words = [*done, *(["awaits", *awaited] if awaited else []), *_listed([(REST, shares.get(REST, 0.0))])]
    return f"{name}: {' '.join(words)}"


def _listed(shares: Iterable[tuple[str, float]]) -> list[str]:
    return [f"{kind} {100 * share:.0f}" for kind, share in shares if share >= LITTLE]


def _mean(of: list[Shares]) -> Shares:
    kinds = dict.fromkeys(kind for shares in of for kind in shares)
    return {kind: sum(shares.get(kind, 0.0) for shares in of) / len(of) for kind in kinds}
