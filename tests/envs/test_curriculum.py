"""Which task comes next: shares, orders, retirement, and that all of it follows from what was recorded."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.core.types import GREEDY, Finish, Group, Score, Task, Trajectory
from tidemill.envs.curriculum import EXPLORE, KEPT, Curriculum, Order, Pool, task_order, turns

ORDERS: tuple[Order, ...] = ("shuffled", "frontier", "easy_first", "mixed")
NAN = float("nan")


def tasks(count: int, env: str = "") -> list[Task]:
    return [Task(f"t{i}", "?", env=env) for i in range(count)]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_turns_are_exact_in_a_cycle_and_near_it_within(weights):
    cycle, total = turns(weights), sum(weights)
    assert Counter(cycle) == Counter(dict(enumerate(weights)))
    counts = [0] * len(weights)
    for n, k in enumerate(cycle, 1):
        counts[k] += 1
        for count, weight in zip(counts, weights, strict=True):
            share = weight / total
            assert abs(count - n * share) <= 0.5 + len(weights) / 2 * share + 1e-9


def test_turns_of_nobody_are_refused():
    for weights in ([], [0, 0], [1, -1]):
        with pytest.raises(ValueError, match="one of them positive"):
            turns(weights)
    assert turns([0, 2]) == [1, 1]


def test_shuffled_is_the_order_by_number_whatever_is_learnt():
    plain = Curriculum(tasks(7), seed=3)
    for group_id in range(40):
        task = plain.choose(group_id)
        assert task is not None and task.id == f"t{task_order(7, 3, group_id)}"
        plain.give(group_id, task)
        plain.learn(group_id, task, [1.0, 1.0])
    assert plain.by_number and plain.choose(2) is not None and plain.choose(2) == plain.choose(2)


def test_shuffled_with_retirement_gives_every_task_once_a_round():
    pool = Pool(9, 0, "shuffled", 0.9)
    rounds = []
    for round_ in range(3):
        given = [give(pool, round_ * 9 + i) for i in range(9)]
        assert sorted(given) == list(range(9))
        rounds.append(given)
    assert rounds[0] != rounds[1] != rounds[2], "each round in another order"


def give(pool: Pool, group_id: int, rewards: tuple[float, ...] = (0.0, 0.0)) -> int:
    index = pool.choose(group_id, group_id)
    assert index is not None
    pool.give(group_id, index)
    pool.learn(group_id, index, rewards)
    return index


def test_one_whole_group_passed_retires_a_task_for_good():
    pool = Pool(3, 0, "shuffled", 0.75)
    for index, rewards in enumerate([(1.0, 1.0, 1.0, 0.0), (1.0, 1.0, 1.0, NAN), (1.0, 1.0, 0.5, 0.5)]):
        pool.give(index, index)
        pool.learn(index, index, rewards)
    assert pool.retired.tolist() == [True, False, False], "3 of 4; a group that was not judged whole; 2 of 4"
    pool.give(3, 0)
    pool.learn(3, 0, (0.0,) * 4)
    assert pool.retired[0], "whatever comes back of it later"
    assert {give(pool, i) for i in range(4, 20)} == {1, 2}
    pool.retired[:] = True
    assert pool.choose(20, 20) is None


@pytest.mark.parametrize("order", ORDERS)
def test_nothing_is_retired_unless_asked_for(order):
    pool = Pool(3, 0, order)
    assert {give(pool, i, (1.0, 1.0)) for i in range(30)} == {0, 1, 2} and not pool.retired.any()


def known(order: Order, rates: list[float], extra: int = 0) -> Pool:
    """A pool in which these tasks have come back with these rates of 8 attempts; `extra` more were never tried."""
    pool = Pool(len(rates) + extra, 0, order, 0.95)
    for index, rate in enumerate(rates):
        pool.give(index, index)
        pool.learn(index, index, [1.0] * round(8 * rate) + [0.0] * round(8 * (1 - rate)))
    return pool


def preferred(pool: Pool, group_id: int) -> int | None:
    """What comes where the turn is no shuffled one."""
    pool._is_shuffled = lambda group_id: False  # type: ignore[method-assign]
    return pool.choose(group_id, group_id)


def test_the_frontier_is_nearest_to_one_half():
    pool = known("frontier", [0.0, 0.125, 0.625, 0.875, 1.0], extra=2)
    assert preferred(pool, 100) == 2
    pool.give(100, 2)
    assert preferred(pool, 101) in (1, 3), "what is away is not given again"
    pool.give(101, 1)
    assert preferred(pool, 102) == 3
    pool.give(102, 3)
    assert preferred(pool, 103) in (5, 6), "what never passes, and what always does, is no frontier: a new task"


def test_easy_first_begins_with_the_easiest_that_is_left():
    pool = known("easy_first", [0.25, 0.0, 0.875, 1.0, 0.5])
    assert pool.retired.tolist() == [False, False, False, True, False]
    seen = []
    for group_id in range(100, 103):
        seen.append(preferred(pool, group_id))
        pool.give(group_id, seen[-1])
    assert seen == [2, 4, 0]


def test_of_equal_rates_the_one_given_longest_ago_comes_and_then_rests():
    pool = known("frontier", [0.5] * 8)
    given = []
    for group_id in range(100, 124):
        given.append(preferred(pool, group_id))
        pool.give(group_id, given[-1])
        pool.learn(group_id, given[-1], [1.0, 0.0])
    assert given == [*range(8)] * 3
    pool = known("frontier", [0.5, *[0.125] * 7])
    given = []
    for group_id in range(100, 124):
        given.append(preferred(pool, group_id))
        pool.give(group_id, given[-1])
        pool.learn(group_id, given[-1], [1.0, 0.0] if given[-1] == 0 else [1.0] + [0.0] * 7)
    assert given.count(0) == 8, "of 8 known tasks 2 others come first: every third turn"
    assert all(0 in given[i : i + 3] for i in range(0, 24, 3))


@pytest.mark.parametrize("order", ["frontier", "easy_first", "mixed"])
def test_unknown_and_hopeless_tasks_keep_being_tried(order):
    pool, tried = Pool(40, 1, order, 0.99 if order == "easy_first" else 0.0), Counter[int]()
    for group_id in range(600):
        index = pool.choose(group_id, group_id)
        assert index is not None
        tried[index] += 1
        pool.give(group_id, index)
        pool.learn(group_id, index, [0.0] * 4 if index < 20 else [1.0, 0.0, 1.0, 0.0])
    assert set(tried) == set(range(40))
    hopeless = sum(tried[i] for i in range(20)) / 600
    least = 1 / EXPLORE[order] / 3
    assert least < hopeless < 0.45, f"{hopeless:.2f} of the groups for the half that is hopeless"
    assert min(tried[i] for i in range(20)) >= 3


def test_a_pass_rate_is_of_the_latest_groups_in_whatever_order_they_came_back():
    groups = {i: [1.0] * (i % 3) + [0.0] * (4 - i % 3) for i in range(9)}
    rates = set()
    for seed in range(20):
        pool = Pool(2, 0, "frontier")
        for group_id in groups:
            pool.give(group_id, 1)
        for group_id in random.Random(seed).sample(list(groups), len(groups)):
            pool.learn(group_id, 1, groups[group_id])
        rates.add(float(pool.rates[1]))
    latest = [reward for group_id in sorted(groups)[-KEPT:] for reward in groups[group_id]]
    assert rates == {float(np.mean(latest))}
    assert np.isnan(Pool(2, 0).rates).all()


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.sampled_from(ORDERS), st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 12))
@pytest.mark.runs
def test_what_was_recorded_is_all_there_is_to_know(rng, order, retire, count):
    """A run of some groups in flight that is killed: what is made of its record is what it was, and goes on alike; and what
    was retired never comes again."""
    weights = {"a": 2, "b": 1}
    all_tasks = [*tasks(count, "a"), *tasks(3, "b")]
    make = lambda: Curriculum(all_tasks, 5, order, retire, weights)  # noqa: E731
    live, record, flying = make(), {}, list[int]()
    skills = {(t.env, t.id): rng.choice([0.0, 0.3, 0.9, 1.0]) for t in all_tasks}
    retired: set[tuple[str, str]] = set()
    for group_id in range(60):
        task = live.choose(group_id)
        if task is None:
            assert len(retired) == len(all_tasks)
            break
        assert (task.env, task.id) not in retired
        live.give(group_id, task)
        record[group_id] = task, None
        flying.append(group_id)
        while flying and rng.random() < 0.6:
            back = flying.pop(rng.randrange(len(flying)))
            own = record[back][0]
            rewards = [float(rng.random() < skills[own.env, own.id]) for _ in range(4)]
            rewards = [NAN, *rewards[1:]] if rng.random() < 0.1 else rewards
            record[back] = own, rewards
            live.learn(back, own, rewards)
            if retire and not any(map(np.isnan, rewards)) and np.mean(rewards) >= retire:
                retired.add((own.env, own.id))
    again = make()
    for group_id, (task, rewards) in record.items():
        again.give(group_id, task)
        if rewards is not None:
            again.learn(group_id, task, rewards)
    assert [again.choose(i) for i in range(100, 110)] == [live.choose(i) for i in range(100, 110)]
    for one, other in zip(again._parts, live._parts, strict=True):
        for name in ("retired", "rates", "given", "_latest", "_away"):
            np.testing.assert_array_equal(getattr(one.pool, name), getattr(other.pool, name))


def test_where_tasks_follow_from_numbers_the_latest_rounds_tell_what_all_would():
    """Else a run that goes on after months would read all that it did. An order by difficulty is owed all of it."""
    weights = {"a": 3, "b": 1}
    all_tasks = [*tasks(5, "a"), *tasks(4, "b")]
    make = lambda order: Curriculum(all_tasks, 5, order, 0.0, weights)  # noqa: E731
    whole, latest = make("shuffled"), make("shuffled")
    since, rng = latest.matters_from(1000), random.Random(0)
    assert since == 1000 - 16 * (KEPT + 1), "every 16 groups the second has had each of its tasks once, the first earlier"
    assert latest.matters_from(20) == 0 and make("frontier").matters_from(1000) == 0
    for group_id in range(1000):
        task, rewards = whole.choose(group_id), [float(rng.random() < 0.5) for _ in range(4)]
        assert task is not None
        for known in (whole, latest) if group_id >= since else (whole,):
            known.give(group_id, task)
            known.learn(group_id, task, rewards)
    for one, other in zip(whole._parts, latest._parts, strict=True):
        assert not np.isnan(one.pool.rates).any()
        np.testing.assert_array_equal(one.pool.rates, other.pool.rates)
    for known in (whole, latest):
        known._expected.clear()
    assert whole.figures() == latest.figures() == {"data/seen": 1.0, "data/retired": 0.0}


def test_environments_come_in_proportion_and_take_over_from_one_that_is_done():
    weights = {"big": 5, "small": 2, "third": 1}
    found = Curriculum([t for name in weights for t in tasks(4, name)], 0, "frontier", 1.0, weights)
    for n, group_id in enumerate(range(400), 1):
        task = found.choose(group_id)
        assert task is not None
        found.give(group_id, task)
        found.learn(group_id, task, [0.0, 1.0])
        for env, weight in weights.items():
            given = sum(each.pool.given.sum() for each, name in zip(found._parts, weights, strict=True) if name == env)
            assert abs(given - n * weight / 8) <= 2
    small = found._parts[1].pool
    small.retired[:] = True
    later = Counter(task.env for i in range(600) if (task := found.choose(i)) is not None)
    assert set(later) == {"big", "third"} and later["big"] == 5 * later["third"]


def test_environments_by_number_follow_from_the_id_alone_each_in_its_own_order():
    weights = {"a": 3, "b": 1}
    found = Curriculum([*tasks(6, "a"), *tasks(6, "b")], 7, weights=weights)
    given = [task for i in range(48) if (task := found.choose(i)) is not None]
    assert given == [found.choose(i) for i in range(48)]
    by_env = {env: [t.id for t in given if t.env == env] for env in weights}
    assert [len(ids) for ids in by_env.values()] == [36, 12]
    assert all(len(set(ids[i : i + 6])) == 6 for ids in by_env.values() for i in range(0, len(ids), 6))
    assert by_env["a"][:6] != by_env["b"][:6]


def test_figures_and_a_greedy_attempt_that_does_not_count():
    found = Curriculum(tasks(4), 0, "shuffled", 1.0)
    assert found.figures() == {"data/seen": 0.0, "data/retired": 0.0}
    first = found.choose(0)
    assert first is not None
    found.give(0, first)
    found.learn_group(Group(0, first, [attempt(1.0, 0), attempt(0.0, 1), attempt(1.0, GREEDY)]))
    found.give(1, first)
    assert found.figures() == {"data/seen": 0.25, "data/retired": 0.0, "data/expected": 0.5}
    found.learn_group(Group(1, first, [attempt(1.0, 0), attempt(1.0, 1), attempt(0.0, GREEDY)]))
    assert found.figures() == {"data/seen": 0.25, "data/retired": 0.25}, "the mean is of what was given since"
    found.learn_group(Group(2, Task("gone", "?"), [attempt(1.0, 0)]))


def attempt(reward: float, sample: int) -> Trajectory:
    mask = np.array([False, True])
    zero = np.zeros(2, np.float32)
    versions = np.array([-1, 0], np.int32)
    return Trajectory(np.arange(2, dtype=np.int32), mask, zero, versions, Finish.STOP, Score(reward), sample=sample)


def samples_until(order: Order, retire: float, seed: int, goal: float = 0.8) -> int:
    """Groups that a learner needs whose skill on a level grows with the variance of its rewards there, and carries over to
    the next level: 8 levels of 40 tasks, of which it can do hardly more than the first when it begins."""
    rng = np.random.default_rng(seed)
    levels = np.repeat(np.arange(8), 40)
    skill = 0.5
    pool = Pool(len(levels), seed, order, retire)
    flying: list[tuple[int, int]] = []
    for group_id in range(20_000):
        index = pool.choose(group_id, group_id)
        if index is None:
            return group_id
        pool.give(group_id, index)
        flying.append((group_id, index))
        if len(flying) < 32:
            continue
        for back, task in flying[:16]:  # a step
            rewards = (rng.random(8) < 1 / (1 + np.exp(2 * (levels[task] - skill)))).astype(float)
            pool.learn(back, task, rewards.tolist())
            skill += 0.05 * rewards.var()
        del flying[:16]
        if np.mean(1 / (1 + np.exp(2 * (levels - skill)))) >= goal:
            return group_id + 1
    return 20_000


@pytest.mark.parametrize(("order", "retire"), [("frontier", 0.0), ("mixed", 0.0), ("shuffled", 0.95), ("easy_first", 0.95)])
@pytest.mark.runs
def test_on_tasks_of_graded_difficulty_a_curriculum_needs_fewer_samples(order, retire):
    ratios = [samples_until(order, retire, seed) / samples_until("shuffled", 0.0, seed) for seed in range(5)]
    assert max(ratios) < 0.9, ratios
