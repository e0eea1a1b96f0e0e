"""Whoever counts attempts counts the same, whether an attempt is one row or has a row for each of its turns."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tidemill.controller.dropped_groups import Drops
from tidemill.controller.evaluation import by_environment, summary
from tidemill.controller.run_monitor import Monitor, count, describe
from tidemill.controller.train_step import computed_tokens
from tidemill.core.attempt_checks import check_attempts
from tidemill.core.types import CUT_AT, GREEDY, Finish, Group, InfraError, Score, Task, Trajectory, Version
from tidemill.envs.curriculum import Curriculum
from tidemill.observability.diagnosis.symptoms import Symptoms
from tidemill.observability.metrics import StepMetrics


def attempt(sample: int, outcome, finish: Finish = Finish.STOP, step: int = 3) -> list[Trajectory]:
    """Two replies with a tool's answer between them, as one row."""
    mask = np.array([0, 0, 1, 1, 0, 1, 1, 1], bool)
    tokens, steps = np.arange(8, dtype=np.int32), np.where(mask, step, -1).astype(np.int32)
    steps[2:4] = 3
    sources = tuple(Version(each) for each in sorted({3, step}))
    return [
        Trajectory(
            tokens,
            mask,
            -0.5 * mask.astype(np.float32),
            steps,
            finish,
            outcome,
            sources,
            sample,
            turns=2,
            info={CUT_AT: 9.0},
        )
    ]


def in_two(rows: list[Trajectory]) -> list[Trajectory]:
    """The same attempt, with the second reply in a row that was forked after the first."""
    (t,) = rows
    where = np.arange(8)
    first, second = (t.mask & own for own in (where < 4, where > 4))
    parts = [(first, 4, None), (second, 8, (0, 4))]
    return [
        replace(
            t,
            **{name: np.where(mask, getattr(t, name), none)[:end] for name, none in (("logprobs", 0), ("versions", -1))},
            tokens=t.tokens[:end],
            mask=mask[:end],
            sources=tuple(v for v in t.sources if v.step in t.versions[mask]),
            parent=parent,
            outcome=t.outcome if parent else None,
            finish=t.finish if parent else Finish.LENGTH,  # of its own reply: the attempt went on
        )
        for mask, end, parent in parts
    ]


GROUPS = {
    "ordinary": [
        attempt(0, Score(1.0, {"form": 1.0})),
        attempt(1, Score(0.5, {"form": 0.0})),
        attempt(2, InfraError("lost")),
    ],
    "cut off": [attempt(0, Score(0.0), Finish.LENGTH), attempt(1, Score(1.0), Finish.CONTEXT), attempt(2, Score(0.0))],
    "all alike": [attempt(0, Score(0.0)), attempt(1, Score(0.0)), attempt(GREEDY, Score(1.0))],
    "solved": [attempt(0, Score(1.0)), attempt(1, Score(1.0))],
    "no baseline": [attempt(0, Score(1.0)), attempt(GREEDY, InfraError("lost"))],
    "older weights": [attempt(0, Score(1.0), step=4), attempt(1, Score(0.0))],
}


def group(name: str, split: bool) -> Group:
    rows = [row for each in GROUPS[name] for row in (in_two(each) if split else each)]
    return Group(7, Task("t", "p", env=f"env {name}"), rows)


def said(one: Group) -> dict[str, object]:
    """Everything that is counted or said of a group."""
    monitor = Monitor(SimpleNamespace(), SimpleNamespace(note=lambda text: None), SimpleNamespace())
    monitor.rolled_out(one, None)
    totals = monitor.totals
    window, drops, learner = StepMetrics(), Drops(), Curriculum([one.task], seed=0, retire=0.5)
    count(window, one, "zero-variance")
    describe(window, [one])
    for reason in ("zero-variance", "unscored", "other"):
        drops.add(one, reason)
    learner.learn_group(one)
    learner.give(8, one.task)
    other = Group(0, Task("u", "p", env="another"), attempt(0, Score(1.0)))
    return {
        "metrics": window.take(),
        "cause": drops.cause(),
        "curriculum": learner.figures(),
        "evaluation": summary([one]) | by_environment([one, other]),
        "symptoms": Symptoms().look([one], {"train/truncated": 0.5}),
        "totals": (totals.tokens, totals.outcomes, totals.cut, totals.reasons),
        "outcomes": [t.outcome for t in one.ends],
        "oldest": one.oldest,
    }


@pytest.mark.parametrize("name", GROUPS)
def test_what_is_counted_and_said_is_the_same(name: str) -> None:
    whole, split = group(name, False), group(name, True)
    check_attempts(split)
    assert len(split.trajectories) == 2 * len(whole.trajectories)
    expected, found = said(whole), said(split)
    for each in expected:
        assert found[each] == expected[each], each
    assert computed_tokens(split) >= computed_tokens(whole)
