"""Circuit breaker: pauses admission while a verifier keeps failing, then resumes.

    closed     more than `limit` of a verifier's latest outcomes are infrastructure errors -> open
    open       nothing is admitted for a back-off, then -> half-open
    half-open  PROBES groups of that verifier are let in; when they can be judged -> closed, else -> open, with twice the
               back-off; one of another verifier says nothing, and gives its place to the next group

Groups in flight keep their slots, finished ones are trained on: only admission waits. Two things end a run: a verifier that
fails for `pause_s` on end, and one that has never judged anything when `patience` groups have come back, for that is a
mistake and no disturbance. `Breaker` is pure, its time comes from the caller; `Gate` puts it into an event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tidemill.core.types import InfraError, Outcome, Score

WINDOW, LEAST = 200, 20  # the latest outcomes of a verifier that count, and the fewest that allow a verdict
PROBES = 2  # groups
FIRST_S, LONGEST_S = 1.0, 60.0  # back-off
PATIENCE = 3  # groups, or attempts of an evaluation, of a verifier that has never judged anything
TOLD_S = 8.0  # the shortest back-off that the user is told of


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the breaker's state, for the user, the ledger and the metrics."""

    kind: Literal["paused", "tried", "resumed"]  # tried: in vain, and not for the first time
    verifier: str
    text: str
    share: float = 0.0  # share of infrastructure errors among its outcomes when it paused
    reason: str = ""
    seconds: float = 0.0  # length of the pause, when it resumed


class Breaker:
    """The breaker's state and rules, without an event loop.

    `now` is in seconds, of any clock that only goes forward.
    """

    def __init__(self, limit: float = 0.05, pause_s: float = 600.0, patience: int = PATIENCE) -> None:
        self.limit, self.pause_s, self.patience = limit, pause_s, patience
        self._outcomes: dict[str, deque[InfraError | None]] = {}  # by verifier, the latest WINDOW; None: not an error
        self._verifier, self._reason = "", ""  # the failing verifier, and its latest error
        self._since: float | None = None  # when it opened; None while closed
        self._until, self._backoff = 0.0, FIRST_S
        self._probes: dict[int, bool] = {}  # admitted since the latest back-off: group -> judged
        self._scored = set[str]()  # verifiers that have judged an attempt
        self._barren = Counter[str]()  # groups that the other verifiers could not score

    @property
    def closed(self) -> bool:
        return self._since is None

    def wait_s(self, now: float) -> float:
        """Seconds until a group may be admitted; 0: now; infinity: when the probes have been judged."""
        if self._since is None:
            return 0.0
        if now < self._until:
            return self._until - now
        return 0.0 if len(self._probes) < PROBES else math.inf

    def admitted(self, group: int, now: float) -> None:
        """Count an admitted group as a probe, if the breaker is half-open."""
        if self._since is not None and now >= self._until:
            self._probes[group] = False

    def judged(self, group: int, verifier: str, outcomes: Sequence[Outcome | None], now: float) -> Change | str | None:
        """Take note of a group's outcomes.

        Returns a Change when admission pauses, is still paused, or resumes; a sentence when the run has to end; else None.
        """
        if any(isinstance(outcome, Score) for outcome in outcomes):
            self._scored.add(verifier)
        if verifier not in self._scored:
            why = self._never_scored(verifier, outcomes)
            if why is not None or self._since is None:
                return why
        errors = [outcome if isinstance(outcome, InfraError) else None for outcome in outcomes]
        if self._since is None:
            return self._watch(verifier, errors, now)
        if group not in self._probes:  # in flight since before
            return None
        if verifier != self._verifier:
            del self._probes[group]
            return None
        self._probes[group] = True
        if _share(errors) > self.limit:
            return self._open_again(errors, now)
        return self._close(now) if sum(self._probes.values()) == PROBES else None

    def _never_scored(self, verifier: str, outcomes: Sequence[Outcome | None]) -> str | None:
        self._barren[verifier] += 1
        if self._barren[verifier] < self.patience:
            return None
        reason = next((o.reason for o in outcomes if o is not None and not isinstance(o, Score)), "no outcome")
        return f"{self._barren[verifier]} groups in a row could not be scored by {verifier}; the latest reason: {reason}"

    def _watch(self, verifier: str, errors: Sequence[InfraError | None], now: float) -> Change | None:
        latest = self._outcomes.setdefault(verifier, deque(maxlen=WINDOW))
        latest.extend(errors)
        share = _share(latest)
        if len(latest) == WINDOW:
            self._backoff = FIRST_S  # the verifier has worked for a whole window
        if len(latest) < LEAST or share <= self.limit:
            return None
        self._verifier, self._reason = verifier, next(e.reason for e in reversed(latest) if e is not None)
        self._since = now
        self._wait(now)
        return Change(
            "paused",
            verifier,
            f"admission pauses: {share:.0%} of the latest {len(latest)} outcomes of {verifier} are infrastructure errors, "
            f"more than {self.limit:.0%}; the latest: {self._reason}. It goes on by itself once {verifier} judges again; "
            f"the run ends when that takes longer than {self.pause_s:g} s (scoring.pause_s)",
            share,
            self._reason,
        )

    def _open_again(self, errors: Sequence[InfraError | None], now: float) -> Change | str | None:
        assert self._since is not None
        latest = next(error.reason for error in errors if error is not None)
        if now - self._since >= self.pause_s:
            then = "" if latest == self._reason else f"; now: {latest}"
            return f"{self._verifier} has failed for {now - self._since:.0f} s, since: {self._reason}{then}"
        self._backoff = min(2 * self._backoff, LONGEST_S)
        self._wait(now)
        if self._backoff < TOLD_S:
            return None
        text = f"still paused, after {now - self._since:.0f} s: {self._verifier} says {latest}; "
        text += f"next try in {self._until - now:.0f} s, the run ends after {self.pause_s:g} s of this"
        return Change("tried", self._verifier, text, reason=latest)

    def _close(self, now: float) -> Change:
        assert self._since is not None
        seconds, self._since = now - self._since, None
        self._outcomes.clear()  # only outcomes from here on count
        text = f"admission goes on: {self._verifier} judges again, after {seconds:.1f} s"
        return Change("resumed", self._verifier, text, seconds=seconds)

    def _wait(self, now: float) -> None:
        """Set the end of the back-off, no later than the end of the pause: the run gets one last try."""
        assert self._since is not None
        self._until = min(now + self._backoff, max(now, self._since + self.pause_s))
        self._probes.clear()


