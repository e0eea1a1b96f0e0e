"""Host memory: as large as what is in it, pinned once, and tensors that move to it and come back as they were."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from tidemill.models.host_memory import MovedToHost, host_tensors

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The memory that CUDA was asked to pin, by its address."""
    pinned: dict[int, int] = {}

    def register(address: int, size: int, flags: int) -> int:
        pinned[address] = size
        return 0

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    return pinned


@pytest.mark.runs
def test_what_is_pinned_is_not_rounded_up_and_is_given_back(registered: dict[int, int]):
    likes = [
        torch.empty(1_100_003),
        torch.empty(3, 5, dtype=torch.bfloat16),
        torch.empty(0, 4),
        torch.empty((), dtype=torch.int64),
    ]
    made = host_tensors(likes, CUDA)
    size = sum(like.nbytes for like in likes)
    assert size <= sum(registered.values()) < size + 64 * len(likes), "PyTorch would pin 8 MiB for these 4.2"
    assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in likes]
    assert all(not t.any() and t.is_contiguous() and t.data_ptr() % 64 == 0 for t in made if t.numel())
    for number, tensor in enumerate(made):
        tensor.fill_(number + 1)
    assert all((tensor == number + 1).all() for number, tensor in enumerate(made)), "they share no memory"
    last = made[0]
    del made, tensor
    gc.collect()
    assert registered, "one of them is still in use"
    del last
    gc.collect()
    assert not registered


def test_nothing_is_pinned_where_there_is_no_device(registered: dict[int, int]):
    assert host_tensors([torch.empty(7)], CPU)[0].tolist() == [0.0] * 7 and not registered


def test_tensors_leave_their_memory_and_come_back_as_they_were():
    whole = torch.randn(1000)
    tensors = [whole[:300], whole[300:].view(7, 100), torch.arange(9), torch.empty(0)]  # two share their memory
    before = [t.clone() for t in tensors]
    moved = MovedToHost()
    for _ in range(2):
        moved.move(tensors)
        moved.move(tensors)
        assert all(t.untyped_storage().nbytes() == 0 for t in tensors)
        moved.back()
        moved.back()
        assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    room = moved._room[0].data_ptr()
    moved.move(tensors)
    assert moved._room[0].data_ptr() == room, "memory on the host is taken once"
    moved.back()
    whole.fill_(3.0)
    moved.move(tensors[:1])  # others than before
    moved.back()
    assert whole.tolist() == [3.0] * 1000
