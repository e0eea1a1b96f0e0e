"""The split rule against brute force over batches, shares and whole numbers: a thousand random cases for each claim."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import product
from random import Random
from typing import NamedTuple

import pytest

from tidemill.run.planner.split import Role, Split, split

CASES = 1000


class Sampled(NamedTuple):
    """A random role, as the rule gets it and as plain numbers."""

    role: Role
    table: list[float]  # seconds a sample for batches of 1, 2, ...
    each: int  # bytes of a unit of the batch
    own: int  # bytes on every device
    state: int  # bytes that the role's devices divide
    strict: bool  # every larger batch is quicker


def sampled(random: Random, *, state: bool = False, under_way: bool = False) -> Sampled:
    size, kind = random.randint(1, 9), random.choice(["flat", "falling", "steps"])
    falls = {"flat": [0.0], "falling": [0.1, 1.0, 3.0], "steps": [0.0, 0.0, 0.7]}[kind]
    table = [random.uniform(0.2, 5.0)]
    for _ in range(size - 1):
        table.insert(0, table[0] + random.choice(falls))
    each, own, held = random.randint(0, 5), random.randint(0, 12), random.randint(0, 60) if state else 0
    least = random.choice([1, 1, size])
    there = random.randint(1, 40) if under_way else math.inf
    role = Role(lambda b: table[int(b) - 1] if b >= 1 else table[0] / b, size, least, there, each, lambda n: own + held / n)
    return Sampled(role, table, each, own, held, kind == "falling")


def fits(memory: int, *parts: tuple[Sampled, int]) -> bool:
    """True when these roles with these batches fit on one device together."""
    return sum(role.own + b * role.each for role, b in parts) <= memory


def cases(name: str) -> Iterator[Random]:
    return (Random(f"{name} {i}") for i in range(CASES))


def batches(who: Sampled) -> range:
    return range(int(who.role.least), len(who.table) + 1)


def test_at_the_same_time_is_never_slower_than_in_turns():
    """The theorem, with its exact condition; at the bound, each role has whatever share it needs."""
    seen = Counter[str]()
    for random in cases("theorem"):
        trainer, engine, memory = sampled(random), sampled(random), random.randint(5, 80)
        devices, samples = random.randint(2, 64), random.uniform(1, 500)
        pairs = [*product(batches(trainer), batches(engine))]
        cost = {(t, g): trainer.table[t - 1] + engine.table[g - 1] for t, g in pairs}
        together = [cost[t, g] for t, g in pairs if fits(memory, (trainer, t), (engine, g))]
        fit = [[b for b in batches(w) if fits(memory, (w, b))] for w in (trainer, engine)]
        alone = [min((w.table[b - 1] for b in bs), default=math.inf) for w, bs in zip((trainer, engine), fit, strict=True)]
        in_turns = samples / devices * min(together, default=math.inf)
        found = split(devices, trainer.role, engine.role, memory=memory, samples=samples)
        if not found.fits:
            assert not math.isfinite(sum(alone)) and not together
            seen["too large"] += 1
            continue
        assert found.bound_s == pytest.approx(samples / devices * sum(alone), rel=1e-12)
        assert found.bound_s <= in_turns * (1 + 1e-12)
        best = [p for p in pairs if (trainer.table[p[0] - 1], engine.table[p[1] - 1]) == tuple(alone)]
        shorter = found.bound_s < in_turns * (1 - 1e-12)
        assert shorter is not any(fits(memory, (trainer, t), (engine, g)) for t, g in best)
        binds = not fits(memory, (trainer, max(fit[0])), (engine, max(fit[1])))
        if trainer.strict and engine.strict:
            assert shorter is binds
        if not binds:
            assert not shorter
        seen[f"{'binds' if binds else 'free'}, {'shorter' if shorter else 'equal'}"] += 1
    assert seen.keys() == {"binds, shorter", "binds, equal", "free, equal", "too large"} and min(seen.values()) > 30, seen


def test_no_share_is_better_than_theta():
    for random in cases("theta"):
        overlaps = random.random() < 0.7
        train_s, sample_s = random.uniform(0.01, 9), random.uniform(0.01, 9)
        found = Split(1, random.randint(1, 9), train_s, sample_s, overlaps)
        join, devices = max if overlaps else sum, found.train + found.sample
        shares = [found.theta, *(i / 500 for i in range(1, 500))]
        best, *others = [join((train_s / (1 - theta), sample_s / theta)) / devices for theta in shares]
        assert best == pytest.approx(found.bound_s, rel=1e-12) and min(others) >= best * (1 - 1e-12)
        if overlaps:
            assert found.theta == pytest.approx(sample_s / (train_s + sample_s))


def by_hand(who: Sampled, devices: int, memory: int) -> float:
    """Seconds of one device for a sample on so many devices: the least over batches that fit, one by one."""
    size, there, room = len(who.table), who.role.under_way / devices, memory - who.own - who.state / devices
    possible = [*range(1, size + 1), there, room / who.each if who.each else there]
    fit = [b for b in possible if 0 < b <= min(size, there) and room >= 0 and b * who.each <= room * (1 + 1e-15)]
    return min((who.role.seconds(b) for b in fit if b >= min(who.role.least, there, size)), default=math.inf)


def test_whole_numbers_are_those_of_brute_force():
    seen = Counter[str]()
    for random in cases("whole"):
        trainer, engine = (sampled(random, state=True, under_way=random.random() < 0.5) for _ in "ab")
        memory, devices, samples = random.randint(10, 90), random.randint(2, 24), random.uniform(1, 500)
        overlaps, given = random.random() < 0.7, dict[str, int]()
        if random.random() < 0.2:
            given["train"] = random.randint(1, devices - 1)
        if random.random() < 0.2:
            given["sample"] = random.randint(1, devices - given.get("train", 1))
        found = split(devices, trainer.role, engine.role, memory=memory, samples=samples, overlaps=overlaps, **given)
        costs = dict[tuple[int, int], float]()
        for train, sample in product(range(1, devices), repeat=2):
            free = "train" in given and "sample" in given
            if train + sample != devices and not free:
                continue
            if given.get("train", train) == train and given.get("sample", sample) == sample:
                both = by_hand(trainer, train, memory) / train, by_hand(engine, sample, memory) / sample
                costs[train, sample] = samples * (max(both) if overlaps else sum(both))
        best = min(costs.values())
        if math.isinf(best):
            assert not found.fits
            seen["too large"] += 1
            continue
        assert found.step_s == pytest.approx(best, rel=1e-12) == costs[found.train, found.sample]
        assert found.step_s >= found.bound_s * (1 - 1e-12)
        seen["given" if given else "chosen"] += 1
    assert min(seen[kind] for kind in ("too large", "given", "chosen")) > 50, seen


def test_constant_rates_take_a_number_beside_theta():
    for random in cases("beside"):
        costs, devices = [random.uniform(0.01, 9) for _ in "ab"], random.randint(2, 200)
        found = split(devices, *(Role(lambda _, s=s: s) for s in costs), memory=0.0)
        assert found.theta == pytest.approx(costs[1] / sum(costs), rel=1e-12)
        assert abs(found.sample - min(max(found.theta * devices, 1), devices - 1)) < 1
        assert found.bound_s <= found.step_s * (1 + 1e-12)
        assert devices == 2 or found.step_s <= found.bound_s * devices / (devices - 2) * (1 + 1e-12)


def test_of_equal_splits_the_one_with_the_fewest_trainer_devices():
    even = Role(lambda b: 1 / b, under_way=4.0)  # each of more devices has less to do, so that no step is shorter
    found = split(8, even, even, memory=0.0)
    assert (found.train, found.sample) == (1, 7)


def test_the_fewest_devices_that_hold_a_state():
    role = Role(lambda b: 1.0, most=4, least=4, batch_bytes=2, held=lambda n: 10 + 90 / n)
    assert role.fewest(9, memory=48) == 3 and role.fewest(2, memory=48) is None and role.fewest(99, memory=17) is None
    assert role.batch(3, 48) == 4
