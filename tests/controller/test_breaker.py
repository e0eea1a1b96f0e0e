"""The breaker as a pure machine, and around a run under virtual time: it pauses, says why, goes on by itself, or ends."""

from __future__ import annotations

import asyncio
import math

import pytest
from test_controller import World, controller
from virtual_time import run_virtually

from tidemill.controller.circuit_breaker import LEAST, LONGEST_S, PROBES, TOLD_S, WINDOW, Breaker, Change, Gate
from tidemill.core.errors import RunFailed
from tidemill.core.types import Group, InfraError, Outcome, Score, Task, Unscorable

GOOD, BAD = Score(1.0), InfraError("the sandbox is down")


def fed(breaker: Breaker, *outcomes: Outcome, group: int = 0, now: float = 0.0, verifier: str = "v") -> Change | str | None:
    return breaker.judged(group, verifier, outcomes, now)


def opened(**settings) -> Breaker:
    breaker = Breaker(**settings)
    assert fed(breaker, *[GOOD] * LEAST) is None
    change = fed(breaker, BAD, BAD, now=10.0)
    assert isinstance(change, Change) and change.kind == "paused"
    return breaker


def probe(breaker: Breaker, now: float, *outcomes: Outcome, first: int = 100) -> Change | str | None:
    """Let the probes in and have each judged as `outcomes`; what the first of them that says anything says."""
    assert breaker.wait_s(now) == 0
    for group in range(first, first + PROBES):
        breaker.admitted(group, now)
    said = [fed(breaker, *outcomes, group=group, now=now) for group in range(first, first + PROBES)]
    return next((each for each in said if each is not None), None)


