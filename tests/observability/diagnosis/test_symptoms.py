"""Each symptom is planted, told of with its remedy, and told of once; a healthy step shows none."""

import numpy as np
import pytest

from tidemill.core.types import Finish, Group, Score, Task, Trajectory
from tidemill.observability.diagnosis.symptoms import Symptoms

HEALTHY = {
    **{"train/zero_variance_groups": 1.0, "train/groups": 4.0, "train/entropy": 1.0},
    **{"train/clipped": 0.05, "train/truncated": 0.1},
}


def group(rewards, id=0, same=False, env="spell"):
    rows = []
    for i, reward in enumerate(rewards):
        tokens = np.array([1, 2, 3 if same else 3 + i], np.int32)
        mask = np.array([False, True, True])
        zero = np.zeros(3, np.float32)
        rows.append(
            Trajectory(tokens, mask, zero, np.where(mask, 0, -1).astype(np.int32), Finish.STOP, Score(reward), sample=i)
        )
    return Group(id, Task(str(id), "p", env=env), rows)


GROUPS = [group([1, 0, 0]), group([1, 1, 0], 1)]
PLANTED = {
    "identical completions": ([group([0.5, 0.5, 0.5], same=True), group([0, 0, 0], 1, same=True)], HEALTHY, "rollout.temp"),
    "no advantages": (GROUPS, HEALTHY | {"train/zero_variance_groups": 4.0}, "group_size"),
    "entropy collapse": (GROUPS, HEALTHY | {"train/entropy": 0.04}, "clip_high"),
    "ratio saturation": (GROUPS, HEALTHY | {"train/clipped": 0.21}, "max_lag"),
    "truncation": (GROUPS, HEALTHY | {"train/truncated": 0.21}, "max_tokens"),
    "one environment": ([group([1, 0]), group([0.0, 0.0], 1, env="sums"), group([1, 0], 2)], HEALTHY, "'spell'"),
}


def test_replies_that_were_given_show_no_symptom_of_sampling():
    given = [group([1, 0], same=True), group([1, 0], 1, same=True)]
    for each in (t for g in given for t in g.trajectories):
        each.given, each.mask = each.mask, np.zeros(3, bool)
    everything = {key: value for _, figures, _ in PLANTED.values() for key, value in figures.items()}
    symptoms = Symptoms()
    assert symptoms.look(given, HEALTHY) == [] == symptoms.look(given, everything | {"train/entropy": 0.01})


@pytest.mark.parametrize("kind", PLANTED)
def test_what_was_planted_is_told_of_once_with_a_remedy(kind):
    groups, figures, remedy = PLANTED[kind]
    symptoms = Symptoms()
    assert symptoms.look(GROUPS, HEALTHY) == []
    (text,) = symptoms.look(groups, figures)
    assert remedy in text and list(symptoms.told) == [kind]
    assert symptoms.look(groups, figures) == []


def test_one_environment_alone_is_no_symptom_and_neither_are_all():
    assert Symptoms().look([group([1, 0])], HEALTHY) == []
    assert Symptoms().look([group([1, 0]), group([1, 0], 1, env="sums")], HEALTHY) == []


SOLVED = [group([1, 1, 1], i, same=True) for i in range(7)]


@pytest.mark.parametrize(
    ("groups", "figures"),
    [
        (SOLVED, HEALTHY),
        ([*SOLVED, group([0, 0, 0], 7)], HEALTHY | {"train/zero_variance_groups": 4.0}),
        ([*SOLVED, group([1, 1, 0], 7)], HEALTHY | {"train/entropy": 0.03}),
        ([group([1, 0]), group([1.0, 1.0], 1, env="sums")], HEALTHY),
    ],
)
def test_a_policy_that_has_learnt_its_tasks_shows_no_symptom(groups, figures):
    """Solved tasks are answered alike, with equal rewards and little entropy; the same of unsolved ones is told of."""
    symptoms = Symptoms()
    assert symptoms.look(GROUPS, HEALTHY) == []
    for _ in range(20):
        assert symptoms.look(groups, HEALTHY) == []
    assert symptoms.look(groups, figures) == []
    if figures is not HEALTHY:
        unsolved = [group([0, 0, 0], i) for i in range(8)]
        assert [symptoms.look(unsolved, figures) for _ in range(20)].count([]) == 19


def test_nothing_is_needed():
    assert Symptoms().look([], {}) == []
