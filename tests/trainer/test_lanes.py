"""Micro-batches side by side: which run together, with how many threads, and that nothing that they add up is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trainer_cases import CPU, assert_same, batch, decoder, gradients, parameters, value_model

from tidemill.models.kernels.library import native
from tidemill.models.served_linear import Linear, gathering
from tidemill.models.trained_linear import Matrix
from tidemill.runtime.cpu_sharing import Cores
from tidemill.trainer import parallel_micro_batches, training_pass
from tidemill.trainer.parallel_micro_batches import Lanes, lanes_for

WAIT_S = 20.0  # for what another thread is about to do


class Share(Cores):
    """What a process is lent changes under its hands."""

    def __init__(self, threads: int) -> None:
        self.threads, self.taken = threads, 0

    def share(self) -> int:
        return self.threads

    def take(self) -> None:
        self.taken += 1


@pytest.fixture(autouse=True)
def short_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else these micro-batches would be too short to run side by side."""
    monkeypatch.setattr(parallel_micro_batches, "LEAST", 1)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    threads, before = torch.get_num_threads(), threading.active_count()
    yield
    assert torch.get_num_threads() == threads and threading.active_count() == before


@pytest.mark.parametrize(
    ("threads", "tokens", "longest", "expected"),
    [
        *((1, 9000, 10, 1), (2, 1152, 191, 2), (2, 1023, 191, 1), (8, 4096, 191, 8)),
        *((8, 4096, 1500, 2), (8, 4096, 9000, 1), (4, 0, 0, 1)),
    ],
)
def test_they_share_a_budget_and_each_holds_its_longest_row(
    monkeypatch: pytest.MonkeyPatch, threads: int, tokens: int, longest: int, expected: int
) -> None:
    monkeypatch.setattr(parallel_micro_batches, "LEAST", 512)
    assert lanes_for(threads, tokens, longest) == expected


def test_each_runs_once_in_as_many_threads_as_there_are_lanes() -> None:
    """Every lane waits for the others at its first part: were there fewer, this would not end."""
    side, met, seen = Lanes(6), threading.Barrier(3, timeout=WAIT_S), []
    here = threading.local()

    def run(part: int) -> None:
        if not hasattr(here, "been"):
            here.been = True
            met.wait()
        seen.append((part, threading.get_ident(), torch.get_num_threads()))

    side.each(run, range(20), 3)
    assert sorted(part for part, *_ in seen) == [*range(20)] and side.begun == 20
    assert len({thread for _, thread, _ in seen}) == 3 and threading.get_ident() in {thread for _, thread, _ in seen}
    assert {threads for *_, threads in seen} == {2}  # six among three


def test_one_lane_is_the_caller_with_its_own_threads_and_takes_cores_before_each_pass() -> None:
    cores = Share(2)
    side, seen = Lanes(2, cores), []

    def run(part: int) -> None:
        side.take()
        seen.append((part, threading.get_ident(), torch.get_num_threads()))

    side.each(run, [1, 2, 3], 1)
    side.each(run, [4], 2)  # there is nothing to run beside it
    assert seen == [(part, threading.get_ident(), torch.get_num_threads()) for part in (1, 2, 3, 4)] and cores.taken == 4


def test_a_lane_closes_when_its_core_is_lent_and_opens_when_it_is_back() -> None:
    cores, seen = Share(2), dict[int, list[int]]()
    side, met, caller = Lanes(2, cores), threading.Barrier(2, timeout=WAIT_S), threading.get_ident()

    def run(part: int) -> None:
        seen.setdefault(threading.get_ident(), []).append(part)
        if part in (0, 1):  # side by side
            if met.wait() == 0:
                cores.threads = 1
            met.wait()
        elif part < 8:  # the caller alone
            assert threading.get_ident() == caller
            for other in [each for each in threading.enumerate() if each.name == "lane-1"]:
                other.join(WAIT_S)
                assert not other.is_alive()
            if part == 7:
                cores.threads = 2
        elif part in (8, 9):  # side by side again
            met.wait()
        side.take()

    side.each(run, range(12), 2)
    assert sorted(chain(*seen.values())) == [*range(12)] and 2 <= len(seen) <= 3
    assert cores.taken == 0  # in lanes it is not a thread more or fewer that is lent


