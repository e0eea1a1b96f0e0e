"""Conversations of an episode that a later call may go on from, by the id of their last reply."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from tidemill.core.errors import ApiError

MOST = 512  # conversations of an episode
MOST_BYTES = 16 << 20  # of the bodies and replies in them


class StoredResponses:
    """The latest of them. Those that go on from one another share its messages."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[list[dict[str, Any]], int]] = OrderedDict()
        self._bytes = 0

    def keep(self, name: str, messages: list[dict[str, Any]], size: int) -> None:
        """Keep a conversation under this name. size: the bytes by which it is longer than the one before, about."""
        self._kept[name] = messages, size
        self._bytes += size
        while len(self._kept) > MOST or self._bytes > MOST_BYTES:
            self._bytes -= self._kept.popitem(last=False)[1][1]

    def find(self, name: str) -> list[dict[str, Any]]:
        """The conversation of this name. Raises ApiError."""
        if name not in self._kept:
            message = f"previous_response_id {name[:100]!r} is not known here, or is too old: send the whole conversation"
            raise ApiError(message, status=404, param="previous_response_id", code="previous_response_not_found")
        return self._kept[name][0]
