"""Times of episodes: when each began and ended, and when it was with an engine.

A turn is one call of an engine: asked, begun by the engine (its queue is behind it), answered. Between its turns an episode
is outside: in tools, in the environment, with an agent. Times are as the controller sees them, so the way to the
environment's worker and back is outside, and the way to the engine and back is in the turn.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf

from tidemill.core.interfaces import Sampler
from tidemill.core.types import Array, Completion, GenerateRequest, Scored


@dataclass(frozen=True, slots=True)
class EngineTurn:
    """One call of an engine, in seconds of the monotonic clock."""

    engine: str
    asked: float
    begun: float  # asked, and the time in the engine's queue
    answered: float


@dataclass(slots=True)
class EpisodeTime:
    """The times of one episode, in seconds of the monotonic clock."""

    begin: float
    end: float = inf  # inf: it goes on
    turns: list[EngineTurn] = field(default_factory=list)


class EpisodeTimes:
    """Recorder of the latest episodes, in the order in which they began."""

    def __init__(self, most_turns: int = 10_000, clock: Callable[[], float] = time.monotonic) -> None:
        """most_turns: kept after `trim`."""
        self._most, self._clock = most_turns, clock
        self.episodes = deque[EpisodeTime]()

    @contextmanager
    def episode(self, engine: Sampler) -> Iterator[Sampler]:
        """Record an episode for as long as the body runs. Yields the sampler that it has to ask."""
        found = EpisodeTime(self._clock())
        self.episodes.append(found)
        try:
            yield _TimedSampler(engine, found, self._clock)
        finally:
            found.end = self._clock()

    def trim(self) -> float | None:
        """Forget the oldest episodes if there are too many turns. Returns the time from which on all are kept, then."""
        if sum(len(episode.turns) for episode in self.episodes) <= self._most:
            return None
        left, since = self._most // 2, -inf
        for episode in reversed(self.episodes):  # the newest ones are kept
            left -= len(episode.turns)
            if left < 0:
                since = episode.begin
                break
        self.episodes = deque(episode for episode in self.episodes if episode.end > since)
        return since


class _TimedSampler:
    """A sampler that notes the turns of one episode."""

    def __init__(self, engine: Sampler, times: EpisodeTime, clock: Callable[[], float]) -> None:
        self._engine, self._times, self._clock = engine, times, clock

    async def generate(self, request: GenerateRequest) -> Completion:
        asked = self._clock()
        reply = await self._engine.generate(request)
        answered = self._clock()
        begun = min(asked + reply.queued_s, answered)
        self._times.turns.append(EngineTurn(reply.engine, asked, begun, answered))
        return reply

    async def score(self, tokens: Array, policy: str, temperature: float, top_k: int) -> Scored:
        return await self._engine.score(tokens, policy, temperature, top_k)

    async def abort(self, key: str) -> None:
        await self._engine.abort(key)