@pytest.mark.parametrize("where", ["caller", "other"])
def test_what_one_raises_comes_out_when_nothing_runs_any_more_and_nothing_else_is_begun(where: str) -> None:
    side, met, begun, ended = Lanes(2), threading.Barrier(2, timeout=WAIT_S), [], []
    raised, caller = threading.Event(), threading.get_ident()

    def run(part: int) -> None:
        begun.append(part)
        if part > 1:
            return
        met.wait()
        if (threading.get_ident() == caller) is (where == "caller"):
            raised.set()
            raise ValueError(f"{part} is wrong")
        assert raised.wait(WAIT_S)
        ended.append(part)

    with pytest.raises(ValueError, match="is wrong"):
        side.each(run, range(50), 2)
    assert len(ended) == 1 and len(begun) <= 3  # one may have been begun before the other had raised
    side.each(lambda _: None, range(3), 2)  # it goes on


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("own_critic", [None, True, False])
def test_gradients_are_those_of_one_micro_batch_after_another(
    autocast: torch.dtype | None, tied: bool, own_critic: bool | None
) -> None:
    model = decoder(hidden_size=64, head_dim=16, intermediate_size=96, tie_word_embeddings=tied)
    critic = None if own_critic is None else value_model(None if own_critic else model)
    samples = [row for seed in range(4) for row in batch(seed)]
    expected, result = gradients(samples, model, 40, critic=critic, autocast=autocast)
    for _ in range(3):
        side = Lanes(3)
        found, beside = gradients(samples, model, 120, critic=critic, autocast=autocast, lanes=side)
        assert side.begun > 6
        assert_same(found, expected, 2e-2 if autocast else 1e-5)
        assert beside.metrics.keys() == result.metrics.keys()
        for name, value in result.metrics.items():
            near = pytest.approx(value, rel=2e-2 if autocast else 1e-4, abs=1e-3 if autocast else 1e-5)
            assert beside.metrics[name] == near
        for own, other in zip(result.logprobs, beside.logprobs, strict=True):
            np.testing.assert_allclose(own, other, atol=3e-2 if autocast else 1e-5)


def test_logprobs_without_a_gradient() -> None:
    model, samples = decoder(), [row for seed in range(3) for row in batch(seed)]
    modes = []
    model.register_forward_hook(lambda *_: modes.append((threading.get_ident(), torch.is_grad_enabled())))
    one = training_pass.forward(model, samples, training_pass.Compute(CPU, 40))
    modes.clear()
    met = threading.Barrier(2, timeout=WAIT_S)
    first = threading.local()

    def once(*_: Any) -> None:
        if not hasattr(first, "been"):
            first.been = True
            met.wait()

    model.register_forward_pre_hook(once)
    two = training_pass.forward(model, samples, training_pass.Compute(CPU, 80, lanes=Lanes(2)))
    assert len({thread for thread, _ in modes}) == 2 and not any(wants for _, wants in modes)
    assert all(p.grad is None for p in parameters(model).values())
    for own, other in zip(one, two, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)


@contextmanager
def meeting(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Iterator[list[bool]]:
    """Whether two threads were ever in this function at once. Whoever is in it waits a moment for the other to come."""
    lock, inside, together = threading.Lock(), 0, list[bool]()
    somebody: threading.Event = threading.Event()
    function: Callable[..., Any] = getattr(owner, name)

    def watched(*given: Any, **named: Any) -> Any:
        nonlocal inside
        with lock:
            inside += 1
            if inside > 1:
                somebody.set()
        together.append(somebody.wait(0.1))
        try:
            return function(*given, **named)
        finally:
            with lock:
                inside -= 1

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, watched)
        yield together


def test_two_never_add_to_one_gradient_at_once_and_both_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Linear(64, 96, False)
    d, x = torch.randn(5, 96), torch.randn(5, 64)
    with gathering(module), meeting(monkeypatch, Tensor, "addmm_") as together:
        assert isinstance(module.gathered, Matrix)
        both = [threading.Thread(target=module.gathered.gradient, args=(d, x)) for _ in range(2)]
        for each in both:
            each.start()
        for each in both:
            each.join(WAIT_S)
    assert together == [False, False]
    assert module.weight.grad is not None
    torch.testing.assert_close(module.weight.grad, 2 * d.T @ x)


@pytest.mark.parametrize("prepare", ["_read", "_in_order"])
def test_a_matrix_is_prepared_once_for_all_lanes(monkeypatch: pytest.MonkeyPatch, prepare: str) -> None:
    matrix, compiled = Matrix(Linear(64, 96, False).weight, gathers=True), native()
    if compiled is None and prepare == "_in_order":
        pytest.skip("no compiled kernels")
    given = (torch.bfloat16,) if prepare == "_read" else (compiled, False)
    with meeting(monkeypatch, Tensor, "to") as together:
        several = [threading.Thread(target=getattr(matrix, prepare), args=given) for _ in range(3)]
        for each in several:
            each.start()
        for each in several:
            each.join(WAIT_S)
    assert together == [False]
