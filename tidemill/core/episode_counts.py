"""Counts of one episode: calls of its tools, gateway, sandboxes and agent, and how often each of them failed.

    with counting(counts.update):         around an episode, in the process that plays it
        counted("tools/calls", "tools/late")    in whatever works for it, in any task or thread below

A name is also that of a metric of a step and of an entry of `Trajectory.info`. Outside of an episode nothing is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from tidemill.core.amounts import amount

COUNTED = {
    "tools": ("calls", "malformed", "errors", "late", "unavailable"),  # the four are outcomes of the calls
    "mcp": ("lost",),  # connections to servers that ended, failed or were given up
    "sandbox": ("runs", "limits", "failed"),  # programs; those that were ended at a limit; faults of the sandbox itself
    "gateway": ("calls", "retries", "abandoned", "refused", "faults"),  # see `gateway.Gateway.counts`
    "agent": ("runs", "late", "failed", "unscored"),  # episodes of a program: late; it ended badly; it told no score
    "workers": ("lost",),  # that an attempt was lost with, and was begun anew or given up
}
NAMES = frozenset(f"{part}/{kind}" for part, kinds in COUNTED.items() for kind in kinds)

Recorder = Callable[[Sequence[str]], None]
"""Adds 1 to the count of each of these names."""

Listener = Callable[[str], None]
"""Takes the reason of a call that was refused: the status and the sentence that the agent was told."""

_listener: ContextVar[Listener | None] = ContextVar("_listener", default=None)
_recorder: ContextVar[Recorder | None] = ContextVar("_recorder", default=None)


@contextmanager
def counting(recorder: Recorder, refused: Listener | None = None) -> Iterator[None]:
    """Have what is counted within the block, and in tasks that it starts, come to `recorder`, and refusals to `refused`."""
    token, other = _recorder.set(recorder), _listener.set(refused)
    try:
        yield
    finally:
        _recorder.reset(token)
        _listener.reset(other)


def recorder_here() -> Recorder:
    """The recorder of the present episode, for code that will run in the tasks of others; else one that drops all."""
    return _recorder.get() or _dropped  # bounded: a context variable


def listener_here() -> Listener:
    """The listener of the present episode, as of `recorder_here`."""
    return _listener.get() or _unheard  # bounded: a context variable


def counted(*names: str) -> None:
    """Add 1 to each of these counts of the present episode."""
    assert NAMES.issuperset(names), names
    recorder_here()(names)


def counts_in(info: Mapping[str, float]) -> dict[str, int]:
    """The counts among other figures of an attempt, or of a run."""
    return {name: int(info[name]) for name in _ORDER if info.get(name)}


def worded_counts(counts: Mapping[str, int], refused: str = "") -> list[tuple[str, str]]:
    """Counts in words, one text for each part that has any: ("tools", "12 calls, 1 late").

    refused: why calls of the gateway were refused, the commonest reason.
    """
    found = [
        (part, ", ".join(_worded(counts[name], kind) for kind in kinds if counts.get(name := f"{part}/{kind}")))
        for part, kinds in COUNTED.items()
    ]
    why = f", the commonest reason: {refused}" if refused else ""
    return [(part, said + (why if part == "gateway" else "")) for part, said in found if said]


def _worded(count: int, kind: str) -> str:
    return amount(count, _NOUNS[kind]) if kind in _NOUNS else f"{count:,} {kind}"


def _unheard(why: str) -> None:
    return None


def _dropped(names: Sequence[str]) -> None:
    return None


_NOUNS = {"calls": "call", "errors": "error", "runs": "run", "limits": "limit", "retries": "retry", "faults": "fault"}
_ORDER = [f"{part}/{kind}" for part, kinds in COUNTED.items() for kind in kinds]
