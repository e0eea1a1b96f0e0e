"""Copies to a device through pinned memory: whole, and of what was given at the time."""

from __future__ import annotations

import pytest
import torch

from tidemill.models.kernels.cuda import transfers
from tidemill.models.kernels.cuda.transfers import Uploads


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_copied_is_what_was_given(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "DEVICE_PIECE_BYTES", 4096)
    copies, room, pairs = Uploads(torch.device(device)), torch.empty(0), []
    for number in range(20):
        dtype = (torch.float32, torch.bfloat16, torch.uint8)[number % 3]
        expected = torch.arange(3 * (100 + 80 * number)).remainder(251).add(number).view(3, -1).to(dtype)
        room = expected.clone()  # from 5 on float32 does not fit: it is copied all the same
        into = torch.zeros(6, 2000, dtype=dtype, device=device)[1:4, : expected.shape[1]]
        copies.copy(into, room)
        room.fill_(7)
        pairs.append((into, expected))
    for into, expected in pairs:
        assert torch.equal(into.cpu(), expected)
