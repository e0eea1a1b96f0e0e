"""Engines' share of the time, beside what list scheduling of the same episodes allows: cases by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tidemill.core.types import Completion, Finish, GenerateRequest, SamplingParams
from tidemill.observability.bottleneck_advisor import Setup, advise_engines
from tidemill.observability.engine_share import EngineShare, EngineUse, allowed_share
from tidemill.observability.episode_times import EngineTurn, EpisodeTime, EpisodeTimes
from tidemill.observability.time_breakdown import Account


def turn(asked: float, answered: float, begun: float | None = None, engine: str = "e") -> EngineTurn:
    return EngineTurn(engine, asked, asked if begun is None else begun, answered)


def episode(begin: float, end: float, *turns: EngineTurn) -> EpisodeTime:
    return EpisodeTime(begin, end, list(turns))


def use(*episodes: EpisodeTime, now: float = 1000.0, cut=(), **computed) -> EngineUse:
    found = EngineUse()
    found.times.episodes.extend(episodes)
    found.report(now, computed, list(cut))
    return found


def share(*episodes: EpisodeTime, places: int = 1, **more) -> EngineShare:
    found = use(*episodes, **more).share(places)
    assert found is not None
    return found


def test_what_is_allowed():
    assert allowed_share([[0, 1, 0, 1, 0]] * 9, places=3, engines=1) == 1, "instant tools"
    assert allowed_share([[0, 1, 3, 1, 0]] * 9, places=1, engines=1) == 2 / 5, "one in flight"
    assert allowed_share([[0, 1, 3, 1, 0]] * 400, places=100, engines=1) > 0.98, "many in flight"
    assert allowed_share([[0, 1, 3, 1, 0]] * 9, places=1, engines=2) == 1 / 5, "an episode has one engine at a time"
    tail = [[0, 1, 0]] * 10 + [[0, 1, 90]]
    assert allowed_share(tail, places=2, engines=1) == 1, "the tail is left out: the last one begins while one computes"
    assert allowed_share(tail, places=2, engines=1, filled=False) == 11 / 101
    assert allowed_share(tail, places=11, engines=1) == 11 / 101, "where all begin at once there is only the tail"


ONE = [episode(t, t + 4, turn(t, t + 1), turn(t + 3, t + 4)) for t in (0.0, 4.0, 8.0)]


def test_one_episode_after_another_is_all_that_is_allowed():
    found = share(*ONE, e=[(0, 1), (3, 5), (7, 9), (11, 12)])
    assert (found.seconds, found.busy, found.allowed, found.of_allowed) == (8, 0.5, 0.5, 1), "until the last one began"
    assert (found.in_flight, found.outside, found.queued, found.outside_median_s) == (1, 0.5, 0, 2)


def test_a_place_that_stays_empty_is_lost():
    """After the first episode the place waits for 4 s, as if for the trainer."""
    late = [ONE[0], episode(8, 12, *ONE[2].turns)]
    found = share(*late, e=[(0, 1), (3, 4), (8, 9), (11, 12)])
    assert (found.busy, found.allowed, found.in_flight) == (2 / 8, 2 / 4, 4 / 8)


def test_places_are_those_of_the_settings_and_not_those_that_were_taken():
    found = share(*ONE[:2], places=2, e=[(0, 1), (3, 5), (7, 8)])
    assert (found.busy, found.in_flight, found.allowed_in_flight) == (0.5, 1, 0.5)
    assert found.allowed == pytest.approx(4 / 6), "both at once: with the engine until 2 and from 4 to 6"


def test_evaluations_are_cut_out():
    late = [ONE[0], episode(8, 12, *ONE[2].turns)]
    found = share(*late, cut=[(4, 8)], e=[(0, 1), (3, 9), (11, 12)])
    assert (found.seconds, found.busy, found.allowed) == (4, 0.5, 0.5)


def test_what_comes_after_the_last_episode_is_no_time_of_the_engines():
    assert share(ONE[0], e=[(0, 1), (3, 4), (50, 60)]).busy == 0.5


def test_turns_share_their_engine():
    """Two turns side by side, each half as fast: two seconds of work in all, one of each."""
    both = [episode(0, 6, turn(0, 2), turn(4, 6)) for _ in range(2)]
    found = share(*both, places=2, e=[(0, 2), (4, 6)])
    assert (found.busy, found.allowed) == (4 / 6, 4 / 6)
    found = share(*both, places=2, e=[(0, 1), (4, 5)])  # it computed for half of the time that they were with it
    assert found.busy == 2 / 6 and found.allowed == pytest.approx(2 / 4)
    uneven = share(episode(0, 3, turn(0, 3)), episode(0, 5, turn(0, 1)), places=2, e=[(0, 3)])
    assert uneven.allowed == pytest.approx(3 / 5), "2.5 s of work and half a second, which ends at 1 and is outside until 5"
    twice = [episode(0, 4, turn(0, 2, engine="e")), episode(0, 4, turn(0, 2, engine="f"))]
    assert share(*twice, places=2, e=[(0, 2)], f=[(0, 2)]).allowed == 0.5, "each had an engine of its own"


def test_time_in_the_queue_is_neither_work_nor_outside():
    """The second turn waits for the first: each has all of the engine, and the schedule shares it."""
    found = share(episode(0, 4, turn(0, 2)), episode(0, 4, turn(0, 4, begun=2)), places=2, e=[(0, 4)])
    assert found.queued == 0.25 and found.outside == 0.25 and found.busy == 1
    assert found.allowed == pytest.approx(4 / 6), "both have had 2 s of it at 4, and the first has 2 s outside yet to come"


def test_turns_of_one_episode_at_one_time_are_one_phase():
    found = share(episode(0, 4, turn(0, 2), turn(1, 2)), e=[(0, 2)])
    assert (found.busy, found.allowed, found.outside) == (0.5, 0.5, 0.5)


def test_nothing_is_said_of_episodes_that_are_hardly_outside_or_too_few():
    assert use(episode(0, 10, turn(0, 9.5)), e=[(0, 9.5)]).share(1) is None
    assert use(*ONE).share(1) is None, "no engine told anything"
    assert use(e=[(0, 1)]).share(1) is None
    going = [*ONE, episode(12, float("inf"), turn(12, 13))]
    assert use(*going, now=14.0, e=[(0, 1)]).share(3) is None, "4 episodes that go on say little of 3 places"
    assert use(*going, now=14.0, e=[(0, 1)]).share(2) is not None


def test_while_it_goes_on_what_comes_after_the_report_is_unknown():
    going = [*ONE, episode(12, float("inf"), turn(12, 13)), episode(30, 40)]
    found = share(*going, now=14.0, e=[(0, 1), (3, 5), (7, 9), (11, 13)])
    assert (found.seconds, found.busy, found.allowed, found.episodes) == (12, 0.5, 0.5, 4)


def test_reports_add_up_and_an_answer_may_be_older():
    found = EngineUse()
    found.times.episodes.extend(ONE)
    found.report(6.0, {"e": [(0, 1), (3, 5)]}, [])
    early = found.share(1)
    found.report(12.0, {"e": [(7, 9), (11, 12)]}, [])
    assert found.share(1, older_s=10) is early
    late = found.share(1)
    assert late is not None and late.seconds == 8 and late.busy == 0.5


def test_old_episodes_are_forgotten_with_their_time():
    found = EngineUse(EpisodeTimes(most_turns=8))
    for number in range(50):
        t = 4.0 * number
        found.times.episodes.append(episode(t, t + 4, turn(t, t + 1), turn(t + 3, t + 4)))
        found.report(t + 4, {"e": [(t, t + 1), (t + 3, t + 4)]}, [])
    told = found.share(1)
    assert told is not None and told.busy == told.allowed == 0.5 and 2 <= told.episodes <= 4
    assert len(found.times.episodes) <= 4 and sum(map(len, found._computed.values())) <= 10


class Slow:
    """An engine whose replies take 3 s on its clock, one of them in the queue."""

    now = 0.0

    async def generate(self, request: GenerateRequest) -> Completion:
        self.now += 3
        none = np.zeros(0, np.int32)
        return Completion(none, none.astype(np.float32), none, (), Finish.STOP, queued_s=1.0, engine="e")

    async def score(self, *_: object):
        raise AssertionError

    async def abort(self, key: str) -> None:
        self.now += 1


async def test_an_episode_notes_when_it_asked_and_when_it_ended():
    engine = Slow()
    times = EpisodeTimes(clock=lambda: engine.now)
    with pytest.raises(KeyError), times.episode(engine) as asked:
        await asked.generate(GenerateRequest(np.zeros(1, np.int32), SamplingParams(), key="g0/0"))
        await asked.abort("g0/0")
        assert [each.end for each in times.episodes] == [float("inf")]
        raise KeyError
    assert [*times.episodes] == [episode(0, 4, turn(0, 3, begun=1))]


FOUND = EngineShare(1, 200, 400, 60.0, 0.7, 0.75, 190.0, 0.74, 0.8, 4.0, 0.0, 0.5, 12.0)
KINDS = {"trainer": {"train": 3.0}, "engine-0": {"generate": 7.0, "sync": 1.0, "yield": 0.5}, "controller": {"sync": 9.0}}
TIME = Account(KINDS, dict.fromkeys(KINDS, 10.0))


@pytest.mark.parametrize(
    ("changed", "advised"),
    [
        ({}, "The gap is small. Only more episodes in flight keep engines busier: raise max_lag (now 4) or rollout.groups"),
        ({"busy": 0.95, "allowed": 0.99}, "Nothing is to be gained here"),
        ({"busy": 0.5, "in_flight": 90.0, "allowed_in_flight": 0.55}, "Raise max_lag (now 4) or rollout.window (now 2)"),
        (
            {"busy": 0.5, "queued": 0.2},
            "The gap is large: episodes waited 20% of their time in the engines' queues. Raise engine.max_sequences",
        ),
        ({"busy": 0.5}, "engines spent most time on taking up weights (10%). Publish less often"),
    ],
)
def test_the_advice_follows_from_what_is_missing(changed: dict[str, float], advised: str):
    found = replace(FOUND, **changed)
    said = advise_engines(found, TIME, Setup(4, 50, window=2))
    busy, most = (round(100 * changed.get(key, getattr(FOUND, key))) for key in ("busy", "allowed"))
    assert said.startswith(
        f"engines computed {busy}% of the time; episodes were outside of them for 80% of theirs (between turns: median "
        "0.5 s, 99 % within 12 s). With at most 200 of these episodes in flight, list scheduling would have let them "
        f"compute {most}%: they reached {100 * found.of_allowed:.0f}% of that. "
    )
    assert advised in said


def test_a_trainer_that_always_computes_is_named():
    held = replace(FOUND, busy=0.5, in_flight=90.0, allowed_in_flight=0.55)
    busy = Account({"trainer": {"train": 9.0}}, {"trainer": 10.0})
    said = advise_engines(held, busy, Setup(4, 50))
    assert "The gap is large: on average 90 episodes were in flight. " in said
    assert said.endswith("had ended and waited for the trainer, which computed 90% of the time")
