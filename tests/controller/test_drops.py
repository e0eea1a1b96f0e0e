"""Groups dropped in a row: the sentence names the true cause, never the policy for what is not its fault."""

from __future__ import annotations

import pytest
from ledger.ledger_cases import task, trajectory

from tidemill.controller.dropped_groups import Drops
from tidemill.core.types import GREEDY, Finish, Group, InfraError, Outcome, Score, Unscorable

STOP, LENGTH = Finish.STOP, Finish.LENGTH
Attempt = tuple[Outcome | float, Finish]


def group(number: int, attempts: list[Attempt], greedy: Outcome | None = None) -> Group:
    rows = [trajectory(number, i) for i in range(len(attempts) + (greedy is not None))]
    for row, (outcome, finish) in zip(rows, attempts, strict=False):
        row.outcome, row.finish = Score(float(outcome)) if isinstance(outcome, int | float) else outcome, finish
    if greedy is not None:
        rows[-1].outcome, rows[-1].sample = greedy, GREEDY
    return Group(number, task(number), rows)


NO_GOLD, DOWN = (Unscorable("no gold"), STOP), (InfraError("the sandbox is down"), STOP)
FLAT, NOTHING = "zero-variance", "unscored"
CASES: dict[str, tuple[list[tuple[Group, str]], list[str]]] = {
    "no score": (
        [(group(0, [NO_GOLD, DOWN, DOWN]), NOTHING)] * 3,
        ["3 without a score", "'the sandbox is down'", "reward test"],
    ),
    "cut off": ([(group(0, [(1, LENGTH), (0, LENGTH)]), NOTHING)] * 2, ["2 whose attempts were all cut off", "max_tokens"]),
    "no baseline": ([(group(0, [(1, STOP)], Unscorable("?")), NOTHING)], ["1 whose greedy attempt", "no score"]),
    "all right": ([(group(0, [(1, STOP)] * 2), FLAT)], ["1 with every attempt right; use harder tasks"]),
    "right, and none said of the baseline": (
        [(group(0, [(1, STOP)] * 2, Score(0.0)), FLAT)],
        ["1 with every attempt right"],
    ),
    "all wrong": ([(group(0, [(0, STOP), (-1, STOP)]), FLAT)], ["1 with every attempt wrong; use easier tasks"]),
    "alike": ([(group(0, [(0.5, STOP)] * 2), FLAT)], ["1 with equal rewards", "steps in between"]),
    "of all kinds": (
        [(group(0, [(1, STOP)]), FLAT), (group(1, [NO_GOLD]), NOTHING), (group(2, [NO_GOLD]), NOTHING)],
        ["3 groups in a row were dropped: 2 without a score, 1 with every attempt right, the commonest reason is 'no gold'"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_true_cause_is_named(case: str):
    dropped, said = CASES[case]
    drops = Drops()
    for each, reason in dropped:
        drops.add(each, reason)
    told = drops.cause()
    assert told.startswith(f"{len(dropped)} groups in a row were dropped: ") and not [s for s in said if s not in told], told
    blamed = any(words in told for words in ("harder tasks", "easier tasks", "every attempt"))
    assert blamed == any(reason == FLAT for _, reason in dropped) or case == "alike", told
    assert "\n" not in told and ", ," not in told and ": ;" not in told