class Gate:
    """A breaker in an event loop: admission waits at it, and judged groups report to it."""

    def __init__(self, breaker: Breaker | None = None, name: str = "", tell: Callable[[Change], None] | None = None) -> None:
        """Wrap `breaker`, or a new one with default limits.

        name: the verifier of tasks that name no environment. tell: called with every pause and its end.
        """
        self.breaker = breaker or Breaker()
        self.door = asyncio.Lock()
        self._name, self._tell = name or "the verifier", tell
        self._changed = asyncio.Event()

    async def opens(self) -> None:
        """Wait until a group may be admitted.

        Call it while holding `door`, so that no other task waits for a slot ahead of the caller.
        """
        while wait := self.breaker.wait_s(_now()):
            self._changed.clear()
            if wait == math.inf:
                await self._changed.wait()  # bounded: the probes' episodes and judging have limits
            else:
                await asyncio.sleep(wait)  # bounded: a back-off, which nothing can shorten, for there is no probe

    def admitted(self, group: int) -> None:
        self.breaker.admitted(group, _now())

    def judged(self, group: int, verifier: str, outcomes: Sequence[Outcome | None]) -> str | None:
        """Take note of a group's outcomes. Returns the reason why the run has to end, or None."""
        change = self.breaker.judged(group, verifier or self._name, outcomes, _now())
        self._changed.set()
        if isinstance(change, Change):
            if self._tell:
                self._tell(change)
            return None
        return change


def _now() -> float:
    return asyncio.get_running_loop().time()


def _share(errors: Sequence[InfraError | None] | deque[InfraError | None]) -> float:
    return (len(errors) - errors.count(None)) / max(len(errors), 1)
