"""Sandboxes of the levels that this machine has."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sandbox_levels import USER

from tidemill.sandbox.escapes.suite import small_limits
from tidemill.sandbox.sandbox_pool import Sandbox
from tidemill.sandbox.sandbox_settings import LEVELS
from tidemill.sandbox.supervisor_process import reason_against


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    if why := reason_against(request.param, USER):
        pytest.skip(f"{request.param}: {why}")
    return request.param


@pytest.fixture
async def sandbox(level: str) -> AsyncIterator[Sandbox]:
    async with Sandbox(small_limits(level)) as opened:
        assert opened.level == level
        yield opened
