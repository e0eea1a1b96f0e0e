"""List schedules against cases by hand, and against the closed form of queueing theory for machines and one repairman."""

from __future__ import annotations

import heapq
from math import prod

import numpy as np
import pytest

from tidemill.observability.list_schedule import ListSchedule, list_schedule


def test_one_job_takes_the_sum_of_its_phases():
    assert list_schedule([[0.5, 1, 2, 1, 0.25]], 1) == ListSchedule(4.75, 2, 0, 0)


def test_a_server_gives_all_phases_the_same_time():
    assert list_schedule([[0, 2], [0, 2]], 2).makespan == 4
    assert list_schedule([[0, 1], [0, 3]], 2) == ListSchedule(4, 4, 0, 0)  # the first has ended at 2, half way
    assert list_schedule([[0, 1, 9], [0, 3]], 2).makespan == 11
    assert list_schedule([[0, 4], [1, 1]], 2).makespan == 5, "one that comes later is not behind"


def test_a_phase_has_at_most_one_server():
    assert list_schedule([[0, 2]], 1, servers=4).makespan == 2
    assert list_schedule([[0, 2]] * 3, 3, servers=2) == ListSchedule(3, 6, 0, 0)


def test_a_place_takes_the_next_job_as_soon_as_it_is_free():
    assert list_schedule([[1, 1]] * 3, 1) == ListSchedule(6, 3, 4, 2)
    assert list_schedule([[3], [1], [1], [5]], 2) == ListSchedule(7, 0, 2, 0)
    assert list_schedule([[0, 1, 3, 1], [0, 1]], 1).makespan == 6
    assert list_schedule([[0, 1, 3, 1], [0, 1]], 2).makespan == 6, "the second computes while the first is outside"


def test_jobs_without_servers_are_the_usual_list_schedule():
    """Against the few lines that schedule jobs of one phase."""
    rng = np.random.default_rng(0)
    for places in (1, 3, 8, 40):
        lengths = rng.integers(1, 900, 60).tolist()
        free = [0] * places
        for each in lengths:
            heapq.heappush(free, heapq.heappop(free) + each)
        assert list_schedule([[each] for each in lengths], places).makespan == max(free)


@pytest.mark.parametrize("places", [1, 4, 12, 30])
@pytest.mark.parametrize("spread", ["exponential", "lognormal"])
def test_machines_and_one_repairman(places: int, spread: str):
    """A closed queue with one server that is shared: the server's idle share is 1 / sum over k of P! / (P - k)! (s / z)^k,
    for work of mean s and time outside of mean z, whatever their distributions are."""
    rng, jobs, s, z = np.random.default_rng(places), 8_000, 0.1, 1.27
    outside = rng.exponential(z, jobs) if spread == "exponential" else z * rng.lognormal(-0.72, 1.2, jobs)
    found = list_schedule(np.column_stack([outside, rng.exponential(s, jobs)]).tolist(), places)
    terms = [prod(range(places - k + 1, places + 1)) * (s / z) ** k for k in range(places + 1)]
    assert found.work_filled / found.filled == pytest.approx(1 - 1 / sum(terms), rel=0.04)
