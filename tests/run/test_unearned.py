"""A run that never earned anything says so, and why: by its own record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ledger.ledger_cases import task, trajectory

from tidemill.core.config import build
from tidemill.core.types import GREEDY, Finish, Group, InfraError, Outcome, Score, Unscorable
from tidemill.ledger.ledger import SqliteLedger
from tidemill.run.recipe import RunConfig
from tidemill.run.zero_reward import unearned

Attempt = tuple[Outcome | float, Finish]
STOP, LENGTH, CONTEXT = Finish.STOP, Finish.LENGTH, Finish.CONTEXT


def found(folder: Path, groups: Sequence[Sequence[Attempt]], norm: float = 0.0, gold: str = "ok", **more: Any) -> Any:
    """What is said of a run of these attempts, whose steps had gradients of this norm."""
    before, sampled = more.pop("before", 0.0), more.pop("sampled", 8)
    config = build(RunConfig, {"env": "guess", "model": "m", "run_dir": str(folder), **more})
    with SqliteLedger(folder, mode="create") as ledger:
        ledger.event("reward_check", {"verdicts": {"gold": gold}})
        ledger.evaluation(0, {"accuracy": before, "n": 4.0})
        for number, attempts in enumerate(groups):
            made = [trajectory(number, i, 4 + sampled) for i in range(len(attempts))]
            for each, (outcome, finish) in zip(made, attempts, strict=True):
                each.outcome = Score(float(outcome)) if isinstance(outcome, int | float) else outcome
                each.finish = finish
            ledger.admit(number, task(number))
            ledger.finish(Group(number, task(number), made))
            ledger.begin_step(number, 0, [number])
            ledger.end_step(number, 0, {"grad_norm": norm})
        return unearned(ledger, config)


NOTHING = [(0, STOP)] * 4
CASES: dict[str, tuple[list[list[Attempt]], dict[str, Any], str, list[str]]] = {
    "a base model that solves nothing": (
        [NOTHING] * 3,
        {},
        "unsolved",
        [
            "nothing was earned in 3 steps, for all 12 attempts have the reward 0",
            "warmup.accuracy",
            "sft",
            "now 8",
            "reward test",
        ],
    ),
    "one that was warmed up": ([NOTHING], {"warmup": {"accuracy": 0.1}}, "unsolved", ["in 1 step,", "a run of algorithm"]),
    "a KL term alone has a gradient": ([NOTHING], {"norm": 0.5}, "unsolved", ["never solves a task"]),
    "a penalty for all": ([[(-1, STOP)] * 4], {}, "unsolved", ["all 4 attempts have the reward -1"]),
    "every reply is cut": (
        [[(0, LENGTH)] * 4],
        {"rollout": {"max_tokens": 8}},
        "cut",
        ["100% of the replies were cut off at rollout.max_tokens = 8,", "raise it"],
    ),
    "by the environment": (
        [[(0, LENGTH)] * 3 + [(0, STOP)]],
        {"rollout": {"max_tokens": 64}},
        "cut",
        ["75%", "at 8 tokens, the environment's own limit, below rollout.max_tokens = 64; raise that"],
    ),
    "by the context": (
        [[(0, CONTEXT)] * 4],
        {"engine": {"context": 640}},
        "cut",
        ["where the context was full", "engine.context, now 640"],
    ),
    "nothing is judged": (
        [[(InfraError("no network"), STOP)] * 3 + [(Unscorable("no gold"), STOP)]],
        {},
        "judging",
        ["none of 4 attempts has a score", "3 infrastructure errors, 1 unscorable, the commonest 'no network'"],
    ),
    "most fail, and what is left is alike": (
        [[(InfraError("KeyError: 'gold'"), STOP)] * 3 + [(1, STOP)]],
        {"gold": "not checked"},
        "judging",
        ["3 of 4 attempts have no score, the commonest reason \"KeyError: 'gold'\"; mend that first"],
    ),
    "one that earned all needs no check of the reward": (
        [[(1, STOP)] * 4, [(0, STOP)] * 4],
        {"gold": "not checked"},
        "alike",
        ["for no step had a gradient"],
    ),
    "all is solved": ([[(1, STOP)] * 4], {}, "solved", ["there was nothing to learn", "reward 1", "take harder ones"]),
    "some always, others never": (
        [[(1, STOP)] * 4, [(0, STOP)] * 4],
        {},
        "alike",
        ["there was nothing to learn in 2 steps, for no step had a gradient", "in between"],
    ),
    "a reward that nobody saw pass": ([NOTHING], {"gold": "not checked"}, "reward", ["no right answer has been seen"]),
    "solved greedily alone": ([NOTHING], {"before": 0.25}, "sampling", ["greedy replies solved 25%", "temperature (now 1)"]),
    "what differs is left out": ([[(1, STOP), (0, STOP)]], {}, "left out", ["within 1 group,", "algorithm.overlong"]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_likely_cause_is_named(tmp_path: Path, case: str):
    groups, given, cause, said = CASES[case]
    told = found(tmp_path, groups, **given)
    assert told["cause"] == cause and "\n" not in told["text"], told
    assert not [words for words in said if words not in told["text"]], told["text"]
    assert ("a warm-up on" in told["text"]) == (cause == "unsolved" and "warmup" not in given)


@pytest.mark.parametrize(
    ("groups", "given"),
    [
        ([[(0, STOP), (1, STOP)]], {"norm": 0.1}),
        ([NOTHING, [(0, STOP), (0.1, STOP)]], {"norm": 0.1}),  # one group of all had a gradient
        ([[(0.5, STOP)] * 4], {"norm": 0.1, "algorithm": "reinforce_pp"}),  # is learnt from without comparing
        ([NOTHING], {"norm": 0.3, "algorithm": {"name": "opd", "reference": {"model": "t", "distil": 1.0}}}),
        ([NOTHING], {"algorithm": "sft", "env": {"kind": "rows", "data": "x", "reward": "none"}}),
        ([], {}),
    ],
)
def test_a_run_with_something_to_learn_from_says_nothing(tmp_path: Path, groups: list[list[Attempt]], given: dict[str, Any]):
    assert found(tmp_path, groups, **given) is None


def test_a_greedy_attempt_is_no_attempt_of_the_policys(tmp_path: Path):
    with SqliteLedger(tmp_path, mode="create") as ledger:
        made = [replace(trajectory(0, i), outcome=Score(float(i == 2)), sample=GREEDY if i == 2 else i) for i in range(3)]
        ledger.admit(0, task(0))
        ledger.finish(Group(0, task(0), made))
        earned = ledger.earned()
        assert (earned.attempts, earned.best, earned.solved, earned.varied) == (2, 0.0, 0, 0)
        assert ledger.largest_gradient() is None
