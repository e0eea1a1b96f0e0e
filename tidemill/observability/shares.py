"""Where the time went: each instant of each process belongs to one kind of work, or to waiting.

With the spans below, shares of a process add up to 1. Where kinds overlap (a controller scores one group while it
publishes), the instant counts for the kind that comes first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tidemill.observability.trace import common, length, merged
from tidemill.types import Span

KINDS = ("generate", "train", "sync", "reward")


def shares(
    processes: Mapping[str, Sequence[Span]],
    start: float,
    end: float,
    kinds: Mapping[str, Collection[str]] | None = None,
) -> dict[str, dict[str, float]]:
    """Of [start, end], the share each process spent on each kind; "wait" is the rest; "overall" is the mean of processes.

    kinds: kind -> the span names that belong to it, first come first; by default a span's name is its kind, or begins with
    it and a slash ("train/apply").
    """
    if end <= start:
        raise ValueError(f"start={start}, end={end}: expected a window of more than 0 s")
    order = list(KINDS if kinds is None else kinds)
    result = {name: _of_one(spans, start, end, order, kinds) for name, spans in processes.items()}
    if result:
        keys = [*order, "wait"]
        result["overall"] = {k: sum(r[k] for r in result.values()) / len(processes) for k in keys}
    return result


def _of_one(
    spans: Sequence[Span], start: float, end: float, order: list[str], kinds: Mapping[str, Collection[str]] | None
) -> dict[str, float]:
    taken: list[Span] = []
    result, covered = {}, 0.0
    for kind in order:
        taken += [s for s in spans if (s.name in kinds[kind] if kinds else s.name.split("/")[0] == kind)]
        union = length(common(merged(taken), [(start, end)]))
        result[kind] = (union - covered) / (end - start)
        covered = union
    result["wait"] = 1 - covered / (end - start)
    return result
