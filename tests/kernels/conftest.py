"""The kernels, for tests that need them."""

from __future__ import annotations

import pytest

from tidemill.kernels.library import native
from tidemill.kernels.native import Native


@pytest.fixture
def kernels() -> Native:
    found = native()
    if found is None:
        pytest.skip("no C compiler")
    return found