def test_exactly_the_limit_is_let_pass_and_more_is_not():
    breaker = Breaker()
    assert fed(breaker, *[GOOD] * (WINDOW - WINDOW // 20), *[BAD] * (WINDOW // 20)) is None
    assert breaker.closed and breaker.wait_s(0) == 0
    change = fed(breaker, BAD)  # pushes a good one out of the window
    assert isinstance(change, Change) and change.share == pytest.approx(11 / 200)
    assert "v are infrastructure errors" in change.text and "the sandbox is down" in change.text and "6%" in change.text


def test_only_the_latest_outcomes_count():
    breaker = Breaker()
    fed(breaker, *[GOOD] * 190, *[BAD] * 9)
    fed(breaker, *[GOOD] * WINDOW)
    assert fed(breaker, *[BAD] * 9) is None, "18 of 409, and 9 of the latest 200"


def test_few_outcomes_say_nothing():
    breaker = Breaker()
    assert fed(breaker, GOOD, BAD, BAD) is None
    assert fed(breaker, *[GOOD] * (LEAST - 4)) is None
    assert isinstance(fed(breaker, GOOD), Change)


def test_verifiers_are_told_apart():
    breaker = Breaker()
    for _ in range(10):
        assert fed(breaker, *[GOOD] * 20, verifier="sound") is None
    assert fed(breaker, *[GOOD] * 10, *[BAD] * 9, verifier="broken") is None
    change = fed(breaker, BAD, verifier="broken")
    assert isinstance(change, Change) and change.verifier == "broken" and change.share == 0.5


def test_unscorable_is_no_infrastructure_error():
    breaker = Breaker()
    assert fed(breaker, GOOD, *[Unscorable("no gold answer")] * 100) is None


def test_it_opens_probes_and_closes():
    breaker = opened()
    assert breaker.wait_s(10.0) == 1.0 and breaker.wait_s(10.75) == 0.25
    breaker.admitted(50, 10.5)  # had been waiting for its slot: no probe
    for group in range(PROBES):
        assert breaker.wait_s(11.0) == 0
        breaker.admitted(group, 11.0)
    assert breaker.wait_s(11.0) == math.inf, "no more before these have come back"
    assert fed(breaker, GOOD, group=50, now=11.5) is None and not breaker.closed
    assert fed(breaker, GOOD, group=7000, now=11.5) is None and not breaker.closed, "in flight since before"
    assert fed(breaker, GOOD, group=0, now=12.0) is None
    change = fed(breaker, GOOD, group=1, now=13.0)
    assert isinstance(change, Change) and change.kind == "resumed" and change.seconds == 3.0
    assert breaker.closed and breaker.wait_s(13.0) == 0
    assert fed(breaker, *[GOOD] * LEAST, BAD) is None, "what was before the pause does not count after it"


def test_a_probe_that_fails_doubles_the_back_off_to_a_bound():
    breaker, now, waits = opened(pause_s=1e6), 10.0, []
    for _ in range(10):
        waits.append(breaker.wait_s(now))
        now += waits[-1]
        said = probe(breaker, now, GOOD, BAD)
        assert (said is None) is (breaker.wait_s(now) < TOLD_S)
        if said is not None:
            assert isinstance(said, Change) and said.kind == "tried" and said.reason == "the sandbox is down"
            assert (
                f"still paused, after {now - 10:.0f} s: v says" in said.text and f"{breaker.wait_s(now):.0f} s" in said.text
            )
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60] and waits[-1] == LONGEST_S


def test_it_gives_up_with_the_first_cause_and_not_without_a_last_try():
    breaker, now, tries = opened(pause_s=100.0), 10.0, []
    while True:
        now += breaker.wait_s(now)
        tries.append(now)
        said = probe(breaker, now, InfraError("still nothing"))
        if isinstance(said, str):
            break
    assert said == "v has failed for 100 s, since: the sandbox is down; now: still nothing"
    assert tries[-1] == 110.0


def test_one_that_soon_fails_again_is_asked_less_often():
    breaker = opened()
    assert probe(breaker, 11.0, BAD) is None  # back-off 2
    assert isinstance(probe(breaker, 13.0, GOOD), Change)
    assert isinstance(fed(breaker, *[GOOD] * LEAST, *[BAD] * 9, now=20.0), Change)
    assert breaker.wait_s(20.0) == 2.0
    assert isinstance(probe(breaker, 22.0, GOOD), Change)
    fed(breaker, *[GOOD] * WINDOW)
    assert isinstance(fed(breaker, *[BAD] * 11, now=30.0), Change)
    assert breaker.wait_s(30.0) == 1.0, "it had been well for a whole window"


def test_what_never_judged_anything_is_a_mistake_and_ends_the_run_soon():
    breaker = Breaker(patience=3)
    assert fed(breaker, *[BAD] * 40) is None
    assert fed(breaker, *[Unscorable("no gold")] * 8) is None
    said = fed(breaker, Unscorable("no gold"), BAD)
    assert said == "3 groups in a row could not be scored by v; the latest reason: no gold"
    late = Breaker(patience=3)
    for _ in range(2):
        fed(late, BAD)
    fed(late, GOOD)
    assert [fed(late, Unscorable("none")) for _ in range(10)] == [None] * 10, "it has judged: other rules hold"


def test_one_environment_that_never_judged_anything_ends_a_run_in_which_others_do():
    breaker = Breaker(patience=3)
    for _ in range(2):
        assert fed(breaker, GOOD, verifier="sound") is None
        assert fed(breaker, Unscorable("no gold"), verifier="broken") is None
    said = fed(breaker, Unscorable("no gold"), verifier="broken")
    assert said == "3 groups in a row could not be scored by broken; the latest reason: no gold"


def test_only_the_verifier_that_failed_can_say_that_it_is_well_again():
    breaker = opened()
    for group in range(100, 100 + 10 * PROBES, PROBES):
        for each in range(group, group + PROBES):
            assert breaker.wait_s(11.0) == 0, "one of another verifier gives its place away"
            breaker.admitted(each, 11.0)
        for each in range(group, group + PROBES):
            outcome = GOOD if each % 4 else Unscorable("none")  # also one that never judged anything yet
            assert fed(breaker, outcome, group=each, now=11.0, verifier="other") is None
    assert not breaker.closed
    change = probe(breaker, 12.0, GOOD, first=500)
    assert isinstance(change, Change) and change.kind == "resumed" and change.verifier == "v"


class Outage(World):
    """A verifier that is down for a time: every attempt that is judged then is an infrastructure error."""

    down: tuple[float, float] = (300.0, 420.0)
    admitted: list[float]

    def admit(self, group_id: int, task: Task) -> None:
        super().admit(group_id, task)
        self.admitted.append(asyncio.get_running_loop().time())

    async def rollout(self, group_id: int, task: Task) -> Group:
        group = await super().rollout(group_id, task)
        if self.down[0] <= asyncio.get_running_loop().time() < self.down[1]:
            group.trajectories[0].outcome = InfraError("connection refused")
        return group

    def drop_reason(self, group: Group) -> str | None:
        return None if isinstance(group.trajectories[0].outcome, Score) else "unscored"


def outage(down: tuple[float, float], **settings) -> tuple[Outage, list[Change], object]:
    world, told = Outage(gen_s=5, train_s=3), list[Change]()
    world.down, world.admitted = down, []
    run = controller(world, steps=60, batch=4, max_lag=1)
    run.gate = Gate(Breaker(**settings), "sandbox", told.append)
    return world, told, run


def test_a_run_outlives_an_outage_of_its_verifier():
    world, told, run = outage((300.0, 420.0))
    assert run_virtually(run.run()) == 60  # type: ignore[attr-defined]
    assert [change.kind for change in told if change.kind != "tried"] == ["paused", "resumed"]
    assert told[0].kind == "paused" and told[-1].kind == "resumed"
    assert told[0].verifier == "sandbox" and told[0].reason == "connection refused"
    assert 60 < told[-1].seconds < 300
    assert all(len(fate) == 1 for fate in world.fates.values())
    assert sum(fate == ["trained"] for fate in world.fates.values()) == 240
    failed = sum(fate == ["unscored"] for fate in world.fates.values())
    assert 2 <= failed <= 40, "the groups in flight, then a few probes: not one after the other for two minutes"
    assert max(world.lags) <= 1


def test_a_run_whose_verifier_stays_down_ends_and_says_since_when():
    _, told, run = outage((300.0, math.inf), pause_s=100.0)
    with pytest.raises(RunFailed, match=r"sandbox has failed for 1\d\d s, since: connection refused"):
        run_virtually(run.run())  # type: ignore[attr-defined]
    assert [change.kind for change in told] == ["paused", *["tried"] * (len(told) - 1)] and len(told) > 2


def test_a_pause_does_not_keep_a_run_from_being_stopped():
    world, told, run = outage((300.0, math.inf), pause_s=1e6)

    async def main() -> int:
        asyncio.get_running_loop().call_later(2000, run.stop)  # type: ignore[attr-defined]
        return await run.run()  # type: ignore[attr-defined]

    done = run_virtually(main())
    assert 0 < done < 60 and world.saved[-1] == done and told[-1].kind == "tried"
    paused = [at for at in world.admitted if at > 330]
    assert len(paused) <= 2 * PROBES * (2 + (2000 - 330) / LONGEST_S) + PROBES * 7


def test_trained_steps_go_on_with_what_was_finished():
    """The pause takes no slot: everything that could be judged before it is trained on while it lasts."""
    world, _, run = outage((300.0, math.inf), pause_s=1e6)

    async def main() -> None:
        asyncio.get_running_loop().call_later(2000, run.stop)  # type: ignore[attr-defined]
        await run.run()  # type: ignore[attr-defined]

    run_virtually(main())
    left = [group for group, fate in world.fates.items() if not fate]
    assert len(left) <= 4 + PROBES, "less than a step's groups, and the probes in flight"
