"""One operation of a link, beside an operation of a stand-in that ends when the test says."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tidemill.core.errors import TransferFailed
from tidemill.weight_sync.process_groups import Link, Watch


class EndsAfterALook:
    """An operation that ends just after a wait for it was given up."""

    def __init__(self, error: str = "") -> None:
        self._error, self._ended = error, False

    def wait(self, *_: Any) -> None:
        if not self._ended:
            self._ended = True
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        return self._ended


def link_of(work: EndsAfterALook) -> Link:
    store = torch.distributed.HashStore()
    group: Any = SimpleNamespace(broadcast=lambda *_: work)
    return Link(store, group, 2)


def watch() -> Watch:
    return Watch(time.monotonic() + 60, threading.Event())


def test_an_operation_that_ends_between_a_wait_and_its_look_has_succeeded() -> None:
    link = link_of(EndsAfterALook())
    link.broadcast(torch.zeros(1), watch())
    assert not link.broken


def test_an_operation_that_fails_between_a_wait_and_its_look_says_why() -> None:
    link = link_of(EndsAfterALook("Connection closed by peer"))
    with pytest.raises(TransferFailed, match="broke off: Connection closed by peer"):
        link.broadcast(torch.zeros(1), watch())
    assert link.broken == "Connection closed by peer"
